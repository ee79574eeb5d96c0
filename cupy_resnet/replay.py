"""Replays: a call like an earlier one does what differs between the two, and nothing else.

At batch 1 a GPU computes a small network in less time than Python needs to check an array, bring it to CuPy, and choose
and launch the kernel that reads it. The outcome of all that depends on the input's signature only. So the first call
with a signature notes the launch that read the input, and captures the whole pass with it. Later calls are that graph,
told another address for its first kernel and, for its last, that of an array of its own, which was sought while the GPU
was busy with a call before. A graph is told nothing twice: inputs often lie where earlier ones lay, in one of a few
buffers, and each of these addresses has an executable graph of its own.

Between two calls the caller does other things, and finds neither code nor data of these lines in the processor's caches
again. What counts is then how many different things are touched before the GPU has its work: hence one long function.

Where the last kernel cannot be told an array, as it stores by way of a tensor map, results are copied; where none can,
the first launch is by itself, and the graph that of all the rest. A front that does anything else than one such launch,
as copying the input first, cannot be repeated like that; neither can a call during the capture of a graph. Such calls
go the long way each time.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from . import jit
from .cuda_errors import lost_context_explained
from .gpu_arrays import Library, Signature, library_of

if TYPE_CHECKING:
    import cupy

logger = logging.getLogger(__name__)

MAX_REPLAYS = 16
"""Signatures that are remembered of a plan; the oldest goes first."""

MAX_ADDRESSES = 4
"""Of inputs of one signature, for which there is an executable graph each; for others the oldest is told."""


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


@dataclass(eq=False)
class Passes:
    """The passes of one plan: they use the same memory, and so run one after the other, on the GPU as well.

    Args:
        key: which plan it is.
        body: everything between the front and the results; None once the plan was dropped.
        done: recorded at the end of each pass.
        lock: held while work is enqueued that uses the plan's memory.
        stream: handle of the newest pass's.
    """

    key: tuple[int, ...]
    body: Captured | None
    done: "cupy.cuda.Event"
    lock: threading.Lock = field(default_factory=threading.Lock)
    stream: int = 0


@dataclass
class _Ready:
    """An executable graph.

    Args:
        graph: the graph, which was told the address of an input.
        handle: what CUDA runs.
        target: the address where it was told to leave the logits, 0 if none is known.
        spare: an array there that no caller has been given yet.
        stream: the stream that this array is for; None: there is no array.
    """

    graph: jit.ExecutableGraph
    handle: int
    target: int = 0
    spare: Any = None
    stream: int | None = None

    def aim(self, address: int) -> None:
        """Has its next runs leave the logits there."""
        if self.target != address:
            self.target = 0  # should it fail, nobody knows
            self.graph.write_to(address)
            self.target = address


@dataclass
class _Replay:
    """How to repeat a pass of a signature.

    Args:
        passes: of the plan.
        device: number of the GPU.
        shape: (N, num_classes).
        captured: stays alive with it, but for its launches: first inputs must not.
        logits: where they are if they must be copied: address, bytes, kind of copy; None if graphs are told where to
            leave them.
        graph: the captured graph; None where it can be told nothing.
        launch: the launch that goes before it then.
        ready: executable graphs, by the address of the input.
    """

    passes: Passes
    device: int
    shape: tuple[int, ...]
    captured: Captured
    logits: tuple[int, int, int] | None
    graph: jit.PreparedGraph | None
    launch: jit.PreparedLaunch | None = None
    ready: dict[int, _Ready] = field(default_factory=dict)


class Replays:
    """How a runner repeats calls, of all its plans.

    Args:
        used: called with the key of the plan whose pass was repeated, when the GPU has its work.
    """

    def __init__(self, used: Callable[[tuple[int, ...]], None]) -> None:
        self._used = used
        self._libraries: dict[type, Library] = {}
        self._replays: dict[Signature, _Replay] = {}
        self._of_thread = threading.local()
        self._runtime: Any = None

    def note(self, passes: Passes, given: Any, launches: Sequence[jit.Launch], capture: Callable[[], Captured]) -> None:
        """Remembers how to repeat a call, if that is possible. The caller holds the lock of `passes`.

        Args:
            passes: of the plan that ran it.
            given: the array of the caller's, of whatever kind.
            launches: all that the front launched.
            capture: captures the same call, front and body.
        """
        self._start()
        library = library_of(given)
        seen = None if library is None else library.look_at(given)
        if library is None or seen is None or passes.body is None or seen[0] in self._replays:
            return
        if len(launches) != 1 or not launches[0].reads(seen[1]):
            return
        of_plan = self._of_plan(passes)
        for signature in of_plan[: max(len(of_plan) - MAX_REPLAYS + 1, 0)]:
            del self._replays[signature]
        replay = self._whole(passes, capture) or self._in_two_parts(passes, launches[0])
        self._libraries[type(given)] = library
        self._replays[seen[0]] = replay

    def _start(self) -> None:
        """A thread that was here has started CUDA."""
        import cupy

        self._of_thread.has_run = True
        self._runtime = runtime = cupy.cuda.runtime
        self._get_device, self._is_capturing = runtime.getDevice, runtime.streamIsCapturing
        self._launch, self._wait, self._record = runtime.graphLaunch, runtime.streamWaitEvent, runtime.eventRecord

    def _whole(self, passes: Passes, capture: Callable[[], Captured]) -> _Replay | None:
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
                return self._replay(passes, captured, graph, copied=False)
        try:
            return self._replay(passes, captured, jit.PreparedGraph(captured.graph, front))
        except LookupError as error:
            return self._apart(error)

    @staticmethod
    def _apart(error: Exception) -> None:
        logger.info("the kernel that reads the input is launched by itself: %s", error)

    def _in_two_parts(self, passes: Passes, launch: jit.Launch) -> _Replay:
        assert passes.body is not None, "a plan that was dropped does not run"
        return self._replay(passes, passes.body, None, jit.PreparedLaunch(launch))

    def _replay(
        self,
        passes: Passes,
        captured: Captured,
        graph: jit.PreparedGraph | None,
        launch: jit.PreparedLaunch | None = None,
        *,
        copied: bool = True,
    ) -> _Replay:
        logits = captured.logits
        where = (logits.data.ptr, logits.nbytes, self._runtime.memcpyDeviceToDevice) if copied else None
        kept = captured._replace(front=(), last=None)
        return _Replay(passes, logits.data.device_id, logits.shape, kept, where, graph, launch)

    def forget(self, passes: Passes) -> None:
        """Drops what is known of a plan, so that nothing of it is replayed any more and no memory is held.

        The caller holds the lock of `passes`.
        """
        passes.body = None
        for signature in self._of_plan(passes):
            self._replays.pop(signature).ready.clear()  # another thread may be about to look there

    def _of_plan(self, passes: Passes) -> list[Signature]:
        """The signatures that are remembered of a plan, the oldest first. Other threads add those of other plans."""
        return [signature for signature, replay in list(self._replays.items()) if replay.passes is passes]

    def repeat(self, given: Any, out: Any = None) -> Any | None:
        """Runs a forward pass as an earlier one, on the stream that is current in the caller's library.

        Args:
            given: the caller's array (N, in_channels, H, W), or anything else.
            out: where to put the logits, an array of the caller's; None for a new one.

        Returns:
            Logits (N, num_classes), of the caller's kind. None if there was no such call, or it cannot be repeated
            here and now: nothing that matters has happened then.
        """
        library = self._libraries.get(type(given))
        if library is None or not hasattr(self._of_thread, "has_run"):  # CUDA may not be started in this thread
            return None
        seen = library.look_at(given)
        if seen is None:
            return None
        replay = self._replays.get(seen[0])
        if replay is None:
            return None
        address, passes = seen[1], replay.passes
        try:
            with passes.lock:
                if self._get_device() != replay.device:
                    return None
                stream = library.stream(replay.device)
                if self._is_capturing(stream):
                    return None
                ready = replay.ready.get(address)
                if ready is None or ready.stream != stream or out is not None:
                    logits = self._otherwise(replay, library, stream, address, given, out)
                else:
                    if stream or passes.stream:  # not both the default stream, which is never another one
                        self._wait(stream, passes.done.ptr)
                    try:
                        self._launch(ready.handle, stream)
                    finally:
                        self._record(passes.done.ptr, stream)
                        passes.stream = stream
                    # From here on the GPU has something to do: what the host still needs takes no time.
                    logits = ready.spare
                    self._provide(replay, ready, library, stream, given)
        except Exception:
            with lost_context_explained():
                raise
        if logits is not None:
            self._used(passes.key)
        return logits

    def _provide(self, replay: _Replay, ready: _Ready, library: Library, stream: int, given: Any) -> None:
        """Has the graph leave the logits of its next run in another array."""
        ready.stream = None
        try:
            ready.spare, target = library.spare(replay.shape, given)
        except MemoryError:  # the next call seeks one itself
            ready.spare = None
            return
        ready.aim(target)
        ready.stream = stream

    def _otherwise(
        self, replay: _Replay, library: Library, stream: int, address: int, given: Any, out: Any
    ) -> Any | None:
        """As `repeat`, where no graph was told this input and where to leave the logits on this stream."""
        passes = replay.passes
        if passes.body is None:
            return None
        target: int | None = None
        if out is not None:
            target = library.address_of_out(out, replay.shape, given)
            if target is None:
                return None
        if replay.logits is not None:
            return self._copied(replay, library, stream, address, given, out, target)
        seeks = target is None
        if target is None:
            try:
                out, target = library.empty(replay.shape, given)
            except MemoryError:
                return None  # there, plans are dropped to make room
        ready = self._told(replay, address)
        ready.spare = ready.stream = None
        ready.aim(target)
        self._enqueue(passes, stream, ready.graph.run)
        if seeks:
            self._provide(replay, ready, library, stream, given)
        return out

    def _copied(
        self, replay: _Replay, library: Library, stream: int, address: int, given: Any, out: Any, target: int | None
    ) -> Any | None:
        """As `_otherwise`, where the graph leaves the logits in the plan's memory; None, too, if they have no place."""
        logits = replay.logits
        assert logits is not None

        def work(stream: int) -> None:
            nonlocal out, target
            if replay.launch is None:
                self._told(replay, address).graph.run(stream)
            else:
                replay.launch(stream, address)
                self._launch(replay.captured.graph.graphExec, stream)
            if target is None:  # while the GPU is busy
                out, target = library.empty(replay.shape, given)
            self._runtime.memcpyAsync(target, *logits, stream)

        try:
            self._enqueue(replay.passes, stream, work)
        except MemoryError:
            return None
        return out

    def _enqueue(self, passes: Passes, stream: int, work: Callable[[int], None]) -> None:
        """Enqueues work behind the pass before, which may have used another stream."""
        self._wait(stream, passes.done.ptr)
        try:
            work(stream)
        finally:
            self._record(passes.done.ptr, stream)
            passes.stream = stream

    def _told(self, replay: _Replay, address: int) -> _Ready:
        """Returns an executable graph that reads the input at this address."""
        ready = replay.ready.get(address)
        if ready is None:
            assert replay.graph is not None
            if len(replay.ready) < MAX_ADDRESSES:
                graph = replay.graph.executable()
                ready = _Ready(graph, graph.handle)
            else:
                ready = replay.ready.pop(next(iter(replay.ready)))
            ready.graph.read_from(address)  # should it fail, nobody knows what it reads, and it is not kept
            replay.ready[address] = ready
        return ready
