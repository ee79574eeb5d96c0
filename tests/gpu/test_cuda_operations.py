"""The CUDA engine's operations in every precision against the NumPy engine.

What only moves, compares or adds once has one right answer per element type: the float32 result rounded to it. The
rest is compared with float64 within torch's tolerances for the type of the result.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, conv_cases, normal, torch_conv2d
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.conv2d.tf32_parts import nearest_tf32
from cupy_resnet.engines.base import stem_by_parts
from cupy_resnet.engines.bfloat16 import from_bfloat16, to_bfloat16
from cupy_resnet.engines.cuda_engine import CudaEngine
from cupy_resnet.engines.numpy_engine import NumpyEngine

pytestmark = pytest.mark.gpu

drawn = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
channels = st.sampled_from([1, 3, 4, 5, 8, 24, 64, 136])
shapes = st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9), channels)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
by_storage = pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
"""One precision per element type: for operations that multiply nothing on tensor cores."""

TOLERANCES = {
    "fp32": {"rtol": 1.3e-6, "atol": 1e-5},
    "fp16": {"rtol": 1e-3, "atol": 1e-5},
    "bf16": {"rtol": 1.6e-2, "atol": 1e-5},
}
"""torch.testing's, by what activations are stored as."""

INPUTS = {"uint8": np.uint8, "float32": np.float32, "float16": np.float16, "bfloat16": np.int16}


@cache
def engine(precision: str) -> CudaEngine:
    return CudaEngine(precision=precision)


@cache
def reference(dtype: str = "float32") -> NumpyEngine:
    return NumpyEngine(dtype)  # type: ignore[arg-type]


def stored(x: np.ndarray, precision: str) -> Any:
    """Floats as activations on the GPU."""
    import cupy

    storage = PRECISIONS[precision].storage
    return cupy.asarray(to_bfloat16(x) if storage == np.uint16 else x.astype(storage))


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """Floats as float32 that a precision's activations can hold."""
    storage = PRECISIONS[precision].storage
    return from_bfloat16(to_bfloat16(x)) if storage == np.uint16 else x.astype(storage).astype(np.float32)


def rounded_to_multiply(x: np.ndarray, precision: str) -> np.ndarray:
    """float32 as a precision's kernels multiply what they round: TF32 is the nearest of 10 bits, ties away from 0."""
    if precision in ("fp32", "fp32-tc"):
        return x
    if precision == "tf32":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return rounded(x, precision)


def with_specials(shape: tuple[int, ...], seed: int, precision: str) -> np.ndarray:
    """Normal deviates, some replaced by NaN, Inf, signed zero or a large number, that the precision can hold."""
    rng = np.random.default_rng(seed)
    x = normal(shape, seed)
    where = rng.random(shape) < 0.05
    x[where] = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 6e4, -6e4], np.float32), where.sum())
    return rounded(x, precision)


def result(precision: str, op: str, *inputs: np.ndarray, vectors: tuple[np.ndarray, ...] = (), **options: Any) -> Any:
    """Runs an operation on activations (and float32 vectors) and returns float32."""
    ops = engine(precision)
    y = getattr(ops, op)(*(stored(x, precision) for x in inputs), *(ops.asarray(v) for v in vectors), **options)
    assert y.dtype == PRECISIONS[precision].storage
    return ops.to_numpy(y)


def assert_exact(precision: str, op: str, *inputs: np.ndarray, **options: Any) -> None:
    """The operation's result is the float32 engine's, rounded once."""
    expected = getattr(reference(), op)(*inputs, **options)
    with np.errstate(over="ignore"):
        expected = rounded(expected, precision)
    np.testing.assert_array_equal(result(precision, op, *inputs, **options), expected)


@by_storage
@drawn
@given(shape=shapes, seed=st.integers(0, 99))
def test_pointwise(precision: str, shape: tuple[int, ...], seed: int) -> None:
    x, y = with_specials(shape, seed, precision), with_specials(shape, seed + 100, precision)
    assert_exact(precision, "relu", x)
    assert_exact(precision, "add", x, y)
    assert_exact(precision, "add_relu", x, y)


