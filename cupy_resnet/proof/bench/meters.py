"""The processor or the GPU that is measured: waiting for it, the time, and the memory it takes.

Everything that differs between the two is here, so that how turns are taken and counted is the same code for both.
"""

import contextlib
import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..ceilings import Ceilings, ceilings
from ..clock import CudaClock

Call = Callable[[], Any]


class Meter(Protocol):
    """What a measurement asks of the device it runs on."""

    device: str
    """torch's name for it: ``"cpu"`` or ``"cuda"``."""

    def now(self) -> float:
        """Seconds since some moment."""

    def synchronize(self) -> None:
        """Returns when everything that was enqueued is done."""

    def device_ms(self, call: Call, repeats: int = 1) -> float:
        """Milliseconds on the device per call, of `repeats` calls in a row, without waiting for the host.

        On a GPU that is the time between two events, the work enqueued before it begins; on a CPU, where a call is
        over when it returns, simply the time.
        """

    def memory_mark(self) -> int | None:
        """Gives unused memory back and returns the bytes in use; None where that is not known."""

    def memory_peak(self, mark: int | None) -> int | None:
        """Returns the most bytes in use since `memory_mark` beyond what was in use then; None where not known."""


class CpuMeter:
    """Wall-meter time; the memory of this process as Linux counts it."""

    device = "cpu"
    _STATUS = Path("/proc/self/status")
    _CLEAR = Path("/proc/self/clear_refs")

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        pass

    def device_ms(self, call: Call, repeats: int = 1) -> float:
        begin = self.now()
        for _ in range(repeats):
            call()
        return (self.now() - begin) * 1e3 / repeats

    def memory_mark(self) -> int | None:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed, and would give it again
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            self._CLEAR.write_text("5")  # sets VmHWM, the most memory so far, back to what is in use now
            return self._status("VmRSS")
        return None

    def memory_peak(self, mark: int | None) -> int | None:
        peak = None if mark is None else self._status("VmHWM")
        return None if mark is None or peak is None else max(0, peak - mark)

    def _status(self, field: str) -> int | None:
        found = re.search(rf"^{field}:\s+(\d+) kB", self._STATUS.read_text(), re.M)
        return int(found[1]) * 1024 if found else None


class CudaMeter:
    """The current GPU, which CuPy and torch share. Memory is what the driver says is gone, whoever holds it.

    torch's and CuPy's pools keep what was once needed, so that after a call that is the most it needed; and weights,
    kernels and a captured graph's own memory count like everything else that ``nvidia-smi`` shows.
    """

    device = "cuda"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._clock = CudaClock(cupy.cuda.runtime.getDevice())

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def device_ms(self, call: Call, repeats: int = 1) -> float:
        _, seconds = self._clock.alone(lambda: [call() for _ in range(repeats)])
        return seconds * 1e3 / repeats

    def memory_mark(self) -> int | None:
        import torch

        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        self._cupy.get_default_memory_pool().free_all_blocks()
        return self._used()

    def memory_peak(self, mark: int | None) -> int | None:
        return None if mark is None else max(0, self._used() - mark)

    def _used(self) -> int:
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return int(total) - int(free)


def make_meter(engine: str) -> Meter:
    """Returns the meter of the device that an engine, ``"cuda"`` or ``"numpy"``, runs on."""
    return CudaMeter() if engine == "cuda" else CpuMeter()


def device_ceilings(engine: str) -> Ceilings:
    """Returns the ceilings of the device that an engine runs on, which takes seconds where they are not kept yet."""
    if engine != "cuda":
        return ceilings()
    import cupy

    return ceilings(cupy.cuda.runtime.getDevice())
