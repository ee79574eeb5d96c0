"""The CUDA engine's operations against the NumPy engine in float64, and what it refuses."""

import threading
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, conv_cases, integers, normal, torch_conv2d
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.engines.cuda_engine import CudaEngine, describe_device
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.errors import UnsupportedProblemError

pytestmark = pytest.mark.gpu

drawn = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
shapes = st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4, 5, 8, 33, 64]))


def reference() -> NumpyEngine:
    return NumpyEngine(dtype=np.float64)


def check(cuda_engine: Any, op: str, *arrays: np.ndarray, **options: Any) -> None:
    """Runs one op on both engines and compares with torch's float32 tolerances."""
    expected = getattr(reference(), op)(*(a.astype(np.float64) for a in arrays), **options)
    actual = getattr(cuda_engine, op)(*(cuda_engine.asarray(a) for a in arrays), **options)
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    assert_close(cuda_engine.to_numpy(actual), expected.astype(np.float32))


@drawn
@given(case=conv_cases())
def test_conv2d(cuda_engine: Any, case: Any) -> None:
    arrays = case.arrays(exact=True)
    on_gpu = {k: None if v is None else cuda_engine.asarray(v) for k, v in arrays.items()}
    y = cuda_engine.conv2d(**on_gpu, **case.arguments)
    np.testing.assert_array_equal(cuda_engine.to_numpy(y), torch_conv2d(arrays, case.arguments))


@drawn
@given(shape=shapes, bad=st.booleans())
def test_pointwise(cuda_engine: Any, shape: tuple[int, ...], bad: bool) -> None:
    x, y = normal(shape, 1), normal(shape, 2)
    if bad and x.size:
        x.flat[0], y.flat[-1] = np.nan, -np.inf
    check(cuda_engine, "relu", x)
    check(cuda_engine, "add", x, y)
    check(cuda_engine, "add_relu", x, y)
    channels = shape[3]
    weight, bias, mean = (normal((channels,), seed) for seed in (3, 4, 5))
    check(cuda_engine, "batch_norm2d", x, weight, bias, mean, np.abs(normal((channels,), 6)) + 0.1, eps=1e-3)


