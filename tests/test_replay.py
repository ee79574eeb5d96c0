"""What is enqueued when a call is repeated, in which order, and when it goes the long way; with stand-ins for CUDA.

That results are right needs a GPU: tests/gpu/test_plans_on_gpu.py.
"""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import replay as replay_module
from cupy_resnet.jit import Launch
from cupy_resnet.replay import MAX_REPLAYS, Captured, Replays

BODY, WHOLE, LOGITS, DONE, STREAM = 0x61, 0x62, 0x10600, 0xE, 0x57


class Input:
    """A caller's array: its signature and address."""

    def __init__(self, signature: str = "NCHW", address: int = 0x1000) -> None:
        self.signature, self.address = signature, address


class Library:
    """The library of `Input`; results are strings, and so is `out`."""

    room = room_for_spares = True
    spares = 0

    def look_at(self, x: Input) -> tuple[tuple[str], tuple[int, ...], int] | None:
        return None if x.signature == "odd" else ((x.signature,), (2, 8, 8), x.address)

    def stream(self, device: int) -> int:
        return STREAM + device

    def empty(self, shape: tuple[int, ...], like: Input) -> tuple[str, int]:
        if not self.room:
            raise MemoryError
        return f"new {shape}", 0xAAA0

    def spare(self, shape: tuple[int, ...], like: Input) -> tuple[str, int]:
        if not self.room_for_spares:
            raise MemoryError
        Library.spares += 1
        return f"spare {self.spares}", 0xCCC0 + self.spares

    def address_of_out(self, out: str, shape: tuple[int, ...], like: Input) -> int | None:
        return 0xBBB0 if out == f"out {shape}" else None


class Cuda:
    """CuPy's runtime, on device 1; `calls` are what was enqueued."""

    memcpyDeviceToDevice = 3  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.device, self.capturing = 1, False
        self.bindings_are_there = self.kernels_are_found = self.last_kernel_is_found = True
        self.lock = threading.Lock()

    def getDevice(self) -> int:  # noqa: N802
        return self.device

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        assert stream == STREAM + 1
        return self.capturing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            assert self.lock.locked()
            self.calls.append((name, *arguments))

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=fake)))
    monkeypatch.setattr(replay_module, "library_of", lambda x: Library() if isinstance(x, Input) else None)
    prepared = lambda launch: lambda stream, address: fake.launched(launch.kernel, stream, address)  # noqa: E731

    class PreparedGraph:
        def __init__(self, graph: Any, reading: Launch, writing: tuple[Launch, int] | None = None) -> None:
            if not fake.kernels_are_found or (writing is not None and not fake.last_kernel_is_found):
                raise LookupError("2 of the graph's kernels are the one that was launched")
            self.graph, self.kernel, self.writing = graph.graphExec, reading.kernel, writing

        def __call__(self, stream: int, address: int) -> None:
            fake.run(self.graph, self.kernel, stream, address)

        def write_to(self, address: int) -> None:
            assert self.writing is not None
            fake.write_to(self.writing[0].kernel, self.writing[1], address)

    jit = SimpleNamespace(
        PreparedLaunch=prepared,
        PreparedGraph=PreparedGraph,
        graphs_can_be_prepared=lambda: fake.bindings_are_there,
    )
    monkeypatch.setattr(replay_module, "jit", jit)
    return fake


def captured(graph: int, logits: int, front: list[Launch], last: Launch | None = None) -> Captured:
    array = SimpleNamespace(data=SimpleNamespace(ptr=logits, device_id=1), shape=(2, 10), nbytes=80)
    return Captured(SimpleNamespace(graphExec=graph), array, None, front, last)


@pytest.fixture
def replays(cuda: Cuda) -> Replays:
    return Replays(cuda.lock, captured(BODY, LOGITS, []), SimpleNamespace(ptr=DONE))


def note(replays: Replays, x: Any, launches: list[Launch]) -> None:
    """As a plan does; what it captures for itself has other numbers."""
    replays.note(x, launches, lambda: captured(WHOLE, LOGITS + 1, launches))


def reading(x: Input, kernel: str = "front") -> Launch:
    return Launch(kernel, (1,), (32,), (SimpleNamespace(data=SimpleNamespace(ptr=x.address)), 7), 0)


def call(replays: Replays, x: Input, out: Any = None, library: Any = None) -> Any:
    library = library or Library()
    signature, _, address = library.look_at(x)
    return replays(library, signature, address, x, out)


@pytest.mark.parametrize(("out", "address"), [(None, 0xAAA0), ("out (2, 10)", 0xBBB0)])
def test_a_replay_is_the_wait_the_graph_with_its_front_the_copy_and_the_record(
    cuda: Cuda, replays: Replays, out: str | None, address: int
) -> None:
    note(replays, Input(), [reading(Input())])
    assert call(replays, Input(address=0x2000), out) == (out or "new (2, 10)")
    assert cuda.calls == [
        ("streamWaitEvent", STREAM + 1, DONE),
        ("run", WHOLE, "front", STREAM + 1, 0x2000),
        ("memcpyAsync", address, LOGITS + 1, 80, 3, STREAM + 1),
        ("eventRecord", DONE, STREAM + 1),
    ]


