"""Replays: a call like an earlier one does what differs between the two, and nothing else.

At batch 1 a GPU computes a small network in less time than Python needs to check an array, bring it to CuPy, and choose
and launch the kernel that reads it. The outcome of all that depends on the input's signature only. So a plan notes, at
the first call with a signature, the launch that read the input. Later calls are that launch with another address, the
plan's graph, and the copy of the results.

A front that does anything else than one such launch, as copying the input first, cannot be repeated like that; neither
can a call during the capture of a graph. Such calls go the long way each time.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import jit
from .gpu_arrays import Library, Signature, library_of

if TYPE_CHECKING:
    import cupy

MAX_REPLAYS = 64
"""Signatures that a plan remembers; the oldest goes first."""


class Replays:
    """How one plan is run for inputs of the signatures that it has met.

    Args:
        lock: the plan's: held while work is enqueued that uses its memory.
        graph: everything between the front and the results, captured; the plan keeps it until `clear`.
        logits: (N, num_classes) float32, where the graph leaves them; likewise.
        done: recorded at the end of each call.
    """

    def __init__(
        self, lock: threading.Lock, graph: "cupy.cuda.Graph", logits: "cupy.ndarray", done: "cupy.cuda.Event"
    ) -> None:
        import cupy

        self._runtime: Any = cupy.cuda.runtime
        self._lock = lock
        self._device, self._shape = logits.data.device_id, logits.shape
        self._graph, self._done = graph.graphExec, done.ptr
        self._logits = logits.data.ptr, logits.nbytes, self._runtime.memcpyDeviceToDevice
        self._fronts: dict[Signature, jit.PreparedLaunch] = {}

    def note(self, given: Any, launches: Sequence[jit.Launch]) -> None:
        """Remembers how an input was read, if that can be repeated. The caller holds the lock.

        Args:
            given: the array of the caller's, of whatever kind.
            launches: all that the front launched.
        """
        library = library_of(given)
        seen = None if library is None else library.look_at(given)
        if seen is None or len(launches) != 1 or not launches[0].reads(seen[2]):
            return
        while len(self._fronts) >= MAX_REPLAYS:
            del self._fronts[next(iter(self._fronts))]
        self._fronts[seen[0]] = jit.PreparedLaunch(launches[0])

    def clear(self) -> None:
        """Forgets everything, so that nothing is replayed any more. The caller holds the lock."""
        self._fronts.clear()

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
            front = self._fronts.get(signature)
            runtime, device, done = self._runtime, self._device, self._done
            if front is None or runtime.getDevice() != device:
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
            front(stream, address)
            runtime.graphLaunch(self._graph, stream)
            # From here on the GPU has something to do: what the host still needs takes no time.
            try:
                if target is None:
                    out, target = library.empty(self._shape, given)
                runtime.memcpyAsync(target, *self._logits, stream)
            except MemoryError:
                return None  # there, plans are dropped to make room
            finally:
                runtime.eventRecord(done, stream)
            return out