@by_storage
@drawn
@given(shape=shapes, seed=st.integers(0, 99))
def test_batch_norm2d(precision: str, shape: tuple[int, ...], seed: int) -> None:
    x, C = rounded(normal(shape, seed), precision), shape[3]
    if x.size:
        x.flat[seed % x.size] = np.nan
    vectors = (*(normal((C,), seed) for seed in (3, 4, 5)), np.abs(normal((C,), 6)) + np.float32(0.1))
    doubles = (array.astype(np.float64) for array in (x, *vectors))
    expected = reference("float64").batch_norm2d(*doubles, eps=1e-3).astype(np.float32)
    assert_close(result(precision, "batch_norm2d", x, vectors=vectors, eps=1e-3), expected, **TOLERANCES[precision])


@by_storage
@pytest.mark.parametrize("C", [1, 5, 8, 12, 64])
@pytest.mark.parametrize("N", [0, 1, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (1, 3, 0), (4, 1, 2), ((2, 5), (3, 1), (0, 2))]
)
def test_pooling(precision: str, C: int, N: int, kernel: Any, stride: Any, padding: Any) -> None:
    window = {"kernel_size": kernel, "stride": stride, "padding": padding}
    for H, W in ((7, 6), (5, 9)):
        assert_exact(precision, "max_pool2d", with_specials((N, H, W, C), H, precision), **window)
        x = rounded(normal((N, H, W, C), H), precision)
        for counted in (True, False):
            options = {**window, "count_include_pad": counted}
            expected = reference("float64").avg_pool2d(x.astype(np.float64), **options).astype(np.float32)
            assert_close(result(precision, "avg_pool2d", x, **options), expected, **TOLERANCES[precision])


@by_storage
@pytest.mark.parametrize("C", [1, 5, 64, 72, 512, 2048])
@pytest.mark.parametrize(("N", "H", "W"), [(1, 7, 7), (3, 1, 1), (2, 8, 9), (2, 31, 3), (0, 7, 7)])
def test_global_avg_pool2d(precision: str, N: int, H: int, W: int, C: int) -> None:
    ops, x = engine(precision), rounded(normal((N, H, W, C)), precision)
    if N == 3:
        x[1, 0, 0, 0] = np.nan
    y = ops.global_avg_pool2d(stored(x, precision))
    assert y.dtype == np.float32
    assert_close(ops.to_numpy(y), reference("float64").global_avg_pool2d(x.astype(np.float64)).astype(np.float32))
    for n in range(N):  # the same image, the same bits, whatever is beside it
        alone = ops.global_avg_pool2d(stored(x[n : n + 1], precision))
        np.testing.assert_array_equal(ops.to_numpy(alone), ops.to_numpy(y)[n : n + 1])


@by_storage
@drawn
@given(shape=shapes, before=st.integers(0, 17), after=st.integers(0, 17), stride=st.integers(1, 3), whole=st.booleans())
def test_pad_channels(precision: str, shape: Any, before: int, after: int, stride: int, whole: bool) -> None:
    if whole:  # channels that come in chunks of 16 bytes
        shape, before, after = (*shape[:3], 8 * shape[3]), 8 * before, 8 * after
    x = with_specials(shape, 1, precision)
    assert_exact(precision, "pad_channels", x, before=before, after=after, stride=stride)


@every_precision
@drawn
@given(case=conv_cases())
def test_conv2d_is_exact_on_integers(precision: str, case: Any) -> None:
    ops, arrays = engine(precision), case.arrays(exact=True)
    weight = ops.filter(arrays["weight"])
    x, residual = (None if arrays[key] is None else stored(arrays[key], precision) for key in ("x", "residual"))
    bias = None if arrays["bias"] is None else ops.asarray(arrays["bias"])
    y = ops.conv2d(x, weight, bias, residual=residual, **case.arguments)
    assert y.dtype == PRECISIONS[precision].storage
    np.testing.assert_array_equal(ops.to_numpy(y), rounded(torch_conv2d(arrays, case.arguments), precision))


