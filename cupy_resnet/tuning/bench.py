"""Times convolution kernels on the GPU.

A sample is one CUDA graph of many launches in a row, between two events: launching a kernel from Python takes longer
than a small one runs. Before it the same graph runs once more, so that the GPU is busy until the host has enqueued
both events, and warm. Launches follow each other as in a plan: each waits for the one before, and begins early where it
can.

Operands are normally distributed: multiplying zeros or small integers draws less power, and a GPU that draws less
clocks higher. Every launch reads a filter of its own, as far as that is needed to find none of them in the L2 cache, as
in a network, where other layers' filters come in between; the input was written just before in a network, and may be
in the cache here as there. With `cold_l2` input, residual and output change as well.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import jit
from ..conv2d import VARIANTS, Device, back_to_back
from ..conv2d.scratch import new_counters, scratch
from ..errors import CompileError
from .entrants import Apart, Candidate
from .operands import LAUNCHES, PERIOD, Arrays, as_float32, launch, make_operands
from .workloads import Workload

if TYPE_CHECKING:
    import cupy

SAMPLE_MICROSECONDS = 500.0
"""A sample of a long kernel has fewer launches, so that it takes about as long, but two at least."""

TOLERANCES = {"fp32": 1e-4, "fp32-tc": 1e-4, "tf32": 2e-3, "fp16": 4e-3, "bf16": 3e-2}
"""By how much two candidates' outputs may differ, relative to the largest output: rounding of the result and of a sum
in another order, not of a tile that is wrong."""

CHUNK = 1 << 24
"""Elements compared at once."""


class Race(Protocol):
    """Candidates that are ready to be timed on one convolution."""

    @property
    def rejected(self) -> Mapping[Candidate, str]:
        """Those that cannot be timed, and why."""

    def sample(self, candidate: Candidate) -> float:
        """Returns microseconds per launch of a candidate that is not among them, measured once."""


class Bench(Protocol):
    """What `tune` times with."""

    device: Device
    device_id: int
    """Number of the GPU."""

    def race(self, workload: Workload, candidates: Sequence[Candidate]) -> AbstractContextManager[Race]:
        """Prepares candidates, and frees what they took at the end.

        Raises:
            MemoryError: there is no room for the operands.
        """


class GpuBench:
    """Times on a GPU, on a stream and with memory of its own.

    Args:
        device_id: number of the GPU, by default the current one.
        cold_l2: whether no operand may be found in the L2 cache.

    Raises:
        EngineUnavailableError: there is no GPU that CuPy can use.
    """

    def __init__(self, device_id: int | None = None, *, cold_l2: bool = False) -> None:
        from ..engines.cuda_engine import cuda_obstacle, describe_device
        from ..errors import EngineUnavailableError

        obstacle = cuda_obstacle()
        if obstacle:
            raise EngineUnavailableError(obstacle)
        import cupy

        self.device_id: int = cupy.cuda.runtime.getDevice() if device_id is None else device_id
        self.device = describe_device(self.device_id)
        self.cold_l2 = cold_l2
        self.normal = np.random.default_rng(0).standard_normal(PERIOD, np.float32)

    @contextmanager
    def race(self, workload: Workload, candidates: Sequence[Candidate]) -> Iterator["GpuRace"]:
        """Compiles, runs and compares the candidates; see `Bench.race`."""
        import cupy

        with cupy.cuda.Device(self.device_id):
            compile_all(candidates, self.device_id)
            pool = cupy.cuda.MemoryPool()
            stream = cupy.cuda.Stream(non_blocking=True)
            with cupy.cuda.using_allocator(pool.malloc), stream, scratch(new_counters()):
                race = GpuRace(self, workload, stream)
                try:
                    race.prepare(candidates)
                    yield race
                finally:
                    stream.synchronize()
                    race.release()
            pool.free_all_blocks()


class GpuRace:
    """A `Race` on the current device and stream, whose allocator is a private pool."""

    def __init__(self, bench: GpuBench, workload: Workload, stream: Any) -> None:
        self.rejected: dict[Candidate, str] = {}
        self._workload, self._stream = workload, stream
        self._normal, self._cold_l2 = bench.normal, bench.cold_l2
        self._graphs: dict[Candidate, Any] = {}
        self._operands: list[Arrays] = []
        self._launches = LAUNCHES

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Makes operands, checks every candidate's outputs against the first finite ones, and captures its launches."""
        self._operands = make_operands(self._workload, self._normal, cold_l2=self._cold_l2)
        tolerance = TOLERANCES[self._workload.problem.precision]
        reference = None
        for candidate in candidates:
            try:
                outputs = self._run(candidate)
            except CompileError as error:
                self.rejected[candidate] = str(error)
                continue
            compared = zip(outputs, outputs if reference is None else reference, strict=True)
            difference = max(self._difference(output, expected) for output, expected in compared)
            if difference > tolerance:
                self.rejected[candidate] = (
                    f"its output differs by {difference:.2g} of the largest value, more than {tolerance:g}"
                )
                continue
            if reference is None:
                reference = outputs
                self._launches = self._suitable_launches(candidate)
            self._graphs[candidate] = self._capture(candidate)

    def sample(self, candidate: Candidate) -> float:
        """Returns microseconds per launch, measured once."""
        import cupy

        graph, start, stop = self._graphs[candidate], cupy.cuda.Event(), cupy.cuda.Event()
        graph.launch(self._stream)
        start.record(self._stream)
        graph.launch(self._stream)
        stop.record(self._stream)
        stop.synchronize()
        return 1000 * float(cupy.cuda.get_elapsed_time(start, stop)) / self._launches

    def release(self) -> None:
        """Drops graphs and operands."""
        self._graphs.clear()
        self._operands.clear()

    def _run(self, candidate: Candidate) -> "list[cupy.ndarray]":
        """Runs a candidate once on each of the operands; returns the first outputs.

        That compiles and loads what is left, derives filters' other forms, and leaves the pool with the workspace that
        the capture will take.
        """
        first = self._operands[0].outputs
        for output in first:
            # All bits set are NaN in every format.
            output.data.memset_async(0xFF, output.nbytes, self._stream)
        launch(self._workload.problem, candidate, self._operands[0])
        outputs = [output.copy() for output in first]
        for operands in self._operands[1:]:
            launch(self._workload.problem, candidate, operands)
        return outputs

    def _suitable_launches(self, candidate: Candidate) -> int:
        import cupy

        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(self._stream)
        for operands in self._operands[:4]:
            launch(self._workload.problem, candidate, operands)
        stop.record(self._stream)
        stop.synchronize()
        one = 1000 * float(cupy.cuda.get_elapsed_time(start, stop)) / 4
        return min(LAUNCHES, max(2, round(SAMPLE_MICROSECONDS / one)))

    def _capture(self, candidate: Candidate) -> Any:
        self._stream.begin_capture()
        try:
            with jit.overlapping():  # as in a plan
                for operands in self._operands[: self._launches]:
                    launch(self._workload.problem, candidate, operands)
        finally:
            graph = self._stream.end_capture()
        return graph

    def _difference(self, output: "cupy.ndarray", reference: "cupy.ndarray") -> float:
        """Largest difference, relative to the largest value of `reference`; Inf where one of them has a NaN or Inf."""
        import cupy

        precision = self._workload.problem.precision
        flat, expected = output.reshape(-1), reference.reshape(-1)
        worst, largest = cupy.zeros((), cupy.float32), cupy.zeros((), cupy.float32)
        for begin in range(0, flat.size, CHUNK):
            a, b = (as_float32(part[begin : begin + CHUNK], precision) for part in (flat, expected))
            difference = cupy.abs(a - b)
            worst = cupy.maximum(worst, cupy.where(cupy.isnan(difference), np.float32(np.inf), difference).max())
            largest = cupy.maximum(largest, cupy.abs(b).max())
        return float(worst) / max(float(largest), 1e-30) if math.isfinite(float(worst)) else math.inf


def compile_all(candidates: Sequence[Candidate], device_id: int) -> None:
    """Compiles what the candidates launch, several kernels at a time; errors show when they are launched."""
    forms: dict[tuple[Any, ...], tuple[str, dict[str, int | str]]] = {}
    for candidate in candidates:
        for source, defines in _sources(candidate):
            forms[source, *defines.items()] = (source, defines)

    def compile_form(form: tuple[str, dict[str, int | str]]) -> None:
        with suppress(CompileError):
            jit.get_function(form[0], defines=form[1], device=device_id)

    with ThreadPoolExecutor(min(len(forms), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_form, forms.values()))


def _sources(candidate: Candidate) -> Iterator[tuple[str, dict[str, int | str]]]:
    """Yields the kernel files that a candidate launches, without suffix, each with its ``#define``s."""
    if isinstance(candidate, Apart):
        for kernel in candidate.kernels():
            yield from _sources(kernel)
    elif candidate.variant == back_to_back.name:
        yield back_to_back.name, candidate.config.defines()
    else:
        for source in VARIANTS[candidate.variant].sources_of(candidate.config):
            yield source, candidate.config.defines()
