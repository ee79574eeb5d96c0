"""Replays: a call like an earlier one does what differs between the two, and nothing else.

At batch 1 a GPU computes a small network in less time than Python needs to check an array, bring it to CuPy, and choose
and launch the kernel that reads it. The outcome of all that depends on the input's signature only. So a plan notes, at
the first call with a signature, the launch that read the input, and captures the whole pass with it. Later calls are
that graph with another address for its first kernel, and the copy of the results; or, where a graph's kernels cannot be
told addresses, the launch by itself and the graph of all the rest.

A front that does anything else than one such launch, as copying the input first, cannot be repeated like that; neither
can a call during the capture of a graph. Such calls go the long way each time.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import jit
from .gpu_arrays import Library, Signature, library_of

if TYPE_CHECKING:
    import cupy

logger = logging.getLogger(__name__)

MAX_REPLAYS = 16
"""Signatures that a plan remembers; the oldest goes first."""


class Captured(NamedTuple):
    """A part of a forward pass, up to its end, as a graph.

    Args:
        graph: the captured graph.
        logits, features: (N, num_classes) and (N, num_features) float32, where it leaves them.
        front: what the network's front launched, if that is in the graph.
    """

    graph: "cupy.cuda.Graph"
    logits: "cupy.ndarray"
    features: "cupy.ndarray"
    front: Sequence[jit.Launch] = ()


class _Replay(NamedTuple):
    """How to repeat a pass: what enqueues it, for a stream and an input's address, and where the logits are then.

    `kept` stays alive with it; the first input, which `Captured.front` refers to, must not.
    """

    enqueue: Callable[[int, int], None]
    logits: tuple[int, int, int]  # address, bytes, kind of copy
    kept: Captured


class Replays:
    """How one plan is run for inputs of the signatures that it has met.

    Args:
        lock: the plan's: held while work is enqueued that uses its memory.
        body: everything between the front and the results.
        done: recorded at the end of each call.
    """

    def __init__(self, lock: threading.Lock, body: Captured, done: "cupy.cuda.Event") -> None:
        import cupy

        self._runtime: Any = cupy.cuda.runtime
        self._lock, self._done = lock, done.ptr
        self._body: Captured | None = body
        self._device, self._shape = body.logits.data.device_id, body.logits.shape
        self._replays: dict[Signature, _Replay] = {}

    def note(self, given: Any, launches: Sequence[jit.Launch], capture: Callable[[], Captured]) -> None:
        """Remembers how to repeat a call, if that is possible. The caller holds the lock.

        Args:
            given: the array of the caller's, of whatever kind.
            launches: all that the front launched.
            capture: captures the same call, front and body.
        """
        library = library_of(given)
        seen, body = None if library is None else library.look_at(given), self._body
        if seen is None or body is None or seen[0] in self._replays:
            return
        if len(launches) != 1 or not launches[0].reads(seen[2]):
            return
        while len(self._replays) >= MAX_REPLAYS:
            del self._replays[next(iter(self._replays))]
        assert self._body is not None, "a plan that was dropped does not run"
        self._replays[seen[0]] = self._whole(capture) or self._in_two_parts(launches[0], self._body)

    def _whole(self, capture: Callable[[], Captured]) -> _Replay | None:
        if not jit.graphs_can_be_prepared():
            return None
        try:
            captured = capture()
        except MemoryError as error:
            return self._apart(error)
        (front,) = captured.front
        try:
            graph = jit.PreparedGraph(captured.graph, front)
        except LookupError as error:
            return self._apart(error)
        return self._replay(graph, captured)

    @staticmethod
    def _apart(error: Exception) -> None:
        logger.info("the kernel that reads the input is launched by itself: %s", error)

    def _in_two_parts(self, launch: jit.Launch, body: Captured) -> _Replay:
        front, graph, graph_launch = jit.PreparedLaunch(launch), body.graph.graphExec, self._runtime.graphLaunch

        def enqueue(stream: int, address: int) -> None:
            front(stream, address)
            graph_launch(graph, stream)

        return self._replay(enqueue, body)

    def _replay(self, enqueue: Callable[[int, int], None], captured: Captured) -> _Replay:
        logits = captured.logits
        where = logits.data.ptr, logits.nbytes, self._runtime.memcpyDeviceToDevice
        return _Replay(enqueue, where, captured._replace(front=()))

    def clear(self) -> None:
        """Forgets everything, so that nothing is replayed any more and no memory is held. The caller holds the lock."""
        self._replays.clear()
        self._body = None

    def __call__(self, library: Library, signature: Signature, address: int, given: Any, out: Any) -> Any | None:
        """Enqueues a pass on the stream that is current in the caller's library.

        Args:
            library, signature, address: of the input.
            given: the input.
            out: where to put the logits, an array of the caller's; None for a new one.

        Returns:
            The logits, of the caller's kind; None where the call must go the long way: nothing that matters has
            happened then.
        """
        with self._lock:
            replay = self._replays.get(signature)
            runtime, device, done = self._runtime, self._device, self._done
            if replay is None or runtime.getDevice() != device:
                return None
            stream = library.stream(device)
            if runtime.streamIsCapturing(stream):
                return None
            target: int | None = None
            if out is not None:
                target = library.address_of_out(out, self._shape, given)
                if target is None:
                    return None
            runtime.streamWaitEvent(stream, done)  # of the call before, which may have used another stream
            replay.enqueue(stream, address)
            # From here on the GPU has something to do: what the host still needs takes no time.
            try:
                if target is None:
                    out, target = library.empty(self._shape, given)
                runtime.memcpyAsync(target, *replay.logits, stream)
            except MemoryError:
                return None  # there, plans are dropped to make room
            finally:
                runtime.eventRecord(done, stream)
            return out
