"""Goes through a network's convolutions, the heaviest first, and finds the fastest configuration of each.

Then through what may be one kernel, smaller things first: it races the fastest way to compute it in pieces.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ..conv2d import Device
from ..conv2d.pieces import steps
from ..conv2d.problem import Problem
from ..conv2d.tuned import Entry, config_fields
from ..errors import UnsupportedProblemError
from .bench import Bench
from .contest import Standing, contest
from .entrants import Apart, Candidate, candidates, expected, together
from .workloads import Workload

logger = logging.getLogger(__name__)

BUDGET_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """What was found for one workload.

    Args:
        workload: the convolution, or those that may be one kernel.
        spread_nan: whether kernels that spread a NaN took part.
        standings: all that were timed, the fastest first; medians in microseconds.
        rejected: those whose output was wrong or that could not be run, and why.
        model: what the cost model would have chosen; the pieces of what it would not fuse are those that are the
            fastest.
    """

    workload: Workload
    spread_nan: bool
    standings: tuple[Standing[Candidate], ...]
    rejected: Mapping[Candidate, str]
    model: Candidate

    @property
    def best(self) -> Candidate:
        return self.standings[0].entrant

    @property
    def microseconds(self) -> float:
        """Of the fastest."""
        return self.standings[0].median

    @property
    def model_microseconds(self) -> float | None:
        """Of what the cost model would have chosen; None where that was rejected."""
        return next((standing.median for standing in self.standings if standing.entrant == self.model), None)

    @property
    def entry(self) -> Entry:
        """What is to be remembered."""
        following = self.standings[1].median if len(self.standings) > 1 else None
        return Entry(
            problem=self.workload.problem,
            spread_nan=self.spread_nan,
            variant=self.best.variant,
            config=config_fields(self.best.config),
            microseconds=round(self.microseconds, 2),
            next_microseconds=None if following is None else round(following, 2),
            candidates=len(self.standings),
        )


@dataclass(frozen=True)
class Report:
    """What one tuning found.

    Args:
        device: the GPU.
        results: in the order in which the convolutions were given.
        skipped: those without a result, and why.
        seconds: of measuring; compiling and preparing not counted.
    """

    device: Device
    results: tuple[Result, ...]
    skipped: Mapping[Workload, str]
    seconds: float

    @property
    def entries(self) -> list[Entry]:
        return [result.entry for result in self.results]


def tune(
    workloads: Iterable[Workload],
    bench: Bench,
    *,
    spread_nan: bool = True,
    budget_s: float = BUDGET_SECONDS,
    progress: Callable[[int, int, Workload], None] | None = None,
    found: Callable[[Result], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Times the candidates for each convolution and returns which was fastest. Writes nothing; see `remember`.

    Args:
        workloads: the convolutions; of those with the same problem the first counts.
        bench: what times them, a `GpuBench`.
        spread_nan: as in `cupy_resnet.conv2d.choose`; networks allow it.
        budget_s: seconds of measuring, compiling not counted, shared out as it goes; every convolution that is begun
            has each candidate timed at least once, and those that are left when it is spent are skipped.
        progress: called before each convolution with the number of those that are done, of all, and the convolution.
        found: called with each result as soon as it is there.
        clock: seconds that pass.
    """
    first: dict[Problem, Workload] = {}
    for workload in workloads:
        first.setdefault(workload.problem, workload)
    distinct = list(first.values())
    entrants: dict[Workload, list[Candidate]] = {}
    skipped: dict[Workload, str] = {}
    for workload in distinct:
        try:
            entrants[workload] = candidates(workload.problem, bench.device, spread_nan=spread_nan)
        except UnsupportedProblemError as error:
            skipped[workload] = str(error)
    results: dict[Problem, Result] = {}
    spent = 0.0

    def turn(workload: Workload) -> tuple[int, float]:
        return steps(workload.problem), -_weight(workload, entrants[workload][0], bench.device)

    for done, workload in enumerate(sorted(entrants, key=turn)):
        if progress is not None:
            progress(done, len(entrants), workload)
        if spent >= budget_s:
            skipped[workload] = f"the budget of {budget_s:g} s was spent"
            continue
        if isinstance(entrants[workload][0], Apart):
            fastest = {problem: result.best for problem, result in results.items()}
            entrants[workload] = candidates(workload.problem, bench.device, spread_nan=spread_nan, fastest=fastest)
        timer = _Timer(clock, (budget_s - spent) / (len(entrants) - done))
        try:
            result = _timed(workload, entrants[workload], bench, spread_nan, timer)
        except (MemoryError, UntrustworthyError) as error:
            skipped[workload] = str(error)
            continue
        spent += timer.elapsed
        results[workload.problem] = result
        if found is not None:
            found(result)
    ordered = tuple(results[workload.problem] for workload in distinct if workload.problem in results)
    return Report(bench.device, ordered, skipped, spent)


def _timed(
    workload: Workload, entrants: Sequence[Candidate], bench: Bench, spread_nan: bool, timer: "_Timer"
) -> Result:
    """Times one convolution; raises what `time_alone` does."""
    model = _by_model(workload.problem, entrants, bench.device, spread_nan)
    standings, rejected = time_alone(workload, entrants, bench, timer, timer.over)
    return Result(workload, spread_nan, tuple(standings), rejected, model)


def time_alone(
    workload: Workload,
    entrants: Sequence[Candidate],
    bench: Bench,
    timing: AbstractContextManager[object],
    over: Callable[[], bool],
) -> tuple[list[Standing[Candidate]], dict[Candidate, str]]:
    """Returns the standings of candidates on one convolution, and those that are rejected with the reason.

    Args:
        workload, entrants: what is computed, and by which candidates; what has pieces begins with them.
        bench: what times.
        timing: around the contest, for which the candidates are compiled and compared by then.
        over: whether the time is up.

    Raises:
        MemoryError: there is no room for it.
        UntrustworthyError: more than half of the candidates are wrong, so perhaps rather the one they differ from. Of
            what has pieces, that would be those, which have proved themselves; there, all must be wrong.
    """
    with bench.race(workload, entrants) as race:
        rejected = dict(race.rejected)
        for candidate, reason in rejected.items():
            logger.warning("%s: %s is not considered: %s", workload.problem, candidate, reason)
        runners = [candidate for candidate in entrants if candidate not in rejected]
        if not runners or (2 * len(runners) < len(entrants) and not isinstance(entrants[0], Apart)):
            raise UntrustworthyError(f"only {len(runners)} of {len(entrants)} candidates agree")
        with timing:
            return contest(runners, race.sample, over), rejected


def _by_model(problem: Problem, entrants: Sequence[Candidate], device: Device, spread_nan: bool) -> Candidate:
    """Returns what would be chosen without tables."""
    return together(problem, device, spread_nan=spread_nan, use_tables=False) or entrants[0]


class UntrustworthyError(Exception):
    """Outputs that disagree: nothing can be said."""


class _Timer:
    """Measures how long the block under it takes, of `seconds` that it may."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.elapsed = 0.0

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *_: object) -> None:
        self.elapsed = self._clock() - self._begin

    def over(self) -> bool:
        return self._clock() - self._begin >= self._seconds


def _weight(workload: Workload, promising: Candidate, device: Device) -> float:
    """What a convolution is expected to cost in all, in the unit of its arithmetic's cost model."""
    return workload.count * expected(workload.problem, device, promising)