@drawn
@given(shape=shapes, kernel=st.integers(1, 4), stride=st.integers(1, 3), data=st.data(), bad=st.booleans())
def test_pooling(cuda_engine: Any, shape: Any, kernel: int, stride: int, data: Any, bad: bool) -> None:
    padding = data.draw(st.integers(0, kernel // 2))
    x = normal((shape[0], shape[1] + kernel, shape[2] + kernel, shape[3]))
    if bad and x.size:
        x.flat[len(x.flat) // 2] = np.nan
    check(cuda_engine, "max_pool2d", x, kernel_size=kernel, stride=stride, padding=padding)
    for counted in (True, False):
        check(
            cuda_engine,
            "avg_pool2d",
            x,
            kernel_size=kernel,
            stride=stride,
            padding=padding,
            count_include_pad=counted,
        )
    check(cuda_engine, "global_avg_pool2d", x)


@drawn
@given(N=st.integers(0, 20), C=st.integers(1, 300), K=st.integers(1, 70))
def test_head(cuda_engine: Any, N: int, C: int, K: int) -> None:
    x, weight, bias = normal((N, C)), normal((K, C), 1) / np.float32(np.sqrt(C)), normal((K,), 2)
    check(cuda_engine, "linear", x, weight, bias)
    check(cuda_engine, "linear", x, weight)
    check(cuda_engine, "softmax", 5 * x)


def test_softmax_of_nan_and_infinity(cuda_engine: Any) -> None:
    x = normal((4, 1000))
    x[0, 3], x[1, 5], x[2] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        check(cuda_engine, "softmax", x)


@drawn
@given(shape=shapes, before=st.integers(0, 9), after=st.integers(0, 9), stride=st.integers(1, 3))
def test_pad_channels(cuda_engine: Any, shape: Any, before: int, after: int, stride: int) -> None:
    check(cuda_engine, "pad_channels", normal(shape), before=before, after=after, stride=stride)


@drawn
@given(shape=shapes, uint8=st.booleans(), normalized=st.booleans())
def test_layouts_equal_torchvision_bit_for_bit(cuda_engine: Any, shape: Any, uint8: bool, normalized: bool) -> None:
    import cupy

    N, H, W, C = shape
    x = np.random.default_rng(0).integers(0, 256, (N, C, H, W), dtype=np.uint8) if uint8 else normal((N, C, H, W))
    options = {"mean": np.linspace(0.4, 0.5, C), "std": np.linspace(0.2, 0.3, C)} if normalized else {}
    expected = NumpyEngine().nchw_to_nhwc(x, **options)
    actual = cuda_engine.nchw_to_nhwc(cupy.asarray(x), **options)
    np.testing.assert_array_equal(cupy.asnumpy(actual), expected)
    if normalized:
        turned = cupy.ascontiguousarray(cupy.asarray(x).transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(cupy.asnumpy(cuda_engine.normalize(turned, **options)), expected)
    back = cuda_engine.nhwc_to_nchw(actual)
    np.testing.assert_array_equal(cupy.asnumpy(back), expected.transpose(0, 3, 1, 2))


def test_large_layouts_and_elementwise_beyond_2_to_the_31(cuda_engine: Any) -> None:
    import cupy

    size = (1 << 31) + 5
    x = cupy.zeros((size // 5 + 1, 1, 1, 5), cupy.float32)
    x[-1] = cupy.asarray([[[-1.0, 2.0, -3.0, 4.0, 5.0]]])
    y = cuda_engine.relu(x)
    assert y[-1].ravel().tolist() == [0, 2, 0, 4, 5]
    assert not y[:-1].any()
    turned = cuda_engine.nhwc_to_nchw(x)
    assert turned[-1].ravel().tolist() == [-1, 2, -3, 4, 5]


def test_strided_unaligned_and_other_dtypes_are_made_ready(cuda_engine: Any) -> None:
    import cupy

    whole = cupy.arange(4 * 6 * 6 * 8, dtype=cupy.float32).reshape(4, 6, 6, 8) % 5 - 2
    weight = cuda_engine.filter(integers((8, 3, 3, 8)))
    views = {"strided": whole[:, ::2], "channels": whole.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1)}
    views["unaligned"] = cupy.concatenate([cupy.zeros(1, cupy.float32), whole.ravel()])[1:].reshape(whole.shape)
    assert views["unaligned"].data.ptr % 16
    for name, view in views.items():
        expected = cuda_engine.conv2d(cupy.ascontiguousarray(view).copy(), weight, padding=1)
        assert cupy.array_equal(cuda_engine.conv2d(view, weight, padding=1), expected), name
        assert cupy.array_equal(cuda_engine.relu(view), cupy.maximum(view, 0)), name
    assert cuda_engine.asarray(np.arange(4, dtype=">f8")[::-1]).tolist() == [3, 2, 1, 0]


def test_errors_name_what_is_wrong(cuda_engine: Any) -> None:
    import cupy

    x, weight = cupy.zeros((1, 4, 4, 8), cupy.float32), cupy.zeros((8, 3, 3, 8), cupy.float32)
    with pytest.raises(TypeError, match="float16"):
        cuda_engine.conv2d(x.astype(cupy.float16), weight)
    with pytest.raises(TypeError, match="ndarray"):
        cuda_engine.conv2d(cupy.asnumpy(x), weight)
    with pytest.raises(ValueError, match="C=8"):
        cuda_engine.conv2d(x, weight[..., :4])
    with pytest.raises(ValueError, match="residual"):
        cuda_engine.conv2d(x, weight, residual=x)
    with pytest.raises(ValueError, match="unknown kernel"):
        CudaEngine(kernel="conv3d")
    with pytest.raises(UnsupportedProblemError, match="needs stride 1"):
        CudaEngine(kernel="conv2d_winograd", strict=True).conv2d(x, weight, stride=2)


def test_a_demanded_kernel_falls_back_where_it_does_not_apply() -> None:
    import cupy

    x, weight = cupy.ones((1, 4, 4, 8), cupy.float32), cupy.ones((8, 1, 1, 8), cupy.float32)
    assert (CudaEngine(kernel="conv2d_winograd").conv2d(x, weight) == 8).all()


def test_work_runs_on_the_callers_current_stream(cuda_engine: Any) -> None:
    """A chain on a side stream, behind a long kernel there, sees that kernel's result."""
    import cupy

    weight = cuda_engine.filter(integers((64, 3, 3, 64)))
    x = cupy.zeros((64, 56, 56, 64), cupy.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    for value in range(1, 6):
        with stream:
            for _ in range(20):
                x.fill(0)
            x.fill(value)
            y = cuda_engine.relu(cuda_engine.conv2d(x, weight))
            assert float(y.max()) == value * max(0.0, float(weight.weight.sum(axis=(1, 2, 3)).max()))


def test_threads_share_an_engine() -> None:
    import cupy

    engine = CudaEngine()
    weight = engine.filter(integers((32, 3, 3, 32)))
    inputs = [cupy.asarray(integers((2, 9, 9, 32), seed)) for seed in range(8)]
    expected = [engine.conv2d(x, weight, padding=1) for x in inputs]
    cupy.cuda.Device().synchronize()
    failures: list[int] = []

    def work(index: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(30):
                if not cupy.array_equal(engine.conv2d(inputs[index], weight, padding=1), expected[index]):
                    failures.append(index)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_device_is_described(cuda_engine: Any) -> None:
    device = describe_device(cuda_engine.device)
    assert device.compute_capability >= (7, 0)
    assert device.sm_count > 0
    assert device.shared_memory_per_block >= 48 << 10


def test_an_empty_batch_launches_nothing(cuda_engine: Any) -> None:
    problem = Conv2dProblem(N=0, H=8, W=8, C=4, K=4, R=3, S=3, pad_h=1, pad_w=1)
    x, weight = cuda_engine.asarray(np.zeros(problem.input_shape)), cuda_engine.filter(np.ones(problem.filter_shape))
    assert cuda_engine.conv2d(x, weight, padding=1, relu=True).shape == problem.output_shape
