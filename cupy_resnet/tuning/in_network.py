"""The second phase: of the kernels that are about as fast alone, which make the network's whole pass faster.

In a network a launch overlaps with its neighbours: its blocks begin on multiprocessors where others still run, and find
in the L2 cache what those have left there. What is fastest in a row of its own kind is not always fastest there. So
the pass is captured with each promising candidate for one problem at a time, and the two captured passes, with it and
without it, take turns. What wins clearly stays, and the next problem is decided with it.

Nothing is written here, and what was only tried is never followed afterwards. An entry that is returned has the
candidate's time alone, as all in tables: by that it need not be the fastest.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from ..conv2d import tuned
from ..conv2d.pieces import halves
from ..conv2d.problem import Problem
from ..conv2d.tuned import Entry, config_fields
from ..errors import UnsupportedProblemError
from ..networks import Network
from .bench import TOLERANCES, Bench
from .contest import Standing
from .duels import Change, Passes, Ring
from .entrants import Apart, Candidate, candidates, expected
from .rounds import BUDGET_SECONDS, Result, UntrustworthyError, time_alone
from .workloads import Workload, network_problems, running

logger = logging.getLogger(__name__)

SHARE = 0.5
"""Of a budget for both phases, what this one has."""

WITHIN, CHALLENGERS = 1.25, 5
"""Candidates are tried that take at most so many times as long as the fastest alone, and of them so many."""

RACERS = 14
"""Of a problem that the first phase has no result of, how many are timed alone, the most promising by the model."""


@dataclass(frozen=True)
class InNetwork:
    """What was found for one shape.

    Args:
        changes: in the order in which they were accepted; empty if together they gain nothing.
        before, after: microseconds of the pass without and with them; their ratio is that of samples in turn.
        duels: how many there were.
        margin: by which share a pass had to be shorter.
        seconds: of everything.
    """

    changes: tuple[Change, ...]
    before: float
    after: float
    duels: int
    margin: float
    seconds: float

    @property
    def entries(self) -> list[Entry]:
        """One for each problem that changed."""
        return list({change.entry.key: change.entry for change in self.changes}.values())


def tune_in_network(
    network: Network,
    shape: tuple[int, int, int, int],
    precision: str,
    bench: Bench,
    passes: Passes,
    *,
    fuse: bool = True,
    results: Iterable[Result] = (),
    only: Collection[Problem] | None = None,
    budget_s: float = BUDGET_SECONDS,
    progress: Callable[[int, int, Workload], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> InNetwork:
    """Returns which other choices make a network's pass faster, the heaviest problems first. Writes nothing.

    Args:
        network, shape, precision, fuse: as for `network_problems`.
        bench: what times candidates alone that the first phase has no result of.
        passes: what captures the pass, of the same network, shape and precision.
        results: of the first phase, which must be followed already (`remember`).
        only: the problems that may change; by default all.
        budget_s: seconds of everything, compiling included; a duel that is begun is finished, and in the end all
            changes together must prove themselves once more.
        progress: called before each problem with the number of those that are done, of all, and the problem.
        clock: seconds that pass.

    Raises:
        MemoryError: there is no room for two captured passes.
    """
    begin = clock()
    device = bench.device
    listed = network_problems(network, shape, precision, device, fuse=fuse)
    left = {workload.problem: workload for workload in listed if only is None or workload.problem in only}
    standings = {result.workload.problem: result.standings for result in results}
    now = partial(running, network, shape, precision, device, fuse=fuse)
    known = tuned.lookup(device.name)

    def weight(workload: Workload) -> float:
        count = ring.now[workload.problem].count if workload.problem in ring.now else workload.count
        return count * _alone(workload.problem, standings, known, bench)

    def over() -> bool:
        return clock() - begin >= budget_s

    ring = Ring(passes, device.name, now, TOLERANCES[precision])
    done = 0
    try:
        ring.open()
        while not over():
            pending = [w for problem, w in left.items() if problem in ring.now or halves(problem) is not None]
            if not pending:
                break
            workload = max(pending, key=weight)
            if progress is not None:
                progress(done, done + len(pending), workload)
            done += 1
            del left[workload.problem]
            ranked = _ranked(workload, bench, ring, standings, over)
            for standing in _promising(ranked, workload.problem in ring.now):
                if not over():
                    ring.challenge(workload, _entry(workload, standing, len(ranked)), standing.entrant)
        before, after = ring.confirm()
    finally:
        ring.close()
    return InNetwork(tuple(ring.changes), before, after, ring.duels, ring.margin, clock() - begin)


def _ranked(
    workload: Workload,
    bench: Bench,
    ring: Ring,
    standings: Mapping[Problem, Sequence[Standing[Candidate]]],
    over: Callable[[], bool],
) -> list[Standing[Candidate]]:
    """Returns candidates with their times alone, the fastest first; none if whatever computes it, the pass does not.

    So it is with what is part of something larger in one kernel.
    """
    problem = workload.problem
    try:
        entrants = candidates(problem, bench.device, spread_nan=True)
    except UnsupportedProblemError:
        return []
    apart, kernels = entrants[: halves(problem) is not None], entrants[halves(problem) is not None :]
    if problem in ring.now:
        kernels.insert(0, ring.now[problem].candidate)
    elif not kernels or not ring.matters(_entry(workload, Standing(kernels[0], 0.0, 0), 0)):
        return []
    ranked = list(standings.get(problem, ()))
    if not ranked:
        racing = [*apart, *dict.fromkeys(kernels[: RACERS + 1])]
        try:
            ranked, _ = time_alone(workload, racing, bench, nullcontext(), over)
        except (MemoryError, UntrustworthyError) as error:
            logger.info("%s is not timed: %s", problem, error)
    return sorted(ranked, key=lambda standing: standing.median)


def _promising(ranked: Sequence[Standing[Candidate]], in_one: bool) -> list[Standing[Candidate]]:
    """Returns what is about as fast alone as the fastest; and whatever its time, the best way that is not the present.

    Args:
        ranked: the fastest first.
        in_one: whether one kernel computes the problem now.
    """
    near = [standing for standing in ranked if standing.median <= WITHIN * ranked[0].median][:CHALLENGERS]
    other_way = [standing for standing in ranked if isinstance(standing.entrant, Apart) == in_one]
    return list(dict.fromkeys([*near, *other_way[:1]]))


def _entry(workload: Workload, standing: Standing[Candidate], number: int) -> Entry:
    """What is to be remembered; the next best is left out, which may have been faster alone."""
    return Entry(
        problem=workload.problem,
        spread_nan=True,
        variant=standing.entrant.variant,
        config=config_fields(standing.entrant.config),
        microseconds=round(standing.median, 2),
        next_microseconds=None,
        candidates=number,
    )


def _alone(
    problem: Problem, standings: Mapping[Problem, Sequence[Standing[Candidate]]], known: tuned.Lookup, bench: Bench
) -> float:
    """Microseconds of a problem by itself: as it was timed, as tables have it, or as the cost model expects."""
    if problem in standings:
        return min(standing.median for standing in standings[problem])
    entry = next((entry for entry, _ in known.exact(problem, True)), None)
    if entry is not None:
        return entry.microseconds
    try:
        return expected(problem, bench.device, candidates(problem, bench.device, spread_nan=True)[0])
    except UnsupportedProblemError:
        return 0.0
