"""How long a piece of work takes: on the processor by its clock, on a GPU by events around it."""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

GATE_SECONDS = 1.0
"""After this long a GPU's work starts even if it is not all queued: a call that waits for the GPU must not hang."""


class Clock(Protocol):
    """Times calls. A test's clock needs no machine to be fast or slow."""

    def alone(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Returns the call's result and the seconds its work takes on an idle device, without launch overhead."""

    def as_called(self, call: Callable[[], Any]) -> float:
        """Returns the seconds from the call until its work is done, launch overhead and waiting included."""


class ProcessorClock:
    """The clock for engines that compute before they return."""

    def alone(self, call: Callable[[], Any]) -> tuple[Any, float]:
        begin = time.perf_counter()
        result = call()
        return result, time.perf_counter() - begin

    def as_called(self, call: Callable[[], Any]) -> float:
        return self.alone(call)[1]


class CudaClock:
    """The clock of one GPU: CUDA events on its current stream.

    Work of a few microseconds is over before the host, which needs longer than that for every launch, has recorded
    the second event: two events around it would time the host. So the stream first waits at a gate, a host function,
    until the events and what is between them are queued; then the GPU runs them without a gap.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int) -> None:
        self.device = device

    def alone(self, call: Callable[[], Any]) -> tuple[Any, float]:
        import cupy

        with cupy.cuda.Device(self.device):
            stream = cupy.cuda.get_current_stream()
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            stream.synchronize()
            gate = threading.Event()
            stream.launch_host_func(lambda _: gate.wait(GATE_SECONDS), None)
            try:
                start.record(stream)
                result = call()
                stop.record(stream)
            finally:
                gate.set()
            stop.synchronize()
            return result, float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3

    def as_called(self, call: Callable[[], Any]) -> float:
        import cupy

        with cupy.cuda.Device(self.device):
            stream = cupy.cuda.get_current_stream()
            stream.synchronize()
            begin = time.perf_counter()
            call()
            stream.synchronize()
            return time.perf_counter() - begin


def clock_of(ops: Any) -> Clock:
    """Returns the clock of an engine."""
    return CudaClock(ops.device) if ops.name == "cuda" else ProcessorClock()
