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


class Log:
    """Writes down what happens, each with the stream that is current then."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.streams = [Stream(self, "caller")]
        self.current = self.streams[:1]
        self.events = 0

    def __call__(self, what: str) -> None:
        self.lines.append(what)

    def enqueue(self, what: str) -> None:
        overlapping = getattr(launching._thread, "overlapping", False)
        self(f"{self.current[-1].name}: {what}{', overlapping' if overlapping else ''}")

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

    malloc = None
    bytes_of_it = 1000

    def total_bytes(self) -> int:
        return self.bytes_of_it

    def free_all_blocks(self) -> None:
        pass


def array(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address), shape=(1, 8, 8, 3), copy=lambda: array(address + 1))


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

    @contextmanager
    def using_allocator(malloc: Any) -> Iterator[None]:
        log(POOLED)
        yield
        log(AS_BEFORE)

    cuda = SimpleNamespace(
        get_current_stream=lambda: log.current[-1],
        Stream=log.stream,
        Event=lambda disable_timing=False: SimpleNamespace(synchronize=lambda: None),
        MemoryPool=Memory,
        using_allocator=using_allocator,
    )
    free = SimpleNamespace(free_all_blocks=lambda stream: log(f"what {stream.name} does not use is freed"))
    cupy = SimpleNamespace(cuda=cuda, zeros=np.zeros, int32=np.int32, get_default_memory_pool=lambda: free)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(plan_module, "Replays", lambda *arguments: SimpleNamespace(clear=lambda: None))
    return log


def network(log: Log, failure: Callable[[], None] = lambda: None) -> Any:
    """Two blocks of two convolutions; `failure` is called while it is captured."""

    def body(ops: Any, x: Any) -> tuple[Any, Any]:
        log.enqueue("body")
        if any(line.endswith("begins") for line in log.lines):
            failure()
        return "logits", "features"

    def front(ops: Any, x: Any, **options: Any) -> Any:
        log.enqueue("front")
        return array(77)

    def block(*names: str) -> Any:
        return SimpleNamespace(convolutions=lambda: iter([SimpleNamespace(weight=name) for name in names]))

    blocks = (("layer1.0", block("a", "b")), ("layer1.1", block("c", "d")))
    return SimpleNamespace(body=body, front=front, blocks=blocks, stem=SimpleNamespace(weight="stem"))


POOLED, AS_BEFORE = "memory is the plan's", "memory is the caller's"

BEFORE = [
    "caller records 1",
    "plan waits for 1",
    "plan: front",
    "plan: body",
    "plan is waited for",
    "what plan does not use is freed",
    POOLED,
    "plan: front",
    "plan: body",
    "plan: prefetch is prepared",
    AS_BEFORE,
    "plan is waited for",
    POOLED,
    "plan begins",
]
"""Nothing of this is in the graph: kernels are compiled, filters that outlive the plan derived, memory allocated."""

AFTER_FORKING = [
    "plan records 2",
    "beside waits for 2",
    "beside: prefetch",
    "plan: body, overlapping",
    "beside records 3",
    "plan waits for 3",  # or the capture could not end
    "plan ends",
    AS_BEFORE,
]


def test_few_images_have_their_filters_brought_beside_the_first_layers(log: Log) -> None:
    ops: Any = Ops(log, nbytes=1001)
    plan = _Plan(network(log), ops, array(5), None, None)
    assert log.lines == BEFORE + AFTER_FORKING
    assert ops.filters == ["a", "b", "c", "d"]  # the stem's is needed at once, and not in the graph where it is fused
    assert plan._body is not None
    assert plan._body.graph == "graph"
    assert plan._prefetch is not None  # the graph has the addresses that it reads
    plan.close()
    assert plan._prefetch is None


def test_where_activations_are_more_than_the_filters_nothing_is_brought(log: Log) -> None:
    ops: Any = Ops(log, nbytes=1000)
    _Plan(network(log), ops, array(5), None, None)
    assert log.lines == [*BEFORE, "plan: body, overlapping", "plan ends", AS_BEFORE]


def test_a_capture_that_fails_is_ended(log: Log) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    ops: Any = Ops(log, nbytes=1001)
    with pytest.raises(MemoryError, match="no room"):
        _Plan(network(log, fail), ops, array(5), None, None)
    assert log.lines[-1] == "plan ends"
    assert [stream.name for stream in log.current] == ["caller"]
    assert not getattr(launching._thread, "overlapping", False)


def test_a_call_is_captured_with_its_front_to_be_repeated(log: Log) -> None:
    ops: Any = Ops(log, nbytes=1001)
    plan = _Plan(network(log), ops, array(5), None, None)
    log.lines.clear()
    captured = plan._captured(lambda: log.enqueue("front of the call"))
    assert log.lines == [
        POOLED,
        "plan begins",
        "plan records 4",
        "beside waits for 4",
        "beside: prefetch",
        "plan: front of the call, overlapping",
        "plan: body, overlapping",
        "beside records 5",
        "plan waits for 5",
        "plan ends",
        AS_BEFORE,
    ]
    assert captured[:3] == ("graph", "logits", "features")
