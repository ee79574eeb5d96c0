"""Stems that are one kernel, from pixels to the pooled map, against normalisation in float32 and taps in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_resnet.conv2d import PRECISIONS, Conv2dProblem, stem_wgmma, stem_wgmma_tf32
from cupy_resnet.conv2d.stem import pooled_shape
from cupy_resnet.conv2d.stem_choice import STEM_LAUNCHES
from cupy_resnet.conv2d.stem_wgmma import PIXELS, Tiling, column_tiles
from cupy_resnet.conv2d.variants import Filter
from gpu.reference import as_torch, conv2d_float64, loaded, poisoned, stored, to_tf32

pytestmark = pytest.mark.gpu

TENSOR_CORES = [name for name, precision in PRECISIONS.items() if precision.tensor_cores]
FORMS = [
    *(("conv2d_stem", precision) for precision in TENSOR_CORES),
    *((module.SOURCE, precision) for module in (stem_wgmma, stem_wgmma_tf32) for precision in module.PRECISION_NAMES),
]
"""(kernel, precision)"""
every_kernel = pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("conv2d_stem", "fp16"),
        ("conv2d_stem_wgmma", "fp16"),
        ("conv2d_stem_wgmma_tf32", "tf32"),
        ("conv2d_stem_wgmma_tf32", "fp32-tc"),
    ],
)
every_form = pytest.mark.parametrize(("kernel", "precision"), FORMS)

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
INTEGRAL = ((0.5, 0.0, 1.0, 0.0), (0.25, 1.0, 0.5, 1.0))
"""Mean and std that turn 0 and 1, and any integer, into integers."""


def integral_pixels(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    """Pixels (CuPy) of dtype `kind` that stay integers when they are normalised by `INTEGRAL` or not at all."""
    import cupy

    random = cupy.random.RandomState(seed)
    if kind == "uint8":
        return (random.randint(0, 2, shape) * 255).astype(cupy.uint8)
    values = random.randint(-1, 2, shape).astype(cupy.float32)
    return stored(values, "bf16") if kind == "bfloat16" else values.astype(kind)


def values_of(x: Any) -> Any:
    """Pixels as float32, those of uint8 between 0 and 1; uint16 is bfloat16."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else loaded(x)


def max_pool(y: Any) -> Any:
    """3×3, stride 2, padding 1, of (N, P, Q, K); NaN spreads."""
    import cupy

    N, P, Q, K = y.shape
    PP, PQ = (P - 1) // 2 + 1, (Q - 1) // 2 + 1
    padded = cupy.full((N, 2 * PP + 1, 2 * PQ + 1, K), -cupy.inf, y.dtype)
    padded[:, 1 : P + 1, 1 : Q + 1] = y
    pooled = padded[:, : 2 * PP - 1 : 2, : 2 * PQ - 1 : 2]
    for r in range(3):
        for s in range(3):
            pooled = cupy.maximum(pooled, padded[:, r : r + 2 * PP - 1 : 2, s : s + 2 * PQ - 1 : 2])
    return pooled


class Stem:
    """A kernel, filters and bias of a stem in a precision, and what it should give."""

    def __init__(self, kernel: str, precision: str, C: int = 3, K: int = 64, *, integral: bool = True) -> None:
        import cupy

        if kernel != "conv2d_stem" and cupy.cuda.Device().compute_capability != "90":
            pytest.skip("runs on compute capability 9.0 only")
        random = cupy.random.RandomState(C + K)
        shape = (K, 7, 7, C)
        if integral:
            weight, bias = random.randint(-1, 2, shape), random.randint(-2, 3, (K,))
        else:
            weight, bias = random.standard_normal(shape) * (49 * C) ** -0.5, random.standard_normal((K,))
        self.kernel, self.precision = kernel, precision
        self.weight = stored(weight.astype(cupy.float32), precision)
        self.bias = bias.astype(cupy.float32)
        self.filter = Filter(self.weight)

    def launch(self, x: Any, normalization: Any, y: Any) -> Any:
        """Runs the kernel into `y` and returns that."""
        import cupy

        vectors = (None, None)
        if normalization is not None:
            vectors = tuple(cupy.asarray(values[: x.shape[3]], dtype=cupy.float32) for values in normalization)
        STEM_LAUNCHES[self.kernel](x, self.filter, self.bias, *vectors, y, PRECISIONS[self.precision])
        return y

    def expected(self, x: Any, normalization: Any) -> Any:
        """The pooled map in float64."""
        import cupy

        pixels = values_of(x)
        if normalization is not None:
            mean, std = (cupy.asarray(values[: x.shape[3]], dtype=cupy.float32) for values in normalization)
            pixels = (pixels - mean) / std
        pixels, weight = loaded(stored(pixels, self.precision)), loaded(self.weight)
        if self.precision == "tf32":
            finite = cupy.isfinite(pixels)
            pixels, weight = cupy.where(finite, to_tf32(pixels), pixels), to_tf32(weight)
        N, H, W, C = x.shape
        sizes = {"R": 7, "S": 7, "stride_h": 2, "stride_w": 2, "pad_h": 3, "pad_w": 3}
        problem = Conv2dProblem(N=N, H=H, W=W, C=C, K=len(self.bias), **sizes)
        return max_pool(cupy.maximum(conv2d_float64(problem, pixels, weight) + self.bias, 0))


