"""Repeated calls on the GPU: they give the same bits as first ones, whatever changes between them, and are quick."""

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from helpers import normal

import cupy_resnet
from cupy_resnet import networks

pytestmark = pytest.mark.gpu

NETWORKS = [("resnet20", 16), ("resnet18", 64)]
"""Without and with a stem that is one kernel; both read the input by one launch."""


@lru_cache
def weights(name: str) -> dict[str, np.ndarray]:
    return networks.random_state_dict(networks.describe(name), seed=0)


def load(name: str = "resnet20", **options: Any) -> cupy_resnet.Model:
    return cupy_resnet.load(name, weights=weights(name), **{"engine": "cuda", "precision": "fp16", **options})


def images(library: str, N: int, size: int, seed: int = 0) -> Any:
    """(N, 3, size, size) float32 on the GPU."""
    host = normal((N, 3, size, size), seed)
    if library == "torch":
        import torch

        return torch.from_numpy(host).cuda()
    import cupy

    return cupy.asarray(host)


def synchronize() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def equal(actual: Any, expected: Any) -> bool:
    return type(actual) is type(expected) and bool((actual == expected).all())


@contextlib.contextmanager
def long_ways() -> Iterator[list[Any]]:
    """Collects the shapes of the inputs that are read by the long way, the networks' own `front`, in any thread."""
    shapes: list[Any] = []
    front = networks.Network.front

    def spied(self: Any, ops: Any, x: Any, **options: Any) -> Any:
        shapes.append(x.shape)
        return front(self, ops, x, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks.Network, "front", spied)
        yield shapes


@contextlib.contextmanager
def only_replays() -> Iterator[None]:
    """No call may go the long way meanwhile."""
    with long_ways() as shapes:
        yield
    assert shapes == []


def variants(library: str, x: Any, storage: str) -> dict[str, tuple[Any, bool]]:
    """What → the same images in another form, and whether a network without a stem kernel reads it by one launch."""
    wide = x.repeat(1, 1, 2, 2) if library == "torch" else x.repeat(2, 2).repeat(2, 3)
    part = wide[:, :, : x.shape[2], 1 : 1 + x.shape[3]]
    part[...] = x
    if library == "torch":
        import torch

        nhwc = x.contiguous(memory_format=torch.channels_last)
        flat = torch.empty(x.numel() + 1, device="cuda")
        more = {
            "bfloat16": (x.bfloat16(), True),
            "bfloat16, channels last": (nhwc.bfloat16(), storage != "bf16"),
            "float64": (x.double(), False),
            "needs gradient": (x.clone().requires_grad_(), True),
        }
        half = x.half(), nhwc.half()
    else:
        import cupy

        nhwc = cupy.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        flat = cupy.empty(x.size + 1, cupy.float32)
        more = {"float64": (x.astype(cupy.float64), False)}
        half = x.astype(cupy.float16), nhwc.astype(cupy.float16)
    moved = flat[1:].reshape(x.shape)
    moved[...] = x
    return {
        "float32": (x, True),
        "float32, channels last": (nhwc, storage != "fp32"),
        "float16": (half[0], True),
        "float16, channels last": (half[1], storage != "fp16"),  # else it is copied as it lies
        "part of a larger array": (part, False),
        "not aligned": (moved, False),
        **more,
    }


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_forms_take_turns_at_changing_addresses(name: str, size: int, precision: str, library: str) -> None:
    model, plain = load(name, precision=precision), load(name, precision=precision, plan=False)
    storage = {"tf32": "fp32"}.get(precision, precision)
    held = []  # so that no address comes back
    for seed in range(4):
        forms = variants(library, images(library, 2, size, seed), storage)
        for what, (x, one_launch) in forms.items():
            expected = plain(x)
            with long_ways() as shapes:
                actual = model(x)
            assert equal(actual, expected), f"{what}, round {seed}"
            if seed:
                replayed = one_launch or (name == "resnet18" and what != "float64")
                assert len(shapes) == (not replayed), f"{what}, round {seed}"
        held.append(forms)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_shapes_take_turns_too(library: str) -> None:
    model, plain = load("resnet18"), load("resnet18", plan=False)
    for seed in range(3):
        for N, size in ((1, 64), (3, 64), (1, 96), (2, 33)):
            x = images(library, N, size, seed)
            expected = plain(x)
            with only_replays() if seed else contextlib.nullcontext():
                actual = model(x)
            assert equal(actual, expected), (N, size, seed)


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_results_are_the_callers_own(name: str, size: int, library: str) -> None:
    model, plain = load(name), load(name, plan=False)
    inputs = [images(library, 2, size, seed) for seed in range(6)]
    expected = [plain(x) for x in inputs]
    model(inputs[0])
    with only_replays():
        results = [model(x) for _ in range(3) for x in inputs]  # back to back, without waiting
    for i, result in enumerate(results):
        assert equal(result, expected[i % 6]), i


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_logits_go_straight_into_out(library: str) -> None:
    model, plain = load("resnet18"), load("resnet18", plan=False)
    x = images(library, 2, 64)
    expected = plain(x)
    memory = images(library, 1, 64).reshape(-1)[: 4 * 1000].reshape(4, 1000)
    memory[...] = -7
    model(x)
    with only_replays():
        assert model(x, out=memory[1:3]).shape == (2, 1000)
        assert equal(memory[1:3], expected)
        assert bool((memory[0] == -7).all() and (memory[3] == -7).all())
        out = memory[2:]
        assert model(x, out=out) is out
    assert equal(out, expected)
    with pytest.raises(ValueError, match="shape"):
        model(x, out=memory)
    with pytest.raises(ValueError, match="contiguous"):
        model(x, out=memory[::2])
    with pytest.raises(TypeError, match="same kind"):
        model(x, out=np.zeros((2, 1000), np.float32))


