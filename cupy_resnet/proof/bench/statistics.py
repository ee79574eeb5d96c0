"""What the samples of a time come down to, and when two of them may be put in relation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

FEWEST_SAMPLES = 5
"""Below this a spread says nothing, and so does a ratio."""


@dataclass(frozen=True)
class Summary:
    """Samples of one quantity, in whatever unit they are.

    Args:
        count: of samples.
        median, p10, p90, p99: percentiles, interpolated linearly between samples.
    """

    count: int
    median: float
    p10: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Sums samples up.

        Raises:
            ValueError: there are none.
        """
        if not len(samples):
            raise ValueError("there are no samples to sum up")
        p10, median, p90, p99 = (float(value) for value in np.percentile(samples, (10, 50, 90, 99)))
        return cls(len(samples), median, p10, p90, p99)

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile: a fifth of all samples lies outside, so that outliers do not count."""
        return self.p90 - self.p10


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a rival, or why that cannot be said.

    Args:
        value: the rival's median time over ours: above 1 we are faster. None where it is refused.
        reason: why it is refused, a clause; empty where it is not.
    """

    value: float | None
    reason: str = ""

    @classmethod
    def refused(cls, reason: str) -> Self:
        """Returns a ratio that is not given."""
        return cls(None, reason)

    def __str__(self) -> str:
        return "–" if self.value is None else f"{self.value:.2f}×"


def ratio(ours: Summary, rival: Summary, unit: str = "ms") -> Ratio:
    """Returns the rival's median over ours, unless the samples cannot tell them apart.

    It is refused where the difference of the two medians is smaller than the spread (p10 to p90) of either, or where
    there are fewer than `FEWEST_SAMPLES`.

    Args:
        ours, rival: times.
        unit: theirs, for the reason.
    """
    fewest = min(ours.count, rival.count)
    if fewest < FEWEST_SAMPLES:
        return Ratio.refused(f"{fewest} samples are too few: at least {FEWEST_SAMPLES} are needed")
    difference, spread = abs(rival.median - ours.median), max(ours.spread, rival.spread)
    if spread > difference:
        return Ratio.refused(
            f"the medians differ by {difference:.3g} {unit}, less than the samples spread "
            f"(p10 to p90: {spread:.3g} {unit})"
        )
    return Ratio(rival.median / ours.median)


def fastest(times: Iterable[tuple[str, Summary]]) -> tuple[str, Summary] | None:
    """Returns the (name, summary) with the smallest median; None of none."""
    return min(times, key=lambda pair: pair[1].median, default=None)
