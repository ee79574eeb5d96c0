"""conv2d_stem_wgmma without a GPU: where it is chosen, how its work is cut, and its launch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wgmma_support import assert_constants, parameters

from cupy_resnet.conv2d import H100, PRECISIONS, Device, stem, stem_choice, stem_wgmma
from cupy_resnet.conv2d.stem_wgmma import PIXELS, Tiling, column_tiles, tiling
from cupy_resnet.conv2d.variants import NULL, Filter
from cupy_resnet.explanation import explain
from cupy_resnet.jit import launching, list_kernels
from cupy_resnet.kernels import configurations
from cupy_resnet.networks import describe

NAME = stem_wgmma.SOURCE
A100 = replace(H100, name="A100", compute_capability=(8, 0), shared_memory_per_block=163 << 10)
B200 = replace(H100, name="B200", compute_capability=(10, 0))
SMS = H100.sm_count


@pytest.mark.parametrize(
    ("precision", "gpu", "kernel"),
    [
        ("fp16", H100, NAME),
        ("bf16", H100, NAME),
        ("tf32", H100, "conv2d_stem"),
        ("fp32-tc", H100, "conv2d_stem"),
        ("fp32", H100, None),
        ("fp16", A100, "conv2d_stem"),
        ("fp16", B200, "conv2d_stem"),
    ],
)
def test_the_kernel_of_a_stem(precision: str, gpu: Device, kernel: str | None) -> None:
    chosen, reason = stem_choice.choose_stem(PRECISIONS[precision], (32, 224, 224, 3), (64, 7, 7, 3), gpu)
    assert chosen == kernel
    assert bool(reason) == (kernel is None)
    assert chosen is None or chosen in stem_choice.STEM_LAUNCHES


@pytest.mark.parametrize(
    ("x_shape", "K", "kernel"),
    [
        ((1, 224, 224, 3), 64, "conv2d_stem"),
        ((8, 224, 224, 3), 64, "conv2d_stem"),
        ((16, 224, 224, 3), 64, "conv2d_stem"),
        ((17, 224, 224, 3), 64, NAME),
        ((16, 224, 224, 3), 128, NAME),
        ((0, 224, 224, 3), 64, "conv2d_stem"),
    ],
)
def test_few_outputs_are_computed_by_the_other_kernel(x_shape: tuple[int, ...], K: int, kernel: str) -> None:
    for precision in ("fp16", "bf16"):
        assert stem_choice.choose_stem(PRECISIONS[precision], x_shape, (K, 7, 7, 3), H100) == (kernel, "")


@pytest.mark.parametrize(
    ("precision", "x_shape", "filter_shape", "gpu", "reason"),
    [
        ("fp16", (2, 224, 224, 3), (64, 7, 7, 3), A100, "needs compute capability 9.0, A100 has 8.0"),
        ("tf32", (2, 224, 224, 3), (64, 7, 7, 3), H100, "computes in fp16 or bf16, not in tf32"),
        ("fp16", (2, 224, 224, 3), (96, 7, 7, 3), H100, "needs a multiple of 64 filters, not 96"),
        ("fp16", (2**24, 999, 5, 3), (64, 7, 7, 3), H100, "has more tiles than an int counts"),
        ("bf16", (2, 1, 1, 4), (128, 7, 7, 4), H100, ""),
    ],
)
def test_what_it_supports(
    precision: str, x_shape: tuple[int, ...], filter_shape: tuple[int, ...], gpu: Device, reason: str
) -> None:
    supported = stem_wgmma.supports_stem_wgmma(PRECISIONS[precision], x_shape, filter_shape, gpu)
    assert supported == (not reason, reason)


@pytest.mark.parametrize(("gpu", "kernel"), [(H100, NAME), (A100, "conv2d_stem")])
def test_explain_names_it(gpu: Device, kernel: str) -> None:
    steps = explain(describe("resnet18"), (32, 3, 224, 224), engine="cuda", device=gpu, precision="fp16")
    assert [step.kernel for step in steps if step.record.op == "stem"] == [kernel]


def test_every_form_is_compiled_for_nothing_but_sm_90a() -> None:
    forms = configurations(NAME)
    assert len({tuple(form.items()) for form in forms}) == len(forms) == 2 * 4 * 4 * len(PIXELS)
    (kernel,) = [kernel for kernel in list_kernels() if kernel.name == NAME]
    assert kernel.min_arch_of({}) == "sm_90a"


@pytest.mark.parametrize(
    ("pixels", "element", "channels"),
    [(64, "float", 4), (80, "Half", 3), (112, "float", 4), (112, "BFloat16", 1), (112, "unsigned char", 3)],
)
def test_the_launch_agrees_with_the_kernels_constants(pixels: int, element: str, channels: int) -> None:
    pytest.importorskip("cupy")
    shared = stem_wgmma.shared_memory(pixels, element, channels)
    expected = {
        "THREADS": stem_wgmma.THREADS,
        "FILTERS": stem_wgmma.FILTERS,
        "MIN_BLOCKS": stem_wgmma.BLOCKS_PER_MULTIPROCESSOR,
        "SHARED_BYTES": shared,
        "2 * ACCUMULATORS": pixels,
        "WORDS": 7 * 8 * 4 // 2,
        "sizeof(StemParams)": stem.PARAMS_DTYPE.itemsize,
    }
    assert_constants(NAME, stem_wgmma._defines("fp16", element, channels, pixels), expected)
    assert shared + 2 * 256 * channels + 1024 <= H100.shared_memory_per_block


# How the pooled map is cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pixels", PIXELS)
def test_tiles_have_every_pooled_column_once(pixels: int) -> None:
    """A tile begins at pooled column t · (pixels / 2 − 1); all but the first leave that column out."""
    for PQ in range(1, 300):
        columns = []
        for t in range(column_tiles(PQ, pixels)):
            first = t * (pixels // 2 - 1)
            columns += [q for q in range(first + (t > 0), first + pixels // 2) if q < PQ]
        assert columns == list(range(PQ))


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (56, 56), (57, 58), (75, 75), (128, 128)])
@pytest.mark.parametrize("N", [1, 2, 8, 37, 256])
@pytest.mark.parametrize("K", [64, 128])
def test_a_cut_is_sensible(size: tuple[int, int], N: int, K: int) -> None:
    cut = tiling((N, *size, K), SMS)
    assert cut.pixels in PIXELS
    assert 1 <= cut.stripe_rows <= size[0]
    assert cut.units == N * -(-size[0] // cut.stripe_rows) * column_tiles(size[1], cut.pixels)
    grid = stem_wgmma.launch_grid(cut, K, SMS)
    assert grid[1] == K // 64
    assert 1 <= grid[0] <= cut.units
    assert grid[0] * grid[1] <= 2 * SMS


@pytest.mark.parametrize(
    ("N", "cut"),
    [
        (1, Tiling(64, 1, 112)),  # as many multiprocessors as can be
        (8, Tiling(112, 2, 224)),
        (32, Tiling(112, 7, 256)),  # two blocks for each
        (256, Tiling(112, 56, 256)),  # whole images: no row is computed twice
    ],
)
def test_cuts_of_imagenets_map(N: int, cut: Tiling) -> None:
    assert tiling((N, 56, 56, 64), SMS) == cut


# The launch ---------------------------------------------------------------------------------------------------------


class Array:
    """An array that is a shape, strides and a dtype."""

    device = SimpleNamespace(id=0)

    def __init__(self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> None:
        memory = np.empty(shape, dtype)
        self.shape, self.dtype, self.itemsize = shape, memory.dtype, memory.itemsize
        self.strides = strides or memory.strides


@pytest.mark.parametrize("normalized", [False, True])
def test_the_launch(monkeypatch: pytest.MonkeyPatch, normalized: bool) -> None:
    made: list[tuple[Any, ...]] = []
    jit = SimpleNamespace(
        get_function=lambda name, *, defines: (name, defines),
        launch=lambda kernel, grid, block, arguments, **options: made.append((kernel, grid, block, arguments, options)),
    )
    monkeypatch.setattr(stem_wgmma, "jit", jit)
    monkeypatch.setattr(stem_wgmma, "multiprocessors_of", lambda device: SMS)
    x = Array((8, 224, 224, 3), np.float32, (4 * 3 * 224 * 224, 4 * 224, 4, 4 * 224 * 224))
    y: Any = Array((8, 56, 56, 64), np.uint16)
    filter: Any = Filter("weight", {NAME: "cells"})  # type: ignore[arg-type, dict-item]
    vectors: Any = ("mean", "std") if normalized else (None, None)
    stem_wgmma.launch_stem_wgmma(x, filter, "bias", *vectors, y, PRECISIONS["bf16"])  # type: ignore[arg-type]
    ((kernel, grid, block, arguments, options),) = made
    assert kernel == (NAME, stem_wgmma._defines("bf16", "float", 3, 112))
    assert (grid, block) == ((224, 1), (256,))
    assert options == {"shared": stem_wgmma.shared_memory(112, "float", 3), "waits": True}
    names = [declaration.split()[-1] for declaration in parameters(NAME)]
    assert names == ["x", "filter", "bias", "mean", "std", "y", "params", "stripe_rows"]
    given = dict(zip(names, arguments, strict=True))
    assert arguments[0] is x, "a recorded launch is repeated with another first argument"
    assert (given["filter"], given["bias"], given["y"]) == ("cells", "bias", y)
    assert (given["mean"], given["std"]) == (vectors if normalized else (NULL, NULL))
    assert given["params"].tolist() == [(8, 224, 224, 64, 112, 112, 56, 56, 3 * 224 * 224, 224, 1, 224 * 224)]
    assert bytes(launching._as_bytes(given["stripe_rows"])) == np.int32(2).tobytes()
