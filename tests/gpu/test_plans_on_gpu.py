"""Plans on the GPU: a replayed graph gives what its kernels give one by one, to every caller; its memory comes back."""

import contextlib
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from helpers import normal

import cupy_resnet
from cupy_resnet import networks
from cupy_resnet.arena import foresee, lay_out
from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.plan import Runner

pytestmark = pytest.mark.gpu


@lru_cache
def weights(name: str) -> dict[str, np.ndarray]:
    return networks.random_state_dict(networks.describe(name), seed=0)


def load(name: str = "resnet20", **options: Any) -> cupy_resnet.Model:
    return cupy_resnet.load(name, weights=weights(name), **{"engine": "cuda", "precision": "fp16", **options})


def images(N: int, size: int, seed: int = 0) -> Any:
    """(N, 3, size, size) float32 of CuPy."""
    import cupy

    return cupy.asarray(normal((N, 3, size, size), seed))


def runner_of(model: cupy_resnet.Model) -> Runner:
    return model._alive()


def plans_of(model: cupy_resnet.Model) -> list[tuple[int, ...]]:
    """Shapes (N, H, W) of the plans a model holds, the least recently used first."""
    return list(runner_of(model)._plans)


def free_bytes() -> int:
    """What the driver has left."""
    import cupy

    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    return int(cupy.cuda.runtime.memGetInfo()[0])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "size"), [("resnet20", 16), ("resnet18", 64)])  # without and with a fused stem
def test_plans_give_the_same_bits_as_kernels_one_by_one(name: str, size: int, precision: str) -> None:
    import cupy

    planned, plain = load(name, precision=precision), load(name, precision=precision, plan=False)
    for N in (1, 3):
        for seed in range(3):  # captured by the first; other pixels must not leave traces
            x = images(N, size, seed)
            logits, features = planned.logits_and_features(x)
            expected = plain.logits_and_features(x)
            assert cupy.array_equal(logits, expected[0])
            assert cupy.array_equal(features, expected[1])
            assert bool(cupy.isfinite(logits).all())
    assert plans_of(planned) == [(1, size, size), (3, size, size)]
    assert plans_of(plain) == []


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kernel", ["auto", "conv2d_wmma"])
def test_unfused_networks_and_other_kernels_are_planned_too(kernel: str, fuse: bool) -> None:
    import cupy

    options = {"kernel": kernel, "fuse": fuse}
    planned, plain = load("resnet18", **options), load("resnet18", **options, plan=False)
    for seed in range(3):
        x = images(2, 64, seed)
        assert cupy.array_equal(planned(x), plain(x))
    assert len(plans_of(planned)) == 1


def test_many_calls_in_a_row_keep_apart() -> None:
    """Back to back, without waiting: launches that overlap must not meet each other's activations."""
    import cupy

    for name, size in (("resnet20", 16), ("resnet18", 64)):
        planned, plain = load(name), load(name, plan=False)
        inputs = [images(2, size, seed) for seed in range(8)]
        expected = [plain(x) for x in inputs]
        results = [planned(x) for _ in range(4) for x in inputs]
        for i, result in enumerate(results):
            assert cupy.array_equal(result, expected[i % 8]), f"{name}, call {i}"


def test_results_of_two_calls_share_no_memory() -> None:
    import cupy

    model = load()
    x = images(2, 16)
    first = model.logits_and_features(x)
    kept = [array.copy() for array in first]
    second = model.logits_and_features(-x)
    assert not cupy.array_equal(second[0], first[0])
    for array, before in zip(first, kept, strict=True):
        assert cupy.array_equal(array, before)
    addresses = {array.data.ptr for array in (*first, *second)}
    assert len(addresses) == 4


def test_out_takes_the_logits_and_is_returned() -> None:
    import cupy
    import torch

    model = load()
    x = images(2, 16)
    expected = model(x)
    out = cupy.full((2, 10), cupy.nan, cupy.float32)
    assert model(x, out=out) is out
    assert cupy.array_equal(out, expected)
    host = np.full((2, 10), np.nan, np.float32)
    assert model(cupy.asnumpy(x), out=host) is host
    np.testing.assert_array_equal(host, cupy.asnumpy(expected))
    tensor = torch.full((2, 10), torch.nan, device="cuda")
    assert model(torch.from_numpy(cupy.asnumpy(x)).cuda(), out=tensor) is tensor
    np.testing.assert_array_equal(tensor.cpu().numpy(), cupy.asnumpy(expected))
    memory = cupy.full((4, 10), cupy.nan, cupy.float32)
    model(x, out=memory[1:3])
    assert cupy.array_equal(memory[1:3], expected)
    assert bool(cupy.isnan(memory[0]).all() and cupy.isnan(memory[3]).all())