def as_it_is(x: Any) -> Any:
    return x


def channels_first(x: Any) -> Any:
    """A view of NCHW memory."""
    import cupy

    return cupy.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)


def part_of_more(x: Any) -> Any:
    """A view of a larger array, in which NaN, or a grey that is no integer, lies around each row and pixel."""
    import cupy

    N, H, W, C = x.shape
    memory = cupy.full((N, H + 3, W + 3, C + 1), {"uint8": 77, "uint16": 0xFFFF}.get(str(x.dtype), cupy.nan), x.dtype)
    view = memory[:, 1 : H + 1, 2 : W + 2, 1:]
    view[...] = x
    return view


LAYOUTS: tuple[Callable[[Any], Any], ...] = (as_it_is, channels_first, part_of_more)


@pytest.mark.parametrize("kind", ["uint8", "float32", "float16", "bfloat16"])
@every_form
def test_exact_on_small_integers(kernel: str, precision: str, kind: str, guarded: Any) -> None:
    """Every pixel, those of the outermost rows and columns too: the padding's zeros come after normalisation."""

    for N, H, W, K in ((2, 33, 47, 64), (1, 30, 29, 128), (3, 8, 5, 64)):
        stem = Stem(kernel, precision, K=K)
        for normalization in (None, INTEGRAL):
            pixels = integral_pixels(kind, (N, H, W, 3), seed=H)
            expected = stem.expected(pixels, normalization)
            assert float(expected.max()) <= 256
            for layout in LAYOUTS:
                y = guarded(pooled_shape(pixels.shape, K), dtype=PRECISIONS[precision].storage)
                stem.launch(layout(pixels), normalization, y.array)
                what = f"{(N, H, W)} → {K}, {layout.__name__}, normalisation {normalization}"
                wrong = loaded(y.array) != expected
                assert not wrong.any(), f"{int(wrong.sum())} of {wrong.size} outputs are wrong: {what}"
                assert y.margins_intact(), f"wrote outside its output: {what}"


@every_kernel
def test_a_flipped_view_is_read_as_it_is(kernel: str, precision: str) -> None:
    """Negative strides, as of images with blue first that are turned round."""
    import cupy

    stem = Stem(kernel, precision)
    pixels = integral_pixels("float32", (2, 21, 18, 3), seed=1)
    turned = pixels[:, ::-1, :, ::-1]
    y = stem.launch(turned, INTEGRAL, poisoned(pooled_shape(pixels.shape, 64), precision))
    assert cupy.array_equal(loaded(y), stem.expected(cupy.ascontiguousarray(turned), INTEGRAL))


@every_form
def test_every_size_from_1_to_70(kernel: str, precision: str) -> None:
    import cupy

    stem = Stem(kernel, precision)
    wrong = []
    for H in range(1, 71):
        W = H * 37 % 70 + 1  # each width once as well
        pixels = integral_pixels("float32", (1, H, W, 3), seed=H)
        y = stem.launch(pixels, INTEGRAL, poisoned(pooled_shape(pixels.shape, 64), precision))
        if not cupy.array_equal(loaded(y), stem.expected(pixels, INTEGRAL)):
            wrong.append((H, W))
    assert not wrong


@pytest.mark.parametrize("C", [1, 2, 4])
@every_form
def test_other_numbers_of_channels(kernel: str, precision: str, C: int) -> None:
    import cupy

    stem = Stem(kernel, precision, C=C)
    for layout in LAYOUTS:
        pixels = integral_pixels("float32", (2, 31, 38, C), seed=C)
        y = stem.launch(layout(pixels), INTEGRAL, poisoned(pooled_shape(pixels.shape, 64), precision))
        assert cupy.array_equal(loaded(y), stem.expected(pixels, INTEGRAL)), layout.__name__


