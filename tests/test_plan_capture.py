"""What a plan captures, in which order and on which stream; with stand-ins for streams, the network and the engine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import plan as plan_module
from cupy_resnet.jit import launching
from cupy_resnet.plan import _Plan
from cupy_resnet.replay import Replays

REPLAYS = Replays(lambda key: None)


class Log:
    """Writes down what happens, each with the stream that is current then."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.streams = [Stream(self, "caller")]
        self.current = self.streams[:1]
        self.events = 0
        self.allocators: list[Any] = ["the caller's"]

    def __call__(self, what: str) -> None:
        self.lines.append(what)

    def enqueue(self, what: str) -> None:
        overlapping = getattr(launching._thread, "overlapping", False)
        self(f"{self.current[-1].name}: {what}{', overlapping' if overlapping else ''}")

    @contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        self.allocators.append(allocator)
        yield
        self.allocators.pop()

    def stream(self, non_blocking: bool) -> "Stream":
        assert non_blocking
        self.streams.append(Stream(self, "plan" if len(self.streams) == 1 else "beside"))
        return self.streams[-1]


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name
        self.capturing = False

    def __enter__(self) -> "Stream":
        self.log.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self.log.current.pop() is self

    def record(self, event: Any = None) -> str:
        self.log.events += 1
        self.log(f"{self.name} records {self.log.events}")
        return str(self.log.events)

    def wait_event(self, event: str) -> None:
        self.log(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log(f"{self.name} is waited for")

    def begin_capture(self) -> None:
        self.log(f"{self.name} begins")

    def end_capture(self) -> str:
        self.log(f"{self.name} ends")
        return "graph"


class Memory:
    """A pool."""

    malloc = "the plan's"
    bytes_of_it = 1000

    def total_bytes(self) -> int:
        return self.bytes_of_it

    def free_all_blocks(self) -> None:
        pass


def array(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address), shape=(1, 8, 8, 3))


class Arena:
    """Runs the network in memory of its own, whose largest array has `largest` bytes."""

    largest = 500
    occupied = False
    made = 0

    def __init__(self, network: Any, ops: Any, shape: tuple[int, ...]) -> None:
        assert shape == (1, 8, 8, 3)
        Arena.made += 1
        self.network, self.ops, self.input = network, ops, array(77)

    def run(self) -> Any:
        return self.network.body(self.ops, self.input)


class Ops:
    """An engine whose filters have `nbytes`."""

    def __init__(self, log: Log, nbytes: int) -> None:
        self.log, self.nbytes = log, nbytes
        self.filters: list[str] = []

    def prefetch(self, filters: list[str]) -> Any:
        self.log.enqueue("prefetch is prepared")
        self.filters = list(filters)

        def begin() -> None:
            self.log.enqueue("prefetch")

        class Prefetch:
            nbytes = self.nbytes
            __call__ = staticmethod(begin)

        return Prefetch()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    cuda = SimpleNamespace(
        get_current_stream=lambda: log.current[-1],
        Stream=log.stream,
        Event=lambda disable_timing=False: SimpleNamespace(synchronize=lambda: None),
        MemoryPool=Memory,
        using_allocator=log.using_allocator,
    )
    default = SimpleNamespace(free_all_blocks=lambda stream: log(f"what {stream.name} left is given back"))
    cupy = SimpleNamespace(cuda=cuda, zeros=np.zeros, int32=np.int32, get_default_memory_pool=lambda: default)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(plan_module, "Arena", Arena)
    monkeypatch.setattr(plan_module, "Replays", lambda *arguments: SimpleNamespace(clear=lambda: None))
    return log


def network(log: Log, failure: Callable[[], None] = lambda: None) -> Any:
    """Two blocks of two convolutions; `failure` is called while it is captured."""

    def body(ops: Any, x: Any) -> tuple[Any, Any]:
        assert x.data.ptr == 77
        log.enqueue(f"body in {log.allocators[-1]} memory")
        if any(line.endswith("begins") for line in log.lines):
            failure()
        return "logits", "features"

    def front(ops: Any, x: Any, *, out: Any, **options: Any) -> Any:
        assert out.data.ptr == 77
        log.enqueue("front")
        return out

    def block(*names: str) -> Any:
        return SimpleNamespace(convolutions=lambda: iter([SimpleNamespace(weight=name) for name in names]))

    blocks = (("layer1.0", block("a", "b")), ("layer1.1", block("c", "d")))
    return SimpleNamespace(body=body, front=front, blocks=blocks, stem=SimpleNamespace(weight="stem"))


BEFORE = [
    "caller records 1",
    "plan waits for 1",
    "plan: front",
    "plan: body in the caller's memory",  # filters' other forms outlive the plan
    "plan: body in the plan's memory",
    "plan: prefetch is prepared",
    "plan is waited for",
    "what plan left is given back",
    "plan begins",
]
"""Nothing of this is in the graph: kernels are compiled, memory is allocated."""

AFTER_FORKING = [
    "plan records 2",
    "beside waits for 2",
    "beside: prefetch",
    "plan: body in the plan's memory, overlapping",
    "beside records 3",
    "plan waits for 3",  # or the capture could not end
    "plan ends",
]


def test_few_images_have_their_filters_brought_beside_the_first_layers(log: Log) -> None:
    ops: Any = Ops(log, nbytes=1001)
    plan = _Plan(network(log), ops, array(5), None, None, REPLAYS)
    assert log.lines == BEFORE + AFTER_FORKING
    assert ops.filters == ["a", "b", "c", "d"]  # the stem's is needed at once, and not in the graph where it is fused
    assert plan._passes.body is not None
    assert plan._passes.body.graph == "graph"
    assert plan._prefetch is not None  # the graph has the addresses that it reads
    plan.close()
    assert plan._prefetch is None


@pytest.mark.parametrize("largest", [500, 499, 501])
def test_where_activations_are_more_than_the_filters_nothing_is_brought(
    log: Log, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "largest", largest)
    ops: Any = Ops(log, nbytes=max(1000, 2 * largest))
    _Plan(network(log), ops, array(5), None, None, REPLAYS)
    assert log.lines == [*BEFORE, "plan: body in the plan's memory, overlapping", "plan ends"]


@pytest.mark.parametrize("occupied", [False, True])
def test_an_arena_that_something_stays_in_is_replaced(
    log: Log, occupied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "occupied", occupied)
    monkeypatch.setattr(Arena, "made", 0)
    ops: Any = Ops(log, nbytes=1000)
    _Plan(network(log), ops, array(5), None, None, REPLAYS)
    assert Arena.made == 1 + occupied


def test_a_capture_that_fails_is_ended(log: Log) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    ops: Any = Ops(log, nbytes=1001)
    with pytest.raises(MemoryError, match="no room"):
        _Plan(network(log, fail), ops, array(5), None, None, REPLAYS)
    assert log.lines[-1] == "plan ends"
    assert [stream.name for stream in log.current] == ["caller"]
    assert not getattr(launching._thread, "overlapping", False)


def test_a_call_is_captured_with_its_front_to_be_repeated(log: Log) -> None:
    ops: Any = Ops(log, nbytes=1001)
    plan = _Plan(network(log), ops, array(5), None, None, REPLAYS)
    log.lines.clear()
    captured = plan._captured(lambda: log.enqueue("front of the call"))
    assert log.lines == [
        "plan begins",
        "plan records 4",
        "beside waits for 4",
        "beside: prefetch",
        "plan: front of the call, overlapping",
        "plan: body in the plan's memory, overlapping",
        "beside records 5",
        "plan waits for 5",
        "plan ends",
    ]
    assert captured[:3] == ("graph", "logits", "features")