def test_inputs_of_one_shape_may_differ_in_type_layout_and_place() -> None:
    import cupy
    import torch

    for name, size in (("resnet20", 16), ("resnet18", 64)):
        planned, plain = load(name), load(name, plan=False)
        x = images(2, size)
        wide = cupy.full((2, 3, size + 2, size + 5), cupy.nan, cupy.float32)
        wide[:, :, 1:-1, 2:-3] = x
        nhwc = cupy.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        host = cupy.asnumpy(x)
        tensor = torch.from_numpy(host).cuda()
        inputs = {
            "CuPy": x,
            "channels last": nhwc,
            "part of a larger array": wide[:, :, 1:-1, 2:-3],
            "float16": x.astype(cupy.float16),
            "float16, channels last": nhwc.astype(cupy.float16),
            "NumPy": host,
            "float64": host.astype(np.float64),
            "torch": tensor,
            "torch, channels last": tensor.contiguous(memory_format=torch.channels_last),
            "bfloat16": tensor.bfloat16(),
            "torch on the CPU": torch.from_numpy(host),
        }
        for _ in range(2):
            for what, value in inputs.items():
                actual, expected = planned(value), plain(value)
                assert type(actual) is type(value), what
                assert bool((actual == expected).all()), f"{name}: {what}"
        assert len(plans_of(planned)) == 1


def test_predict_and_calls_share_a_plan() -> None:
    model, plain = load(resize=16, crop=16), load(resize=16, crop=16, plan=False)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    model(np.zeros((4, 3, 16, 16), np.float32))
    for _ in range(2):
        for got, want in zip(model.predict(pixels, batch_size=4), plain.predict(pixels, batch_size=4), strict=True):
            np.testing.assert_array_equal(got.logits, want.logits)
    assert plans_of(model) == [(4, 16, 16)]


def test_the_least_recently_used_plan_goes_and_comes_back_right() -> None:
    import cupy

    model, plain = load(), load(plan=False)
    runner_of(model).max_plans = 2
    for N in (1, 2, 3, 1, 2, 2, 3):
        x = images(N, 16, seed=N)
        assert cupy.array_equal(model(x), plain(x)), N
        assert len(plans_of(model)) <= 2
    assert [key[0] for key in plans_of(model)] == [2, 3]
    runner_of(model).max_bytes = 1
    model(images(4, 16))
    assert [key[0] for key in plans_of(model)] == [4], "the newest stays"


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_a_plan_takes_what_its_layout_says_and_workspaces(name: str, precision: str) -> None:
    """Whatever the engine allocates beside the arena is small at this size; captures with a front add nothing."""
    model = load(name, precision=precision)
    ops = runner_of(model).ops
    _, lifetimes = foresee(runner_of(model).network, (32, 224, 224, 3), precision, ops.fusions())
    arena = max(offset + array.nbytes for offset, array in zip(lay_out(lifetimes), lifetimes, strict=True))
    x = images(32, 224)
    for given in (x, x.astype("float16"), x):  # two signatures, each captured with its front
        model(given)
        (plan,) = runner_of(model)._plans.values()
        assert arena <= plan.nbytes < 1.05 * arena + (8 << 20)
        assert not plan._arena.occupied


@pytest.mark.parametrize("kernel", ["auto", "conv2d_winograd"])
@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_what_a_plan_prepared_outlives_it(name: str, kernel: str) -> None:
    """Filters in other forms and the numbers to normalise by were made in a plan's first pass."""
    import cupy

    model = load(name, kernel=kernel, precision="fp32" if kernel == "conv2d_winograd" else "fp16")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 80, 80, 3), np.uint8)
    x = images(2, 64)
    predicted, expected = model.predict(pixels, batch_size=2), model(x)
    assert runner_of(model).drop()
    cupy.cuda.Device().synchronize()
    held = [cupy.cuda.Memory(4 << 20) for _ in range(32)]  # where the plans' memory was
    for memory in held:
        cupy.cuda.runtime.memset(memory.ptr, 0xFF, memory.size)
    assert cupy.array_equal(model(x), expected)
    for got, want in zip(model.predict(pixels, batch_size=2), predicted, strict=True):
        np.testing.assert_array_equal(got.logits, want.logits)


@pytest.mark.alone
def test_without_room_for_results_all_plans_go_before_the_error() -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    model = load()
    x = images(2, 16)
    expected = model(x)
    model(images(3, 16))
    assert len(plans_of(model)) == 2
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes())
    held = []
    with contextlib.suppress(MemoryError):
        while True:  # what is free within the pool's blocks
            held.append(cupy.empty(1, cupy.uint8))
    try:
        with pytest.raises(MemoryError):
            model(x)
    finally:
        pool.set_limit(size=0)
    assert plans_of(model) == []
    assert cupy.array_equal(model(x), expected)
    assert plans_of(model) == [(2, 16, 16)]