def test_streams_of_cupy_and_what_they_order() -> None:
    """Each input is made on the stream just before the call, and its memory reused just after."""
    import cupy

    model, plain = load("resnet18"), load("resnet18", plan=False)
    inputs = [images("cupy", 4, 64, seed) for seed in range(5)]
    expected = [plain(x) for x in inputs]
    model(inputs[0])
    synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)] + [cupy.cuda.Stream.null] * 2
    results = []
    with only_replays():
        for i in range(45):
            with streams[i % 4]:
                results.append(model(inputs[i % 5] * 2 / 2))
    synchronize()
    for i, result in enumerate(results):
        assert equal(result, expected[i % 5]), i


def test_streams_of_torch_and_what_they_order() -> None:
    import torch

    model, plain = load("resnet18"), load("resnet18", plan=False)
    inputs = [images("torch", 4, 64, seed) for seed in range(5)]
    expected = [plain(x) for x in inputs]
    model(inputs[0])
    synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] + [torch.cuda.default_stream()] * 2
    big = torch.randn(2048, 2048, device="cuda")
    synchronize()
    results = []
    with only_replays():
        for i in range(45):
            with torch.cuda.stream(streams[i % 4]):
                late = (big @ big)[0, 0] * 0  # the input is ready only when this is done
                results.append(model(inputs[i % 5] + late) + 0)
    synchronize()
    for i, result in enumerate(results):
        assert equal(result, expected[i % 5]), i


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_threads_first_call_goes_the_long_way(library: str) -> None:
    model, plain = load("resnet18"), load("resnet18", plan=False)
    x = images(library, 2, 64)
    expected = plain(x)
    model(x)
    synchronize()
    results = []

    def work() -> None:
        results.extend(model(x) for _ in range(3))

    with long_ways() as shapes:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    synchronize()
    assert len(shapes) == 4
    assert len(results) == 12
    assert all(equal(result, expected) for result in results)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_after_their_plan_is_gone_calls_start_anew(library: str) -> None:
    model, plain = load("resnet18"), load("resnet18", plan=False)
    runner = model._alive()
    x, other = images(library, 2, 64), images(library, 3, 64)
    expected = plain(x)
    for lose in (runner.drop, lambda: model(other)):
        assert equal(model(x), expected)
        with only_replays():
            assert equal(model(x), expected)
        runner.max_plans = 1
        lose()
        with long_ways() as shapes:
            assert equal(model(x), expected)
        assert len(shapes) == 4, "run twice to capture the body, run for this call, captured to be repeated"
    with only_replays():
        assert equal(model(x), expected)
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        model(x)


def test_a_replayed_plan_stays_and_the_least_recently_used_goes() -> None:
    model = load()
    runner = model._alive()
    runner.max_plans = 2
    for N in (1, 2, 1, 3):
        model(images("cupy", N, 16))
    assert [key[0] for key in runner._plans] == [1, 3]


def test_a_graph_of_the_callers_own_between_replays() -> None:
    import torch

    model, plain = load("resnet18"), load("resnet18", plan=False)
    static = images("torch", 2, 64)
    for _ in range(3):
        model(static)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(static)
    for seed in range(3):
        static.copy_(images("torch", 2, 64, seed))
        other = images("torch", 2, 64, seed + 10)
        with only_replays():
            result = model(other)
        graph.replay()
        synchronize()
        assert equal(y, plain(static))
        assert equal(result, plain(other))


def test_a_negation_that_torch_has_put_off_is_seen() -> None:
    import torch

    model = load("resnet18")
    x = images("torch", 2, 64)
    expected = model(x)
    negated = torch.imag(torch.complex(torch.zeros_like(x), -x).conj())
    values = torch.imag(torch.complex(torch.zeros_like(x), x))
    assert negated.is_neg()
    assert not values.is_neg()
    assert negated.stride() == values.stride()
    for _ in range(2):
        assert equal(model(values), expected)
        assert equal(model(negated), expected)


def test_modes_of_torch_change_nothing() -> None:
    import torch

    model = load("resnet18")
    x = images("torch", 2, 64)
    expected = model(x)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cuda", torch.float16)):
        with mode, only_replays():
            result = model(x)
        assert equal(result, expected)
        assert result.dtype == torch.float32
        assert not result.requires_grad


@pytest.mark.alone
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_repeated_call_costs_the_host_little(library: str) -> None:
    """The GPU needs more than 100 µs for this network. The bound is twice what was aimed at: machines are busy."""
    model = load("resnet18")
    x = images(library, 1, 224)
    for _ in range(20):
        model(x)
    seconds = []
    for _ in range(200):
        synchronize()  # so that no call waits for room in the stream's queue
        begin = time.perf_counter()
        y = model(x)
        seconds.append(time.perf_counter() - begin)
        del y
    median = statistics.median(seconds)
    assert median < 60e-6, f"{median * 1e6:.1f} µs"
