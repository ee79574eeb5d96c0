"""Finds the fastest of many with few samples: successive halving.

After Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (AISTATS 2016):
all are sampled a few times, the slower half leaves, and those that stay are sampled more often. Within a round they
take turns, so that a clock that rises or falls meanwhile meets all of them alike.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

FIRST_SAMPLES, LAST_SAMPLES = 3, 15
"""Samples of each in the first round, and of a finalist altogether."""

FINALISTS = 4


@dataclass(frozen=True)
class Standing(Generic[T]):
    """How one of them did.

    Args:
        entrant: who.
        median: of its samples.
        samples: their number.
    """

    entrant: T
    median: float
    samples: int


def contest(
    entrants: Sequence[T], sample: Callable[[T], float], out_of_time: Callable[[], bool] = lambda: False
) -> list[Standing[T]]:
    """Returns all entrants, the fastest first; who left in an earlier round stands behind who stayed.

    Args:
        entrants: at least one, all different.
        sample: measures one of them once.
        out_of_time: asked after each turn of all; the standings are then what they are. Each has had one turn.
    """
    times: dict[T, list[float]] = {entrant: [] for entrant in entrants}

    def median(entrant: T) -> float:
        return statistics.median(times[entrant])

    field, left = list(entrants), list[T]()
    wanted, stopped = FIRST_SAMPLES, False
    while not stopped:
        while len(times[field[0]]) < wanted and not stopped:
            for entrant in field:
                times[entrant].append(sample(entrant))
            stopped = out_of_time()
        field.sort(key=median)
        if len(field) > FINALISTS:
            staying = max(FINALISTS, math.ceil(len(field) / 2))
            left = field[staying:] + left
            field = field[:staying]
            wanted = min(2 * wanted, LAST_SAMPLES)
        elif wanted < LAST_SAMPLES:
            wanted = LAST_SAMPLES
        else:
            break
    return [Standing(entrant, median(entrant), len(times[entrant])) for entrant in field + left]