@pytest.mark.alone
def test_a_full_gpu_is_lived_with_by_dropping_plans() -> None:
    """The next shape fits only where the plan of the last one was."""
    import cupy

    model, plain = load("resnet18"), load("resnet18", plan=False)
    small, large = images(64, 224, seed=1), images(96, 224, seed=2)
    expected = plain(large)  # loads its kernels too
    model(small)
    (plan,) = runner_of(model)._plans.values()
    leave = plan.nbytes
    del plan
    hog = cupy.cuda.runtime.malloc(free_bytes() - leave)
    try:
        assert cupy.array_equal(model(large), expected)
        assert (64, 224, 224) not in plans_of(model)
        assert cupy.array_equal(model(small), plain(small))
    finally:
        cupy.cuda.runtime.free(hog)
    for _ in range(2):
        assert cupy.array_equal(model(large), expected)
    assert (96, 224, 224) in plans_of(model)


def test_threads_on_streams_of_their_own_share_a_model() -> None:
    import cupy

    model, plain = load(), load(plan=False)
    runner_of(model).max_plans = 2  # of three shapes: plans come and go meanwhile
    inputs = [images(1 + i % 3, 16, seed=i) for i in range(6)]
    expected = [plain(x) for x in inputs]
    cupy.cuda.Device().synchronize()
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for turn in range(12):
                    i = (index + turn) % len(inputs)
                    result = model(inputs[i])
                    stream.synchronize()
                    if not cupy.array_equal(result, expected[i]):
                        failures.append(f"thread {index}, turn {turn}: input {i}")
        except BaseException as error:
            failures.append(f"thread {index}: {error!r}")
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_plan_is_used_from_one_stream_after_another_without_waiting() -> None:
    import torch

    model, plain = load("resnet18"), load("resnet18", plan=False)
    inputs = [torch.from_numpy(normal((4, 3, 64, 64), seed)).cuda() for seed in range(8)]
    expected = [plain(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for i in range(48):
        with torch.cuda.stream(streams[i % 3]):
            results.append(model(inputs[i % 8]))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % 8]), f"call {i}"


def test_work_is_ordered_with_torchs_current_stream() -> None:
    """An input that torch's side stream is still computing is seen complete, and the result is ready there."""
    import torch

    model = load("resnet18")
    good = torch.from_numpy(normal((8, 3, 64, 64))).cuda()
    expected = model(good)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    big = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(side):
            x = torch.zeros_like(good)
            for _ in range(5):
                big = big @ big / 64
            x.copy_(good)
            y = model(x) + 0
        side.synchronize()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("plan", [True, False])
def test_inside_a_graph_of_the_callers_own(plan: bool) -> None:
    """torch captures a call; replayed with other pixels it gives their answer, and touches nobody else's memory."""
    import cupy
    import torch

    model, plain = load("resnet18", plan=plan), load("resnet18", plan=False)
    static = torch.from_numpy(normal((4, 3, 64, 64))).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(static)
    held = [cupy.full(1 << size, 7, cupy.uint8) for size in range(12, 26) for _ in range(3)]
    for seed in range(1, 4):
        static.copy_(torch.from_numpy(normal((4, 3, 64, 64), seed)))
        other = model(static * 2)
        kept = other.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, plain(static)), seed
        assert torch.equal(other, kept), seed
        assert all(bool((array == 7).all()) for array in held), seed


@pytest.mark.alone
def test_the_memory_of_plans_goes_back_to_the_gpu() -> None:
    with load("resnet18") as model:
        for N in (1, 48, 56, 64):  # kernels are loaded, filters are packed
            model(images(N, 224))
        runner_of(model).drop()
        before = free_bytes()
        model(images(64, 224))
        (plan,) = runner_of(model)._plans.values()
        assert plan.nbytes > 40 << 20
        assert free_bytes() <= before - plan.nbytes
        assert runner_of(model).drop()
        assert free_bytes() >= before - (4 << 20)
        runner_of(model).max_bytes = plan.nbytes
        for N in (48, 56, 64):
            model(images(N, 224))
        assert len(plans_of(model)) == 1
        assert free_bytes() >= before - 1.1 * plan.nbytes - (4 << 20), "only one of three plans is held"
        assert np.isfinite(model(images(2, 64)).get()).all()
        del plan
    assert free_bytes() >= before
    with pytest.raises(RuntimeError, match="closed"):
        model(images(1, 64))
