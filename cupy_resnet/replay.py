"""Replays: a call like an earlier one does what differs between the two, and nothing else.

At batch 1 a GPU computes a small network in less time than Python needs to check an array, bring it to CuPy, and choose
and launch the kernel that reads it. The outcome of all that depends on the input's signature only. So a plan notes, at
the first call with a signature, the launch that read the input, and captures the whole pass with it. Later calls are
that graph with another address for its first kernel, and for its last that of an array that was sought while the GPU
was busy with the call before. Where the last kernel cannot be told one, as it stores by way of a tensor map, results
are copied; where none can, the first launch is by itself, and the graph that of all the rest.

A front that does anything else than one such launch, as copying the input first, cannot be repeated like that; neither
can a call during the capture of a graph. Such calls go the long way each time.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        last: the launch that computed the logits.
    """

    graph: "cupy.cuda.Graph"
    logits: "cupy.ndarray"
    features: "cupy.ndarray"
    front: Sequence[jit.Launch] = ()
    last: jit.Launch | None = None


@dataclass
class _Replay:
    """How to repeat a pass.

    Args:
        enqueue: enqueues it, for a stream and an input's address.
        logits: where they are then unless `write_to` was called: address, bytes, kind of copy.
        kept: stays alive with it; the first input, which `Captured.front` refers to, must not.
        write_to: has later passes leave the logits at an address; None where they must be copied.
        target: the address that this was called with last.
        spare: an array at `target` that no caller has been given yet, and the stream that it is for.
    """

    enqueue: Callable[[int, int], None]
    logits: tuple[int, int, int]
    kept: Captured
    write_to: Callable[[int], None] | None = None
    target: int = 0
    spare: tuple[Any, int] | None = None

    def aim(self, address: int) -> None:
        """Has the next passes leave the logits there. They may; `write_to` is not None."""
        if self.target != address:
            assert self.write_to is not None
            self.target = 0  # should it fail, nobody knows
            self.write_to(address)
            self.target = address

    def take_spare(self, stream: int) -> Any | None:
        """Returns the array that the next pass leaves the logits in, if it is for this stream, and forgets it."""
        spare, self.spare = self.spare, None
        return spare[0] if spare is not None and spare[1] == stream else None


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
        place = None if captured.last is None else captured.last.place_of(captured.logits.data.ptr)
        if captured.last is not None and place is not None:
            with contextlib.suppress(LookupError):  # several kernels may be of this kind: the logits are copied then
                graph = jit.PreparedGraph(captured.graph, front, (captured.last, place))
                return self._replay(graph, captured, graph.write_to)
        try:
            return self._replay(jit.PreparedGraph(captured.graph, front), captured)
        except LookupError as error:
            return self._apart(error)

    @staticmethod
    def _apart(error: Exception) -> None:
        logger.info("the kernel that reads the input is launched by itself: %s", error)

    def _in_two_parts(self, launch: jit.Launch, body: Captured) -> _Replay:
        front, graph, graph_launch = jit.PreparedLaunch(launch), body.graph.graphExec, self._runtime.graphLaunch

        def enqueue(stream: int, address: int) -> None:
            front(stream, address)
            graph_launch(graph, stream)

        return self._replay(enqueue, body)

    def _replay(
        self,
        enqueue: Callable[[int, int], None],
        captured: Captured,
        write_to: Callable[[int], None] | None = None,
    ) -> _Replay:
        logits = captured.logits
        where = logits.data.ptr, logits.nbytes, self._runtime.memcpyDeviceToDevice
        return _Replay(enqueue, where, captured._replace(front=(), last=None), write_to)

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
            if replay.write_to is not None:
                return self._write(replay, library, stream, address, given, out, target)
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

    def _write(
        self, replay: _Replay, library: Library, stream: int, address: int, given: Any, out: Any, target: int | None
    ) -> Any | None:
        """As `__call__`, where the graph's last kernel leaves the logits where they belong."""
        wants_another = target is None
        if target is not None:
            replay.spare = None  # the kernel is told another array
        else:
            out, target = replay.take_spare(stream), replay.target
            try:
                if out is None:
                    out, target = library.empty(self._shape, given)
            except MemoryError:
                return None
        replay.aim(target)
        self._runtime.streamWaitEvent(stream, self._done)
        try:
            replay.enqueue(stream, address)
        finally:
            self._runtime.eventRecord(self._done, stream)
        if wants_another:
            with contextlib.suppress(MemoryError):  # the next call seeks one itself then
                spare, target = library.spare(self._shape, given)
                replay.aim(target)
                replay.spare = spare, stream
        return out