@pytest.mark.parametrize("why", ["no bindings", "no kernel", "no room"])
def test_where_a_graph_cannot_be_had_or_told_the_front_is_launched_before_that_of_the_body(
    cuda: Cuda, replays: Replays, why: str
) -> None:
    captures = []

    def capture() -> Captured:
        captures.append(why)
        if why == "no room":
            raise MemoryError
        return captured(WHOLE, LOGITS + 1, [reading(x)])

    cuda.bindings_are_there, cuda.kernels_are_found = why != "no bindings", why != "no kernel"
    x = Input()
    replays.note(x, [reading(x)], capture)
    assert captures == ([] if why == "no bindings" else [why])  # a capture that nothing can come of is not begun
    assert call(replays, Input(address=0x2000)) is not None
    assert cuda.calls == [
        ("streamWaitEvent", STREAM + 1, DONE),
        ("launched", "front", STREAM + 1, 0x2000),
        ("graphLaunch", BODY, STREAM + 1),
        ("memcpyAsync", 0xAAA0, LOGITS, 80, 3, STREAM + 1),
        ("eventRecord", DONE, STREAM + 1),
    ]


def test_other_errors_of_a_capture_are_not_swallowed(replays: Replays) -> None:
    def capture() -> Captured:
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        replays.note(Input(), [reading(Input())], capture)


def test_the_first_input_is_not_kept_alive(cuda: Cuda, replays: Replays) -> None:
    class Array:
        data = SimpleNamespace(ptr=0x1000)

    array = Array()
    alive = weakref.ref(array)
    note(replays, Input(), [Launch("front", (1,), (32,), (array, 7), 0)])
    assert call(replays, Input()) is not None
    del array
    gc.collect()
    assert alive() is None


def test_a_dropped_plans_memory_is_not_held(cuda: Cuda) -> None:
    class Logits(SimpleNamespace):
        pass

    def with_logits(graph: int) -> Captured:
        logits = Logits(data=SimpleNamespace(ptr=LOGITS, device_id=1), shape=(2, 10), nbytes=80)
        alive.append(weakref.ref(logits))
        return Captured(SimpleNamespace(graphExec=graph), logits, None, [reading(x)])

    alive: list[Any] = []
    x = Input()
    replays = Replays(cuda.lock, with_logits(BODY), SimpleNamespace(ptr=DONE))
    replays.note(x, [reading(x)], lambda: with_logits(WHOLE))
    gc.collect()
    assert [one() is not None for one in alive] == [True, True]
    replays.clear()
    gc.collect()
    assert [one() is not None for one in alive] == [False, False]


def test_what_is_known_is_not_captured_again(cuda: Cuda, replays: Replays) -> None:
    x = Input()
    note(replays, x, [reading(x)])

    def fail() -> Captured:
        raise AssertionError("captured twice")

    replays.note(x, [reading(x)], fail)
    assert call(replays, x) is not None


def test_each_signature_has_its_own_front(cuda: Cuda, replays: Replays) -> None:
    for signature in ("NCHW", "NHWC"):
        x = Input(signature)
        note(replays, x, [reading(x, f"front of {signature}")])
    for signature in ("NHWC", "NCHW", "NHWC"):
        assert call(replays, Input(signature)) is not None
        (front,) = [made[2] for made in cuda.calls if made[0] == "run"]
        assert front == f"front of {signature}"
        cuda.calls.clear()
    assert call(replays, Input("float16")) is None
    assert cuda.calls == []


def test_only_a_front_that_is_one_launch_which_reads_the_callers_array_is_repeated(
    cuda: Cuda, replays: Replays
) -> None:
    x = Input()
    copied = reading(Input(address=0x5000))
    for launches in ([], [copied], [reading(x), copied], [copied, reading(x)], [Launch("front", (1,), (32,), (), 0)]):
        note(replays, x, launches)
        assert call(replays, x) is None, launches
    odd = Input("odd")
    note(replays, odd, [reading(odd)])
    note(replays, "of NumPy", [reading(x)])
    assert call(replays, x) is None
    assert cuda.calls == []


@pytest.mark.parametrize("why", ["another device", "capturing", "unsuitable out", "cleared"])
def test_where_it_goes_the_long_way_nothing_is_enqueued(cuda: Cuda, replays: Replays, why: str) -> None:
    x, library = Input(), Library()
    note(replays, x, [reading(x)])
    cuda.device = 0 if why == "another device" else 1
    cuda.capturing = why == "capturing"
    if why == "cleared":
        replays.clear()
    assert call(replays, x, "out (3, 10)" if why == "unsuitable out" else None, library) is None
    assert cuda.calls == []
    assert not cuda.lock.locked()