@every_precision
@pytest.mark.parametrize("N", [0, 1, 2, 8, 9, 15, 16, 40])
@pytest.mark.parametrize(("C", "K"), [(512, 100), (64, 10), (37, 11)])
def test_linear(precision: str, N: int, C: int, K: int) -> None:
    ops = engine(precision)
    x, weight, bias = normal((N, C)), normal((K, C), 1) / np.float32(np.sqrt(C)), normal((K,), 2)
    arrays = [x, weight]
    if N > 8 and precision not in ("fp32", "fp32-tc"):
        arrays = [rounded_to_multiply(array, "tf32") for array in arrays]
    expected = reference("float64").linear(*(array.astype(np.float64) for array in arrays))
    on_gpu = [ops.asarray(array) for array in (x, weight, bias)]
    assert_close(ops.to_numpy(ops.linear(*on_gpu[:2])), expected.astype(np.float32))
    assert_close(ops.to_numpy(ops.linear(*on_gpu)), (expected + bias).astype(np.float32))


def test_up_to_8_images_linear_gives_each_what_it_gives_it_alone() -> None:
    for C in (2048, 512, 37):
        ops, weight = engine("fp16"), engine("fp16").asarray(normal((100, C), 1))
        x = ops.asarray(normal((8, C)))
        together = ops.to_numpy(ops.linear(x, weight))
        for count in (1, 3):
            for n in range(8 - count + 1):
                alone = ops.to_numpy(ops.linear(x[n : n + count], weight))
                np.testing.assert_array_equal(alone, together[n : n + count])


@drawn
@given(N=st.integers(0, 20), K=st.integers(1, 300), scale=st.floats(0.1, 30))
def test_softmax(N: int, K: int, scale: float) -> None:
    x = normal((N, K), scale=scale)
    expected = reference("float64").softmax(x.astype(np.float64)).astype(np.float32)
    ops = engine("fp32")
    assert_close(ops.to_numpy(ops.softmax(ops.asarray(x))), expected)


def test_softmax_of_nan_and_infinity() -> None:
    x = normal((4, 1000))
    x[0, 3], x[1, 5], x[2] = np.nan, np.inf, -np.inf
    ops = engine("fp32")
    assert_close(ops.to_numpy(ops.softmax(ops.asarray(x))), reference().softmax(x))


def draw_pixels(shape: tuple[int, ...], dtype: str, *, nan: bool) -> np.ndarray:
    """Pixels of one of `INPUTS`, the last one NaN if it can be; bfloat16 as its bits."""
    if dtype == "uint8":
        return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    x = normal(shape)
    if x.size and nan:
        x.flat[-1] = np.nan
    return to_bfloat16(x).view(np.int16) if dtype == "bfloat16" else x.astype(dtype)


ARRANGEMENTS = ("nhwc", "nchw", "flipped", "cropped")


def arranged(x: np.ndarray, arrangement: str) -> Any:
    """(N, H, W, C) pixels on the GPU with strides of their own."""
    import cupy

    if arrangement == "nchw":
        return cupy.asarray(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).transpose(0, 2, 3, 1)
    if arrangement == "flipped":
        return cupy.asarray(np.ascontiguousarray(x[:, ::-1, ::-1]))[:, ::-1, ::-1]
    if arrangement == "cropped":
        N, H, W, C = x.shape
        whole = cupy.zeros((N, H + 3, W + 5, C + 1), x.dtype)
        whole[:, 1 : H + 1, 2 : W + 2, :C] = cupy.asarray(x)
        return whole[:, 1 : H + 1, 2 : W + 2, :C]
    return cupy.asarray(x)


