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

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def limits() -> Ceilings:
    return measure_gpu(0, matrix=4096, copy_bytes=2**28)


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


def test_ceilings_are_those_of_a_gpu(limits: Ceilings) -> None:
    assert 5e10 < limits.copy_bytes_per_s < 2e13
    rates = limits.matmul_flops_per_s
    assert 5e11 < rates["float32"] < 1e15
    if {"tf32", "float16", "bfloat16"} <= rates.keys():
        assert rates["float16"] > rates["tf32"]
        assert rates["bfloat16"] > rates["tf32"]
    assert rates.keys() | {"copy"} == limits.method.keys()


@pytest.mark.parametrize("fuse", [True, False])
def test_a_network(limits: Ceilings, fuse: bool) -> None:
    state = random_state_dict(describe("resnet18"))
    with cupy_resnet.load("resnet18", state, engine="cuda", fuse=fuse) as model:
        result = profile(model, 32, samples=10, limits=limits)
        steps = model.explain((32, 3, 224, 224))
    assert [op.kernel for op in result.ops] == [step.kernel for step in steps]
    # Timed one by one they take about what they take together, once the batch is large enough to hide launching.
    assert 0.7 < result.sum_us / result.median_whole_us < 1.2
    # Nothing is much faster than its roof; Winograd saves up to 2.25 of the arithmetic, and L2 holds small tensors.
    convolutions = [op for op in result.ops if op.kernel == "conv2d_implicit_gemm"]
    assert convolutions
    assert all(5 < op.percent_of_bound < 115 for op in convolutions), [op.percent_of_bound for op in convolutions]
    assert result.machine["device"] == result.ceilings.device


def test_one_image_waits_for_launches(limits: Ceilings) -> None:
    with cupy_resnet.load("resnet18", random_state_dict(describe("resnet18")), engine="cuda") as model:
        result = profile(model, 1, samples=20, limits=limits)
    assert result.sum_us < result.median_whole_us
