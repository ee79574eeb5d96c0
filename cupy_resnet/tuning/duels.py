"""Has two forward passes compete: as the network runs now, and as it might.

They take turns, so that a clock that rises or falls meanwhile meets both alike, and it is the ratio of two samples in a
row that counts. How far that is from 1 for a pass against itself is measured first.
"""

import logging
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..conv2d import tuned
from ..conv2d.problem import Problem
from ..conv2d.tuned import Entry
from ..errors import CompileError
from .entrants import Candidate
from .workloads import Running, Workload

logger = logging.getLogger(__name__)

FIRST_ROUNDS, MORE_ROUNDS, NOISE_ROUNDS = 3, 7, 9
"""Samples of both in a duel, and of those further ones that decide if it is promising; of a pass against itself."""

MARGIN = 0.003
"""A pass must be shorter by this share at least, or by twice what a pass against itself differs by."""


class CapturedPass(Protocol):
    """A forward pass that was captured with the kernels chosen at that time."""

    @property
    def logits(self) -> np.ndarray:
        """(N, num_classes) float32, of an input that is the same for all."""

    def sample(self) -> float:
        """Returns microseconds per pass, measured once."""

    def close(self) -> None:
        """Gives its memory back."""


class Passes(Protocol):
    """One network's forward pass for one shape: what `tune_in_network` times with, a `GpuPasses`."""

    def capture(self) -> CapturedPass:
        """Captures the pass with the kernels that are chosen now.

        Raises:
            MemoryError: there is no room for it.
            CompileError: one of its kernels cannot be compiled.
        """


@dataclass(frozen=True)
class Change:
    """A choice that makes the pass faster.

    Args:
        workload: what is computed otherwise.
        before: what computed it; None for its pieces.
        after: what does now.
        ratio: by which the pass is as long as before, in the rounds that decided.
        entry: what is to be remembered; it has the time alone.
    """

    workload: Workload
    before: Candidate | None
    after: Candidate
    ratio: float
    entry: Entry


class Ring:
    """Where the pass as it is meets the pass as it might be."""

    def __init__(self, passes: Passes, gpu: str, now: Callable[[], dict[Problem, Running]], tolerance: float) -> None:
        self._passes, self._gpu, self._running, self._tolerance = passes, gpu, now, tolerance
        self._captured: list[CapturedPass] = []
        self.changes: list[Change] = []
        self.now = now()
        self.duels, self.margin, self._before = 0, MARGIN, 0.0

    def open(self) -> None:
        """Captures the pass as it is, twice, and sees by how much two differ that are the same."""
        self._captured = [self._passes.capture()]
        self._captured.append(self._passes.capture())
        ratios, before, _ = zip(*self._rounds(NOISE_ROUNDS), strict=True)
        self.margin = max(MARGIN, 2 * statistics.median(abs(ratio - 1) for ratio in ratios))
        self._before = statistics.median(before)
        self._captured.pop().close()

    def matters(self, entry: Entry) -> bool:
        """Whether the pass would launch anything else with an entry."""
        with tuned.trying(self._gpu, [*self._entries(), entry]):
            return _launched(self._running()) != _launched(self.now)

    def challenge(self, workload: Workload, entry: Entry, candidate: Candidate) -> None:
        """Has the pass with an entry compete, if it is another one, and follows the entry from now on if it wins."""
        with tuned.trying(self._gpu, [*self._entries(), entry]):
            after = self._running()
            if _launched(after) == _launched(self.now):
                return
            try:
                self._captured.append(self._passes.capture())
            except (MemoryError, CompileError) as error:
                logger.info("%s: %s cannot be tried in the network: %s", workload.problem, candidate, error)
                return
        difference = _difference(self._captured[1].logits, self._captured[0].logits)
        if difference > self._tolerance:
            logger.warning(
                "%s: %s is not considered: with it the logits differ by %.2g of the largest, more than %g",
                *(workload.problem, candidate, difference, self._tolerance),
            )
        else:
            ratio = self._duel()
            logger.debug("%s: with %s the pass takes %.4f of its time", workload.problem, candidate, ratio)
            if ratio < 1 - self.margin:
                before = self.now.get(workload.problem)
                change = Change(workload, None if before is None else before.candidate, candidate, ratio, entry)
                self.changes.append(change)
                self.now = after
                self._captured.reverse()
        self._captured.pop().close()

    def confirm(self) -> tuple[float, float]:
        """Returns microseconds of the pass without and with all changes, and forgets these if they gain nothing.

        Both are captured anew: a pass may have been lucky with where its memory lay.
        """
        if not self.changes:
            return self._before, self._before
        self.close()
        self._captured.append(self._passes.capture())
        with tuned.trying(self._gpu, self._entries()):
            self._captured.append(self._passes.capture())
        ratios, before, _ = zip(*self._rounds(NOISE_ROUNDS), strict=True)
        microseconds, ratio = statistics.median(before), statistics.median(ratios)
        if ratio >= 1:
            logger.info("what was faster in duels is not so altogether: nothing changes")
            self.changes.clear()
            ratio = 1.0
        return microseconds, ratio * microseconds

    def close(self) -> None:
        """Drops what is captured."""
        while self._captured:
            self._captured.pop().close()

    def _entries(self) -> list[Entry]:
        return [change.entry for change in self.changes]

    def _duel(self) -> float:
        """Returns how long the second pass takes relative to the first, in the rounds that count.

        If the first rounds are promising these are the later ones, unless it is less clear with the first among them.
        """
        self.duels += 1
        first = [ratio for ratio, _, _ in self._rounds(FIRST_ROUNDS)]
        if statistics.median(first) >= 1 - self.margin:
            return statistics.median(first)
        later = [ratio for ratio, _, _ in self._rounds(MORE_ROUNDS)]
        return max(statistics.median(later), statistics.median(first + later))

    def _rounds(self, number: int) -> Iterator[tuple[float, float, float]]:
        """Yields the second pass's time relative to the first's, and both; who begins changes from round to round."""
        first, second = self._captured
        for turn in range(number):
            if turn % 2:
                a, b = first.sample(), second.sample()
            else:
                b, a = second.sample(), first.sample()
            yield b / a, a, b


def _launched(pass_: Mapping[Problem, Running]) -> dict[Problem, tuple[int, Hashable]]:
    return {problem: (runs.count, runs.candidate.launched) for problem, runs in pass_.items()}


def _difference(logits: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference, relative to the largest value of `reference`; Inf where one of them has a NaN or Inf."""
    difference = float(np.abs(logits - reference).max(initial=0.0))
    return difference / max(float(np.abs(reference).max(initial=0.0)), 1e-30) if np.isfinite(difference) else np.inf
