"""The stems on Hopper without a GPU: where they are chosen, how their work is cut, and their launches."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wgmma_support import assert_constants, parameters

from cupy_resnet.conv2d import H100, PRECISIONS, Device, stem, stem_choice, stem_wgmma, stem_wgmma_tf32
from cupy_resnet.conv2d.stem_wgmma import COSTS, PIXELS, Costs, Tiling, column_tiles, tiling
from cupy_resnet.conv2d.stem_wgmma_tf32 import TAP_COLUMNS, in_steps
from cupy_resnet.conv2d.tf32_parts import split_tf32
from cupy_resnet.conv2d.variants import NULL, Filter
from cupy_resnet.explanation import explain
from cupy_resnet.jit import launching, list_kernels
from cupy_resnet.kernels import configurations
from cupy_resnet.networks import describe

NAME = stem_wgmma.SOURCE
TF32_NAME = stem_wgmma_tf32.SOURCE
A100 = replace(H100, name="A100", compute_capability=(8, 0), shared_memory_per_block=163 << 10)
B200 = replace(H100, name="B200", compute_capability=(10, 0))
SMS = H100.sm_count


@pytest.mark.parametrize(
    ("precision", "gpu", "kernel"),
    [
        ("fp16", H100, NAME),
        ("bf16", H100, NAME),
        ("tf32", H100, TF32_NAME),
        ("tf32", A100, "conv2d_stem"),
        ("fp32-tc", H100, TF32_NAME),
        ("fp32-tc", A100, "conv2d_stem"),
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
        ((17, 224, 224, 3), 64, None),
        ((16, 224, 224, 3), 128, None),
        ((0, 224, 224, 3), 64, "conv2d_stem"),
    ],
)
def test_few_outputs_are_computed_by_the_other_kernel(x_shape: tuple[int, ...], K: int, kernel: str | None) -> None:
    """None: the kernel for Hopper. That for fp32 is the faster for any number."""
    of_two_bytes = kernel or NAME
    for precision, chosen in {
        "fp16": of_two_bytes,
        "bf16": of_two_bytes,
        "tf32": TF32_NAME,
        "fp32-tc": TF32_NAME,
    }.items():
        assert stem_choice.choose_stem(PRECISIONS[precision], x_shape, (K, 7, 7, 3), H100) == (chosen, "")


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


@pytest.mark.parametrize(
    ("precision", "x_shape", "gpu", "reason"),
    [
        ("fp16", (2, 224, 224, 3), H100, "computes in tf32 or fp32-tc, not in fp16"),
        ("tf32", (2, 224, 224, 3), A100, "needs compute capability 9.0, A100 has 8.0"),
        ("tf32", (2**24, 999, 5, 3), H100, "has more tiles than an int counts"),
        ("tf32", (2, 1, 1, 3), H100, ""),
        ("fp32-tc", (2, 224, 224, 3), H100, ""),
    ],
)
def test_what_the_one_for_fp32_supports(precision: str, x_shape: tuple[int, ...], gpu: Device, reason: str) -> None:
    supported = stem_wgmma_tf32.supports_stem_wgmma_tf32(PRECISIONS[precision], x_shape, (64, 7, 7, 3), gpu)
    assert supported == (not reason, reason)


@pytest.mark.parametrize(
    ("precision", "gpu", "kernel"),
    [("fp16", H100, NAME), ("fp32-tc", H100, TF32_NAME), ("fp16", A100, "conv2d_stem"), ("tf32", A100, "conv2d_stem")],
)
def test_explain_names_it(precision: str, gpu: Device, kernel: str) -> None:
    steps = explain(describe("resnet18"), (32, 3, 224, 224), engine="cuda", device=gpu, precision=precision)
    assert [step.kernel for step in steps if step.record.op == "stem"] == [kernel]


@pytest.mark.parametrize("name", [NAME, TF32_NAME])
def test_every_form_is_compiled_for_nothing_but_sm_90a(name: str) -> None:
    forms = configurations(name)
    assert len({tuple(form.items()) for form in forms}) == len(forms) == 2 * 4 * 4 * len(PIXELS)
    (kernel,) = [kernel for kernel in list_kernels() if kernel.name == name]
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


@pytest.mark.parametrize(
    ("precision", "pixels", "element", "channels"),
    [
        ("tf32", 64, "float", 4),
        ("tf32", 80, "Half", 3),
        ("tf32", 112, "float", 4),
        ("tf32", 112, "unsigned char", 4),
        ("fp32-tc", 64, "BFloat16", 1),
        ("fp32-tc", 112, "float", 3),
        ("fp32-tc", 112, "float", 4),
    ],
)
def test_the_launch_for_fp32_agrees_with_the_kernels_constants(
    precision: str, pixels: int, element: str, channels: int
) -> None:
    pytest.importorskip("cupy")
    products = PRECISIONS[precision].products
    shared = stem_wgmma_tf32.shared_memory(products, pixels, element, channels)
    expected = {
        "THREADS": stem_wgmma_tf32.THREADS,
        "FILTERS": stem_wgmma.FILTERS,
        "MIN_BLOCKS": stem_wgmma_tf32.COSTS[products].blocks_per_multiprocessor,
        "SHARED_BYTES": shared,
        "STEPS": 7 * channels,
        "PARTS": 1 if products == 1 else 2,
        "sizeof(StemParams)": stem.PARAMS_DTYPE.itemsize,
    }
    assert_constants(TF32_NAME, stem_wgmma_tf32._defines(precision, element, channels, pixels), expected)
    assert shared + 4 * 256 * channels + 1024 <= H100.shared_memory_per_block


def test_a_filter_in_steps_has_every_tap_once_and_zeros_beside() -> None:
    weight = np.arange(1, 128 * 49 * 3 + 1, dtype=np.float32).reshape(128, 7, 7, 3)  # whole numbers of TF32 and a rest
    high, low = split_tf32(weight)
    for products, parts in ((1, (high,)), (3, (high, low))):
        steps = in_steps(weight, products, np)
        assert steps.shape == (2, 21, len(parts), 2, 64, 4)
        assert steps.flags.c_contiguous
        for number, part in enumerate(parts):
            assert not steps[:, :, number, 1, :, 3].any(), "an eighth row"
            in_order = np.concatenate((steps[:, :, number, 0], steps[:, :, number, 1, :, :3]), axis=-1)
            # Group, channel, column, filter, row.
            back = in_order.reshape(2, 3, 7, 64, 7)[:, :, np.argsort(TAP_COLUMNS)]
            np.testing.assert_array_equal(back.transpose(0, 3, 4, 2, 1).reshape(weight.shape), part)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000])
def test_a_filter_that_is_not_finite_stays_so(bits: int) -> None:
    """A NaN of which rounding makes a zero, and one of which cutting off makes infinity, too."""
    weight = np.zeros((64, 7, 7, 3), np.float32)
    weight.view(np.uint32)[5, 0, 0, 0] = bits
    word = in_steps(weight, 1, np)[0, 0, 0, 0, 5, 0]
    np.testing.assert_array_equal(word, weight[5, 0, 0, 0])
    assert (word.view(np.uint32) & np.uint32(0x1FFF)) == 0 or np.isnan(word)


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
@pytest.mark.parametrize("costs", [COSTS, *stem_wgmma_tf32.COSTS.values()], ids=["", "tf32", "fp32-tc"])
def test_a_cut_is_sensible(size: tuple[int, int], N: int, K: int, costs: Costs) -> None:
    cut = tiling((N, *size, K), SMS, costs)
    assert cut.pixels in PIXELS
    assert 1 <= cut.stripe_rows <= size[0]
    assert cut.units == N * -(-size[0] // cut.stripe_rows) * column_tiles(size[1], cut.pixels)
    grid = stem_wgmma.launch_grid(cut, K, SMS, costs)
    assert grid[1] == K // 64
    assert 1 <= grid[0] <= cut.units
    assert grid[0] * grid[1] <= costs.blocks_per_multiprocessor * SMS


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


@pytest.mark.parametrize(
    ("N", "cut"),
    [
        (1, Tiling(64, 1, 112)),
        (32, Tiling(112, 14, 128)),  # a block for each multiprocessor
        (256, Tiling(112, 56, 256)),
    ],
)
def test_cuts_of_imagenets_map_for_fp32(N: int, cut: Tiling) -> None:
    for costs in stem_wgmma_tf32.COSTS.values():
        assert tiling((N, 56, 56, 64), SMS, costs) == cut


# The launch ---------------------------------------------------------------------------------------------------------


class Array:
    """An array that is a shape, strides and a dtype."""

    device = SimpleNamespace(id=0)

    def __init__(self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> None:
        memory = np.empty(shape, dtype)
        self.shape, self.dtype, self.itemsize = shape, memory.dtype, memory.itemsize
        self.strides = strides or memory.strides


def launched(
    monkeypatch: pytest.MonkeyPatch, module: Any, launch: Any, precision: str, vectors: Any
) -> tuple[Any, Array, Any]:
    """What is launched for 8 images (kernel, grid, block, arguments, options), its input, and its output."""
    made: list[tuple[Any, ...]] = []
    jit = SimpleNamespace(
        get_function=lambda name, *, defines: (name, defines),
        launch=lambda kernel, grid, block, arguments, **options: made.append((kernel, grid, block, arguments, options)),
    )
    monkeypatch.setattr(module, "jit", jit)
    monkeypatch.setattr(module, "multiprocessors_of", lambda device: SMS)
    x = Array((8, 224, 224, 3), np.float32, (4 * 3 * 224 * 224, 4 * 224, 4, 4 * 224 * 224))
    y: Any = Array((8, 56, 56, 64), PRECISIONS[precision].storage)
    keys = (module.SOURCE, (module.SOURCE, PRECISIONS[precision].products))
    filter: Any = Filter("weight", dict.fromkeys(keys, "cells"))  # type: ignore[arg-type]
    launch(x, filter, "bias", *vectors, y, PRECISIONS[precision])
    (call,) = made
    return call, x, y


def assert_arguments(name: str, arguments: tuple[Any, ...], x: Array, y: Array, vectors: Any) -> dict[str, Any]:
    """Returns a launch's arguments by name, after those that both kernels have in common."""
    names = [declaration.split()[-1] for declaration in parameters(name)]
    assert names == ["x", "filter", "bias", "mean", "std", "y", "params", "stripe_rows"]
    given = dict(zip(names, arguments, strict=True))
    assert arguments[0] is x, "a recorded launch is repeated with another first argument"
    assert (given["filter"], given["bias"], given["y"]) == ("cells", "bias", y)
    assert (given["mean"], given["std"]) == ((NULL, NULL) if vectors[0] is None else vectors)
    assert given["params"].tolist() == [(8, 224, 224, 64, 112, 112, 56, 56, 3 * 224 * 224, 224, 1, 224 * 224)]
    return given


