"""Batches of pixels to an engine and results back, so that the host need not wait for either.

On the CUDA engine two slots take turns: pinned host memory, device memory for the pixels, pinned memory for the
results. While one batch runs, the next one is copied into the other slot and uploaded on a stream of its own.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from .base import Array, Ops

if TYPE_CHECKING:
    from .cuda_engine import CudaEngine

logger = logging.getLogger(__name__)

SLOTS = 2
"""How many batches may be on their way at once."""


class Download(Protocol):
    """Results on their way to the host."""

    def wait(self) -> tuple[list[np.ndarray], float]:
        """Waits until they are there; to be called once.

        Returns:
            The arrays, new ones, and the seconds that passed since the batch's upload.
        """


class Transfers(Protocol):
    """The way to an engine and back, for one thread.

    At most `SLOTS` batches are on their way: before the next upload, the oldest download must have been waited for.
    """

    def upload(self, images: Sequence[np.ndarray]) -> Array:
        """Brings at least one image, all uint8 (H, W, C), to the engine as uint8 (N, H, W, C).

        The result is valid until the upload after the next. Raises MemoryError if the engine has no room.
        """

    def download(self, *arrays: Array) -> Download:
        """Begins to bring float32 arrays, computed from the last upload, to the host."""

    def free_bytes(self) -> int | None:
        """Returns the bytes that the engine could still allocate; None where nobody needs to know."""

    def release(self, *, trim: bool = False) -> None:
        """Waits for all work and drops the memory it used; uploads may follow.

        Args:
            trim: whether to give unused memory of CuPy's pool back to the GPU too, which makes later allocations slow.
        """


def make_transfers(ops: Ops, *, pinned: bool = True) -> Transfers:
    """Returns the way to the engine `ops`.

    Args:
        ops: the engine.
        pinned: whether host memory is pinned; where that is refused, pageable memory is used with a warning.
    """
    return CudaTransfers(cast("CudaEngine", ops), pinned=pinned) if ops.name == "cuda" else NumpyTransfers()


class NumpyTransfers:
    """`Transfers` where the engine's memory is the host's; everything is there at once."""

    def __init__(self) -> None:
        self._begin = 0.0

    def upload(self, images: Sequence[np.ndarray]) -> np.ndarray:
        self._begin = time.perf_counter()
        return np.stack(images)

    def download(self, *arrays: np.ndarray) -> "_Arrived":
        return _Arrived(list(arrays), time.perf_counter() - self._begin)

    def free_bytes(self) -> None:
        return None

    def release(self, *, trim: bool = False) -> None:
        pass


class _Arrived:
    """A `Download` that is over."""

    def __init__(self, arrays: list[np.ndarray], seconds: float) -> None:
        self._result = arrays, seconds

    def wait(self) -> tuple[list[np.ndarray], float]:
        return self._result


class CudaTransfers:
    """`Transfers` to a GPU. Computation runs on the caller's current stream, uploads on a private one."""

    def __init__(self, ops: "CudaEngine", *, pinned: bool = True) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(ops.device)
        self._host = _HostMemory(pinned)
        with self._device:
            self._uploads = cupy.cuda.Stream(non_blocking=True)
            self._slots = [_Slot(cupy) for _ in range(SLOTS)]
        self._turns = itertools.cycle(self._slots)
        self._slot = self._slots[0]

    def upload(self, images: Sequence[np.ndarray]) -> Any:
        cupy, slot = self._cupy, next(self._turns)
        self._slot = slot
        shape = (len(images), *images[0].shape)
        nbytes = len(images) * images[0].nbytes
        with self._device:
            slot.done.synchronize()
            current = cupy.cuda.get_current_stream()
            if slot.pixels is None or slot.pixels.nbytes < nbytes:
                slot.pixels = None  # freed before its successor is allocated
                slot.pixels = cupy.empty(nbytes, np.uint8)
                # The pool hands out memory that kernels on the current stream may still be reading.
                slot.allocated.record(current)
                self._uploads.wait_event(slot.allocated)
            slot.host = self._host.array(slot.host, nbytes)
            host = slot.host[:nbytes].reshape(shape)
            np.stack(images, out=host)
            slot.begun.record(current)
            pixels = slot.pixels[:nbytes].reshape(shape)
            pixels.set(host, stream=self._uploads)
            slot.uploaded.record(self._uploads)
            current.wait_event(slot.uploaded)
        return pixels

    def download(self, *arrays: Any) -> "_CudaDownload":
        slot, results = self._slot, []
        with self._device:
            current = self._cupy.cuda.get_current_stream()
            for number, array in enumerate(arrays):
                if number == len(slot.results):
                    slot.results.append(None)
                memory = slot.results[number] = self._host.array(slot.results[number], array.nbytes)
                result = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
                array.get(stream=current, out=result, blocking=False)
                results.append(result)
            slot.done.record(current)
        return _CudaDownload(self._cupy, slot, results)

    def free_bytes(self) -> int:
        with self._device:
            pool = self._cupy.get_default_memory_pool()
            free = int(self._cupy.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())
            limit = int(pool.get_limit())  # 0 where the user has set none
            return min(free, max(0, limit - int(pool.used_bytes()))) if limit else free

    def release(self, *, trim: bool = False) -> None:
        with self._device:
            self._uploads.synchronize()
            self._cupy.cuda.get_current_stream().synchronize()
            for slot in self._slots:
                slot.done.synchronize()  # the current stream may have been another one when it was recorded
                slot.pixels, slot.host, slot.results = None, None, []
            if trim:
                self._cupy.get_default_memory_pool().free_all_blocks()


class _Slot:
    """Memory and events of one batch. An event that was never recorded counts as past."""

    def __init__(self, cupy: Any) -> None:
        self.pixels: Any = None
        self.host: np.ndarray | None = None
        self.results: list[np.ndarray | None] = []
        self.begun = cupy.cuda.Event()
        self.done = cupy.cuda.Event()
        self.allocated = cupy.cuda.Event(disable_timing=True)
        self.uploaded = cupy.cuda.Event(disable_timing=True)


class _CudaDownload:
    """A `Download` from a GPU."""

    def __init__(self, cupy: Any, slot: _Slot, results: list[np.ndarray]) -> None:
        self._cupy, self._slot, self._results = cupy, slot, results

    def wait(self) -> tuple[list[np.ndarray], float]:
        self._slot.done.synchronize()
        seconds = self._cupy.cuda.get_elapsed_time(self._slot.begun, self._slot.done) / 1000
        return [result.copy() for result in self._results], seconds  # the slot's memory serves the next batch


class _HostMemory:
    """Host memory that a GPU copies from and to while the processor does something else, if the system has it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned

    def array(self, old: np.ndarray | None, nbytes: int) -> np.ndarray:
        """Returns uint8 memory of at least `nbytes`: `old` if it is large enough."""
        if old is not None and old.nbytes >= nbytes:
            return old
        if self._pinned:
            import cupy

            try:
                return np.ndarray(nbytes, np.uint8, buffer=cupy.cuda.alloc_pinned_memory(nbytes))
            except (MemoryError, cupy.cuda.runtime.CUDARuntimeError) as error:
                logger.warning("%d bytes of pinned memory cannot be had (%s); going on without", nbytes, error)
                self._pinned = False
        return np.empty(nbytes, np.uint8)