@every_form
def test_photographs_worth_of_pixels_by_torchs_tolerances(kernel: str, precision: str) -> None:
    import cupy
    import torch

    stem = Stem(kernel, precision, integral=False)
    pixels = cupy.random.RandomState(0).randint(0, 256, (4, 224, 224, 3)).astype(cupy.uint8)
    y = stem.launch(pixels, IMAGENET, poisoned((4, 56, 56, 64), precision))
    expected = stored(stem.expected(pixels, IMAGENET), precision)
    torch.testing.assert_close(as_torch(y), as_torch(expected))


@every_form
def test_a_non_finite_pixel_reaches_exactly_its_receptive_field(kernel: str, precision: str) -> None:
    import cupy

    stem = Stem(kernel, precision)
    for value in (np.nan, np.inf, -np.inf):
        pixels = integral_pixels("float32", (2, 40, 44, 3), seed=2)
        pixels[0, 20, 22, 1] = value
        y = loaded(stem.launch(pixels, None, poisoned(pooled_shape(pixels.shape, 64), precision)))
        if precision == "fp32-tc":  # splitting makes NaN of an infinite operand
            pixels[0, 20, 22, 1] = np.nan
        expected = stem.expected(pixels, None)
        assert not bool(cupy.isfinite(expected[0]).all())
        assert bool(cupy.isfinite(expected[1]).all())
        np.testing.assert_array_equal(cupy.asnumpy(y), cupy.asnumpy(expected), err_msg=str(value))


@every_form
def test_the_same_image_has_the_same_answer_at_every_place_and_every_time(kernel: str, precision: str) -> None:
    import cupy

    stem = Stem(kernel, precision, integral=False)
    pixels = cupy.random.RandomState(1).standard_normal((5, 50, 60, 3)).astype(cupy.float32)
    pixels[3] = pixels[0]
    first = stem.launch(pixels, None, poisoned(pooled_shape(pixels.shape, 64), precision))
    assert cupy.array_equal(first[0].view(np.uint8), first[3].view(np.uint8))
    for _ in range(3):
        again = stem.launch(pixels, None, poisoned(first.shape, precision))
        assert cupy.array_equal(again.view(np.uint8), first.view(np.uint8))


@every_kernel
def test_offsets_beyond_2_to_the_31(kernel: str, precision: str) -> None:
    import cupy

    shape = (520, 1190, 1190, 3)
    assert np.prod(shape, dtype=np.int64) > 2**31
    stem = Stem(kernel, precision)
    stem.bias[...] = 0
    pixels = cupy.zeros(shape, cupy.uint8)
    pixels[-1:] = integral_pixels("uint8", (1, *shape[1:]), seed=3)
    y = stem.launch(pixels, None, poisoned(pooled_shape(shape, 64), precision))
    assert y.size > 2**31
    assert cupy.array_equal(loaded(y[-1:]), stem.expected(pixels[-1:], None))
    assert not y[:-1].any()  # NaN would count as true


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize(
    ("module", "precision"),
    [(stem_wgmma, "fp16"), (stem_wgmma_tf32, "tf32"), (stem_wgmma_tf32, "fp32-tc")],
    ids=["fp16", "tf32", "fp32-tc"],
)
def test_however_the_map_is_cut(module: Any, precision: str, pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes and tiles of every size, on few and on many multiprocessors."""
    import cupy

    stem = Stem(module.SOURCE, precision)
    image = integral_pixels("float32", (3, 101, 243, 3), seed=4)
    shape = pooled_shape(image.shape, 64)
    expected = stem.expected(image, INTEGRAL)
    for stripe_rows in (1, 2, 5, 13, 26):
        units = 3 * -(-shape[1] // stripe_rows) * column_tiles(shape[2], pixels)
        cut = Tiling(pixels, stripe_rows, units)
        monkeypatch.setattr(module, "tiling", lambda *_, cut=cut: cut)
        for sm_count in (1, 132):
            monkeypatch.setattr(module, "multiprocessors_of", lambda _, count=sm_count: count)
            y = stem.launch(image, INTEGRAL, poisoned(shape, precision))
            assert cupy.array_equal(loaded(y), expected), f"{stripe_rows} rows, {sm_count} multiprocessors"
