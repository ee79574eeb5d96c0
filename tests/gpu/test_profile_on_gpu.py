"""Profiling on a GPU: its clock, its ceilings, and a whole network."""

import time
from typing import Any

import numpy as np
import pytest

import cupy_resnet
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.ceilings import Ceilings, measure_gpu
from cupy_resnet.proof.clock import CudaClock
from cupy_resnet.proof.matrix_products import gpu_products, normal_matrix, own_product
from cupy_resnet.proof.profiling import profile
from gpu.conftest import gpu_lock

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def limits() -> Ceilings:
    with gpu_lock(alone=True):  # before the test's own
        return measure_gpu(0, matrix=4096, copy_bytes=2**28)


@pytest.mark.alone
def test_the_clock_counts_the_gpus_time_and_not_the_hosts(cuda_engine: Any) -> None:
    import cupy

    clock = CudaClock(0)
    x = cupy.zeros(1024, cupy.float32)
    cuda_engine.relu(x)  # compiles

    def slow_to_launch() -> Any:
        time.sleep(0.05)
        return cuda_engine.relu(x)

    y, seconds = clock.alone(slow_to_launch)
    assert y.shape == x.shape
    assert 0 < seconds < 1e-3
    assert clock.as_called(slow_to_launch) > 0.05
    assert clock.alone(lambda: None)[1] < 50e-6


@pytest.mark.alone
def test_the_clock_counts_all_of_the_gpus_time(cuda_engine: Any) -> None:
    import cupy

    clock = CudaClock(0)
    x = cupy.zeros(2**26, cupy.float32)
    cuda_engine.relu(x)
    one = min(clock.alone(lambda: cuda_engine.relu(x))[1] for _ in range(10))
    ten = min(clock.alone(lambda: [cuda_engine.relu(x) for _ in range(10)])[1] for _ in range(10))
    assert ten == pytest.approx(10 * one, rel=0.25)
    assert 2 * x.nbytes / one < 2e13  # no memory is that fast


def test_products_are_products() -> None:
    import cupy

    tolerances = {"float32": 1e-4, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 4e-2}
    expected = normal_matrix(512, 0) @ normal_matrix(512, 1)
    for product in gpu_products(0, 512):
        result = product.prepare()()
        if hasattr(result, "cpu"):  # torch's
            found = result.float().cpu().numpy()
        elif result.dtype == np.uint16:
            found = (cupy.asnumpy(result).astype(np.uint32) << 16).view(np.float32)
        else:
            found = cupy.asnumpy(result).astype(np.float32)
        error = np.linalg.norm(found.reshape(512, 512) - expected) / np.linalg.norm(expected)
        assert error < tolerances[product.precision], product


def test_our_own_product_is_one_too(cuda_engine: Any) -> None:
    expected = normal_matrix(512, 0) @ normal_matrix(512, 1)
    found = cuda_engine.to_numpy(own_product(cuda_engine, 512).prepare()()).reshape(512, 512)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5


@pytest.mark.alone
def test_ceilings_are_those_of_a_gpu(limits: Ceilings) -> None:
    assert 5e10 < limits.copy_bytes_per_s < 2e13
    rates = limits.matmul_flops_per_s
    assert 5e11 < rates["float32"] < 1e15
    if {"tf32", "float16", "bfloat16"} <= rates.keys():
        assert rates["float16"] > rates["tf32"]
        assert rates["bfloat16"] > rates["tf32"]
    assert rates.keys() | {"copy"} == limits.method.keys()


def undisturbed(clock: CudaClock, model: cupy_resnet.Model, x: Any) -> float:
    """The GPU's µs for a whole pass, the host's launching left out: the least of many, as others may use the GPU."""
    return 1e6 * min(clock.alone(lambda: model(x))[1] for _ in range(30))


CONVOLUTIONS = {
    "fp32": {"conv2d_implicit_gemm"},
    "fp16": {"conv2d_mma", "conv2d_mma_patch", "conv2d_wgmma", "conv2d_wgmma_patch"},
}
"""The kernels whose arithmetic is that of the direct convolution."""


@pytest.mark.alone
@pytest.mark.parametrize("precision", CONVOLUTIONS)
@pytest.mark.parametrize("fuse", [True, False])
def test_a_network(limits: Ceilings, fuse: bool, precision: str) -> None:
    import cupy

    clock = CudaClock(0)
    x = cupy.random.standard_normal((32, 3, 224, 224), dtype=cupy.float32)
    state = random_state_dict(describe("resnet18"))
    with cupy_resnet.load("resnet18", state, engine="cuda", fuse=fuse, precision=precision) as model:
        model(x)
        before = undisturbed(clock, model, x)
        result = profile(model, 32, samples=20, limits=limits)
        together = min(before, undisturbed(clock, model, x))
        steps = model.explain((32, 3, 224, 224))
    assert [op.kernel for op in result.ops] == [step.kernel for step in steps]
    # Timed one by one they take about what they take together, but for the timing itself.
    one_by_one = sum(min(op.samples_us) for op in result.ops) - len(result.ops) * result.empty_us
    assert 0.7 < one_by_one / together < 1.2
    # As it is called, a pass takes that, the host's launching, and other processes' turns, a few milliseconds each.
    assert 0.9 * together < min(result.whole_us) < 2 * together + 10e3
    # Nothing is much faster than its roof; Winograd saves up to 2.25 of the arithmetic, and L2 holds small tensors.
    convolutions = [op for op in result.ops if op.kernel in CONVOLUTIONS[precision]]
    assert convolutions
    # The classifier's few rows and the three channels of a stem without a kernel of its own leave most threads idle.
    slow = {op.layer: (op.kernel, op.percent_of_bound) for op in convolutions if op.percent_of_bound <= 5}
    assert slow.keys() <= {"fc", "conv1"}, slow
    # Of the shortcuts' input, which the bound counts whole, a 1×1 filter of stride 2 reads a quarter.
    shares = [op.percent_of_bound for op in convolutions if ".downsample." not in op.layer]
    assert max(shares) < 115, shares
    assert result.machine["device"] == result.ceilings.device


@pytest.mark.alone
def test_one_image_waits_for_launches(limits: Ceilings) -> None:
    """Kernel by kernel the host needs longer than the GPU; a plan is there to save that."""
    results = {}
    for plan in (True, False):
        state = random_state_dict(describe("resnet18"))
        with cupy_resnet.load("resnet18", state, engine="cuda", plan=plan) as model:
            results[plan] = profile(model, 1, samples=50, limits=limits)
    as_called = {plan: min(result.whole_us) for plan, result in results.items()}
    assert sum(min(op.samples_us) for op in results[False].ops) < as_called[False]
    assert as_called[True] < as_called[False]
