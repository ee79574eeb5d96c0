"""Replays: a call like an earlier one does what differs between the two, and nothing else.

At batch 1 a GPU computes a small network in less time than Python needs to check an array, bring it to CuPy, and choose
and launch the kernel that reads it. The outcome of all that depends on the input's signature only. So a plan notes, at
the first call with a signature, the launch that read the input. Later calls are that launch with another address, the
plan's graph, and the copy of the results.

A front that does anything else than one such launch, as copying the input first, cannot be repeated like that; neither
can a call during the capture of a graph. Such calls go the long way each time.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import jit
from .arrays import check_out
from .gpu_arrays import GpuInput

if TYPE_CHECKING:
    import cupy

MAX_REPLAYS = 64
"""Signatures that a plan remembers; the oldest goes first."""


class Replays:
    """How one plan is run for inputs of the signatures that it has met, by one thread at a time.

    Args:
        graph: everything between the front and the results, captured.
        logits: (N, num_classes) float32, where the graph leaves them.
        done: recorded at the end of each call.
    """

    def __init__(self, graph: Any, logits: "cupy.ndarray", done: "cupy.cuda.Event") -> None:
        import cupy

        self._runtime: Any = cupy.cuda.runtime
        self._device = logits.data.device_id
        self._shape = logits.shape
        self._kept = graph, logits, done  # what the following handles belong to
        self._graph, self._done = graph.graphExec, done.ptr
        self._logits = logits.data.ptr, logits.nbytes, self._runtime.memcpyDeviceToDevice
        self._fronts: dict[tuple[Any, ...], jit.PreparedLaunch] = {}

    def note(self, given: GpuInput, launches: Sequence[jit.Launch]) -> None:
        """Remembers how an input was read, if that can be repeated.

        Args:
            given: the caller's array.
            launches: all that the front launched.
        """
        if len(launches) != 1 or not launches[0].reads(given.address):
            return
        while len(self._fronts) >= MAX_REPLAYS:
            del self._fronts[next(iter(self._fronts))]
        self._fronts[given.signature] = jit.PreparedLaunch(launches[0])

    def __call__(self, given: GpuInput, out: Any) -> Any | None:
        """Enqueues a pass on the stream that is current in the caller's library.

        Args:
            given: the input.
            out: where to put the logits, an array of the caller's; None for a new one.

        Returns:
            The logits, of the caller's kind; None, and nothing is enqueued, where the call must go the long way.

        Raises:
            TypeError, ValueError: an unsuitable `out`, as `check_out` says.
        """
        front = self._fronts.get(given.signature)
        if front is None:
            return None
        runtime, library = self._runtime, given.library
        if runtime.getDevice() != self._device:
            return None
        stream = library.stream(self._device)
        if runtime.streamIsCapturing(stream):
            return None
        if out is None:
            try:
                out, address = library.empty(self._shape, given.array)
            except MemoryError:
                return None  # there, plans are dropped to make room
        else:
            check_out(out, given.array, self._shape)
            address = library.address_to_write(out)
            if address is None:
                return None
        runtime.streamWaitEvent(stream, self._done)  # of the call before, which may have used another stream
        front(stream, given.address)
        runtime.graphLaunch(self._graph, stream)
        runtime.memcpyAsync(address, *self._logits, stream)
        runtime.eventRecord(self._done, stream)
        return out