def test_the_graph_is_launched_before_memory_is_sought_and_whoever_comes_next_waits_for_it(
    cuda: Cuda, replays: Replays
) -> None:
    x, library = Input(), Library()
    note(replays, x, [reading(x)])
    library.room = False
    assert call(replays, x, None, library) is None
    assert [made[0] for made in cuda.calls] == ["streamWaitEvent", "run", "eventRecord"]
    assert not cuda.lock.locked()


def test_the_oldest_of_too_many_signatures_is_forgotten(cuda: Cuda, replays: Replays) -> None:
    inputs = [Input(str(i)) for i in range(MAX_REPLAYS + 2)]
    for x in inputs:
        note(replays, x, [reading(x)])
    assert [call(replays, x) is None for x in inputs] == [True, True] + [False] * MAX_REPLAYS


def test_an_error_frees_the_plan_for_others(cuda: Cuda, replays: Replays) -> None:
    class Failing(Library):
        def stream(self, device: int) -> int:
            raise RuntimeError("no stream")

    note(replays, Input(), [reading(Input())])
    with pytest.raises(RuntimeError, match="no stream"):
        call(replays, Input(), None, Failing())
    assert not cuda.lock.locked()


# Results that the last kernel leaves where they belong ----------------------------------------------------------------

WAIT, RECORD = ("streamWaitEvent", STREAM + 1, DONE), ("eventRecord", DONE, STREAM + 1)


def told(address: int) -> tuple[Any, ...]:
    return "write_to", "linear", 1, address


def run(address: int) -> tuple[Any, ...]:
    return "run", WHOLE, "front", STREAM + 1, address


def writing(*values: Any) -> Launch:
    """Of the kernel that computes the logits."""
    arrays = (SimpleNamespace(data=SimpleNamespace(ptr=at), dtype=np.dtype(np.float32)) for at in (0x50, LOGITS + 1))
    return Launch("linear", (1,), (32,), (*arrays, *values), 0)


@pytest.fixture
def direct(cuda: Cuda, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> Replays:
    monkeypatch.setattr(Library, "spares", 0)
    launches = [reading(Input())]
    replays.note(Input(), launches, lambda: captured(WHOLE, LOGITS + 1, launches, writing(np.int32(7))))
    return replays


def test_the_next_results_place_is_sought_while_the_gpu_is_busy(cuda: Cuda, direct: Replays) -> None:
    assert call(direct, Input(address=0x2000)) == "new (2, 10)"
    assert cuda.calls == [told(0xAAA0), WAIT, run(0x2000), RECORD, told(0xCCC1)]
    for n in (1, 2):
        cuda.calls.clear()
        assert call(direct, Input(address=0x3000)) == f"spare {n}"
        assert cuda.calls == [WAIT, run(0x3000), RECORD, told(0xCCC1 + n)]


def test_results_go_right_to_an_array_of_the_callers(cuda: Cuda, direct: Replays) -> None:
    call(direct, Input())
    for tells in ([told(0xBBB0)], []):
        cuda.calls.clear()
        assert call(direct, Input(address=0x3000), "out (2, 10)") == "out (2, 10)"
        assert cuda.calls == [*tells, WAIT, run(0x3000), RECORD]
    cuda.calls.clear()
    assert (
        call(direct, Input()) == "new (2, 10)"
    )  # and not the spare of before, which the kernel does not know any more
    assert cuda.calls[:2] == [told(0xAAA0), WAIT]


def test_what_was_sought_for_one_stream_is_not_given_to_another(
    cuda: Cuda, direct: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(direct, Input())
    monkeypatch.setattr(Library, "stream", lambda self, device: 0x99)
    monkeypatch.setattr(cuda, "streamIsCapturing", lambda stream: False)
    assert call(direct, Input()) == "new (2, 10)"
    assert call(direct, Input()) == "spare 2"


def test_without_room_for_the_next_results_these_are_there(cuda: Cuda, direct: Replays) -> None:
    library = Library()
    library.room_for_spares = False
    for _ in range(2):
        cuda.calls.clear()
        assert call(direct, Input(), library=library) == "new (2, 10)"
        assert cuda.calls[-3:] == [WAIT, run(0x1000), RECORD]


def test_without_room_for_results_nothing_is_enqueued(cuda: Cuda, direct: Replays) -> None:
    library = Library()
    library.room = False
    assert call(direct, Input(), library=library) is None
    assert cuda.calls == []


@pytest.mark.parametrize("why", ["several kernels of its kind", "tensor map", "nothing known"])
def test_where_the_last_kernel_cannot_be_told_results_are_copied(cuda: Cuda, replays: Replays, why: str) -> None:
    last = {"tensor map": writing(np.zeros(1, "V128")), "nothing known": None}.get(why, writing())
    cuda.last_kernel_is_found = why != "several kernels of its kind"
    launches = [reading(Input())]
    replays.note(Input(), launches, lambda: captured(WHOLE, LOGITS + 1, launches, last))
    assert call(replays, Input()) == "new (2, 10)"
    assert cuda.calls == [WAIT, run(0x1000), ("memcpyAsync", 0xAAA0, LOGITS + 1, 80, 3, STREAM + 1), RECORD]