@by_storage
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("shape", [(2, 9, 7, 3), (1, 33, 40, 1), (2, 5, 4, 40), (0, 4, 4, 3)])
def test_pixels_are_torchvisions_rounded_once(precision: str, dtype: str, normalized: bool, shape: Any) -> None:
    import cupy

    ops, x, C = engine(precision), draw_pixels(shape, dtype, nan=True), shape[3]
    options = {"mean": np.linspace(0.4, 0.5, C), "std": np.linspace(0.2, 0.3, C)} if normalized else {}
    expected = rounded(reference().pixels(x, **options), precision)
    for arrangement in ARRANGEMENTS:
        pixels = arranged(x, arrangement)
        y = ops.pixels(pixels, **options)
        assert y.flags.c_contiguous
        assert y.dtype == PRECISIONS[precision].storage
        np.testing.assert_array_equal(ops.to_numpy(y), expected, err_msg=arrangement)
        out = cupy.empty_like(y)
        assert ops.pixels(pixels, **options, out=out) is out
        np.testing.assert_array_equal(ops.to_numpy(out), expected, err_msg=arrangement)
    turned = cupy.asarray(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    np.testing.assert_array_equal(ops.to_numpy(ops.nchw_to_nhwc(turned, **options)), expected)
    if normalized:
        np.testing.assert_array_equal(ops.to_numpy(ops.normalize(cupy.asarray(x), **options)), expected)


@by_storage
def test_pixels_that_are_activations_already_are_not_copied(precision: str) -> None:
    import cupy

    ops = engine(precision)
    x = stored(normal((2, 5, 6, 3)), precision)
    assert ops.pixels(x).data.ptr == x.data.ptr
    if precision == "bf16":
        assert ops.pixels(x.view(cupy.int16)).data.ptr == x.data.ptr
    out = cupy.empty_like(x)
    ops.pixels(x, out=out)
    assert cupy.array_equal(out, x, equal_nan=False)


@by_storage
@drawn
@given(shape=shapes)
def test_nhwc_to_nchw_gives_float32(precision: str, shape: tuple[int, ...]) -> None:
    ops, x = engine(precision), with_specials(shape, 2, precision)
    y = ops.nhwc_to_nchw(stored(x, precision))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(ops.to_numpy(y), x.transpose(0, 3, 1, 2))


@every_precision
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("shape", [(2, 37, 46, 3), (1, 18, 3, 1), (0, 30, 30, 3)])
def test_stem(precision: str, dtype: str, arrangement: str, shape: tuple[int, ...]) -> None:
    """Fused and in parts, against the same roundings in float64: of pixels, filter, and the map before it is pooled."""
    import cupy

    ops, exact, C = engine(precision), reference("float64"), shape[3]
    x, bias = draw_pixels(shape, dtype, nan=False), normal((64,), 3)
    weight = normal((64, 7, 7, C), 4) / np.float32(7)
    options = {"mean": np.linspace(0.4, 0.5, C), "std": np.linspace(0.2, 0.3, C)}
    pixels = rounded_to_multiply(rounded(reference().pixels(x, **options), precision), precision)
    filters = nearest_tf32(weight) if precision == "tf32" else rounded(weight, precision)
    doubles = [array.astype(np.float64) for array in (pixels, filters, bias)]
    convolved = rounded(exact.conv2d(*doubles, stride=2, padding=3, relu=True).astype(np.float32), precision)
    expected = reference().max_pool2d(convolved, 3, stride=2, padding=1)
    tolerance = TOLERANCES.get(precision, TOLERANCES["fp32"])
    arguments = (arranged(x, arrangement), ops.filter(weight), ops.asarray(bias), *options.values())
    y = ops.stem(*arguments)
    assert y.dtype == PRECISIONS[precision].storage
    assert_close(ops.to_numpy(y), expected, **tolerance)
    out = cupy.empty_like(y)
    assert ops.stem(*arguments, out=out) is out
    assert cupy.array_equal(out, y)
    assert_close(ops.to_numpy(stem_by_parts(ops, *arguments, None)), expected, **tolerance)


@every_precision
def test_the_stem_is_one_kernel_where_it_can_be(precision: str) -> None:
    kernel, reason = engine(precision).stem_kernel((1, 224, 224, 3), (64, 7, 7, 3))
    assert (kernel is not None) == PRECISIONS[precision].tensor_cores, reason
    demanding = CudaEngine(precision=precision, kernel="conv2d_implicit_gemm")
    assert demanding.stem_kernel((1, 224, 224, 3), (64, 7, 7, 3)) == (None, "conv2d_implicit_gemm was asked for")


@every_precision
def test_filters_are_rounded_once(precision: str) -> None:
    ops = engine(precision)
    weight = np.full((1, 1, 1, 4), 1 + 2**-8 + 2**-40)  # just above a tie of bfloat16, on one for float32 → bfloat16
    weight[..., 1:] = [1e300, np.nan, -0.5]
    first = {"fp16": 1 + 2**-8, "bf16": 1 + 2**-7}.get(precision, 1 + 2**-8)
    np.testing.assert_array_equal(ops.to_numpy(ops.filter(weight).weight).ravel(), [first, np.inf, np.nan, -0.5])