either_way = pytest.mark.parametrize("vectors", [(None, None), ("mean", "std")])


@either_way
def test_the_launch(monkeypatch: pytest.MonkeyPatch, vectors: Any) -> None:
    call, x, y = launched(monkeypatch, stem_wgmma, stem_wgmma.launch_stem_wgmma, "bf16", vectors)
    kernel, grid, block, arguments, options = call
    assert kernel == (NAME, stem_wgmma._defines("bf16", "float", 3, 112))
    assert (grid, block) == ((224, 1), (256,))
    assert options == {"shared": stem_wgmma.shared_memory(112, "float", 3), "waits": True}
    given = assert_arguments(NAME, arguments, x, y, vectors)
    assert bytes(launching._as_bytes(given["stripe_rows"])) == np.int32(2).tobytes()


@either_way
@pytest.mark.parametrize("precision", ["tf32", "fp32-tc"])
def test_the_launch_for_fp32(monkeypatch: pytest.MonkeyPatch, vectors: Any, precision: str) -> None:
    launch = stem_wgmma_tf32.launch_stem_wgmma_tf32
    call, x, y = launched(monkeypatch, stem_wgmma_tf32, launch, precision, vectors)
    kernel, grid, block, arguments, options = call
    products = PRECISIONS[precision].products
    cut = tiling(y.shape, SMS, stem_wgmma_tf32.COSTS[products])
    assert kernel == (TF32_NAME, stem_wgmma_tf32._defines(precision, "float", 3, cut.pixels))
    assert (grid, block) == ((min(cut.units, SMS), 1), (512,))
    assert options == {"shared": stem_wgmma_tf32.shared_memory(products, cut.pixels, "float", 3), "waits": True}
    given = assert_arguments(TF32_NAME, arguments, x, y, vectors)
    assert bytes(launching._as_bytes(given["stripe_rows"])) == np.int32(cut.stripe_rows).tobytes()
