"""The CUDA engine around its operations: memory, streams, threads, what it refuses and where it falls back."""

import threading
from typing import Any

import numpy as np
import pytest
from helpers import integers, normal

from cupy_resnet.conv2d import PRECISIONS, Conv2dProblem, Device
from cupy_resnet.engines import cuda_engine as module
from cupy_resnet.engines.cuda_engine import CudaEngine, describe_device
from cupy_resnet.errors import EngineUnavailableError, UnsupportedProblemError

pytestmark = pytest.mark.gpu


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
    with pytest.raises(TypeError, match="x must be float32, got float16"):
        cuda_engine.conv2d(x.astype(cupy.float16), weight)
    with pytest.raises(TypeError, match=r"must be uint16, as activations in bf16 are, got float32; .* pixels\(\) conv"):
        CudaEngine(precision="bf16").relu(x)
    with pytest.raises(
        TypeError, match="x must be uint8, float16, float32, or bfloat16 as uint16 or int16, got float64"
    ):
        cuda_engine.pixels(x.astype(cupy.float64))
    with pytest.raises(ValueError, match=r"out must be a C-contiguous float32 array of shape \(1, 4, 4, 8\)"):
        cuda_engine.pixels(x, out=cupy.zeros((1, 4, 4, 8), cupy.float16))
    with pytest.raises(ValueError, match="must be a 7×7 filter"):
        cuda_engine.stem(x, weight, cupy.zeros(8, cupy.float32))
    with pytest.raises(TypeError, match="ndarray"):
        cuda_engine.conv2d(cupy.asnumpy(x), weight)
    with pytest.raises(ValueError, match="C=8"):
        cuda_engine.conv2d(x, weight[..., :4])
    with pytest.raises(ValueError, match="residual"):
        cuda_engine.conv2d(x, weight, residual=x)
    with pytest.raises(ValueError, match="unknown kernel"):
        CudaEngine(kernel="conv3d")
    with pytest.raises(ValueError, match=r"unknown precision 'fp61'\. Did you mean .*'fp16'"):
        CudaEngine(precision="fp61")
    with pytest.raises(EngineUnavailableError, match="there is no GPU 99"):
        CudaEngine(99)
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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gpu_without_the_tensor_cores_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Device(name="V100", compute_capability=(7, 0), sm_count=80, shared_memory_per_block=98304)
    monkeypatch.setattr(module, "describe_device", lambda _: old)
    if precision in ("fp32", "fp16"):
        assert CudaEngine(precision=precision).precision == precision
        return
    wanted = (
        f"precision {precision} needs a GPU of compute capability 8.0 or newer, and V100 has 7.0; it can run in fp32"
    )
    with pytest.raises(EngineUnavailableError, match=wanted):
        CudaEngine(precision=precision)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_uploaded_pixels_keep_type_and_order(cuda_engine: Any, dtype: Any) -> None:
    x = (100 * normal((2, 3, 5, 7))).astype(dtype)
    views = {"nchw": x, "nhwc": np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)}
    views |= {"strided": x[:, ::-1, ::2], "empty": x[:0]}
    for name, view in views.items():
        y = cuda_engine.upload(view)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.get(), view, err_msg=name)
    assert cuda_engine.upload(views["nhwc"]).transpose(0, 2, 3, 1).flags.c_contiguous
