"""Stand-ins for CUDA, for arrays and for graphs, to test repeated calls with on the CPU; fixtures that use them."""

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import replay as replay_module
from cupy_resnet.jit import Launch
from cupy_resnet.replay import Captured, Passes, Replays

BODY, WHOLE, LOGITS, DONE, STREAM = 0x61, 0x62, 0x10600, 0xE, 0x58
KEY = (2, 8, 8)

WAIT, RECORD = ("streamWaitEvent", STREAM, DONE), ("eventRecord", DONE, STREAM)


class Input:
    """A caller's array: its signature and address."""

    def __init__(self, signature: str = "NCHW", address: int = 0x1000) -> None:
        self.signature, self.address = signature, address
        self.failure: Exception | None = None


class Library:
    """The library of `Input`; results are strings, and so is `out`."""

    def __init__(self) -> None:
        self.room = self.room_for_spares = True
        self.spares = 0
        self.current = STREAM

    def look_at(self, x: Input) -> tuple[tuple[str], int] | None:
        return None if x.signature == "odd" else ((x.signature,), x.address)

    def stream(self, device: int) -> int:
        assert device == 1
        return self.current

    def empty(self, shape: tuple[int, ...], like: Input) -> tuple[str, int]:
        if not self.room:
            raise MemoryError
        return f"new {shape}", 0xAAA0

    def spare(self, shape: tuple[int, ...], like: Input) -> tuple[str, int]:
        if not self.room_for_spares:
            raise MemoryError
        self.spares += 1
        return f"spare {self.spares}", 0xCCC0 + self.spares

    def address_of_out(self, out: str, shape: tuple[int, ...], like: Input) -> int | None:
        return 0xBBB0 if out == f"out {shape}" else None


class Cuda:
    """CuPy's runtime, on device 1; `calls` are what was enqueued and what graphs were told."""

    memcpyDeviceToDevice = 3  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.device, self.capturing = 1, False
        self.bindings_are_there = self.kernels_are_found = self.last_kernel_is_found = True
        self.failure: Exception | None = None
        self.graphs = itertools.count(1)
        self.library = Library()
        self.passes: Passes

    def getDevice(self) -> int:  # noqa: N802
        return self.device

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        assert stream == self.library.current
        return self.capturing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            assert self.passes.lock.locked()
            self.calls.append((name, *arguments))
            if self.failure is not None and name == "graphLaunch":
                raise self.failure

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=fake)))
    monkeypatch.setattr(replay_module, "library_of", lambda x: fake.library if isinstance(x, Input) else None)

    class ExecutableGraph:
        """Its handle is "graph 1", "graph 2", and so on."""

        def __init__(self, prepared: "PreparedGraph") -> None:
            self.prepared, self.handle = prepared, f"graph {next(fake.graphs)}"

        def run(self, stream: int) -> None:
            fake.graphLaunch(self.handle, stream)

        def read_from(self, address: int) -> None:
            fake.read_from(self.handle, self.prepared.kernel, address)

        def write_to(self, address: int) -> None:
            assert self.prepared.writing is not None
            last, place = self.prepared.writing
            fake.write_to(self.handle, last.kernel, place, address)

    class PreparedGraph:
        def __init__(self, graph: Any, reading: Launch, writing: tuple[Launch, int] | None = None) -> None:
            if not fake.kernels_are_found or (writing is not None and not fake.last_kernel_is_found):
                raise LookupError("2 of the graph's kernels are the one that was launched")
            self.kernel, self.writing = reading.kernel, writing

        def executable(self) -> ExecutableGraph:
            return ExecutableGraph(self)

    jit = SimpleNamespace(
        PreparedLaunch=lambda launch: lambda stream, address: fake.launched(launch.kernel, stream, address),
        PreparedGraph=PreparedGraph,
        graphs_can_be_prepared=lambda: fake.bindings_are_there,
    )
    monkeypatch.setattr(replay_module, "jit", jit)
    fake.passes = Passes(KEY, captured(BODY, LOGITS, []), SimpleNamespace(ptr=DONE), stream=STREAM)
    return fake


def captured(graph: int, logits: int, front: list[Launch], last: Launch | None = None) -> Captured:
    array = SimpleNamespace(data=SimpleNamespace(ptr=logits, device_id=1), shape=(2, 10), nbytes=80)
    return Captured(SimpleNamespace(graphExec=graph), array, None, front, last)


def reading(x: Input, kernel: str = "front") -> Launch:
    return Launch(kernel, (1,), (32,), (SimpleNamespace(data=SimpleNamespace(ptr=x.address)), 7), 0)


def writing(*values: Any) -> Launch:
    """Of the kernel that computes the logits."""
    arrays = (SimpleNamespace(data=SimpleNamespace(ptr=at), dtype=np.dtype(np.float32)) for at in (0x50, LOGITS + 1))
    return Launch("linear", (1,), (32,), (*arrays, *values), 0)


class Repeating(Replays):
    """As a runner and its plan use it; `keys` are of the plans that were used."""

    def __init__(self, cuda: Cuda) -> None:
        self.keys: list[tuple[int, ...]] = []
        super().__init__(self.keys.append)
        self.cuda = cuda

    def seen(self, x: Any, launches: list[Launch] | None = None, last: Launch | None = None) -> None:
        """The long way of a plan. What it captures has other numbers than its body."""
        launches = [reading(x)] if launches is None else launches
        self.note(self.cuda.passes, x, launches, lambda: captured(WHOLE, LOGITS + 1, launches, last))


@pytest.fixture
def replays(cuda: Cuda) -> Repeating:
    """Of a plan whose last kernel cannot be told where to write."""
    return Repeating(cuda)


@pytest.fixture
def direct(cuda: Cuda) -> Repeating:
    """Of a plan whose last kernel can; it knows one signature."""
    made = Repeating(cuda)
    made.seen(Input(), last=writing(np.int32(7)))
    return made
