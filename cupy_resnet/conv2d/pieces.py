"""What a problem that one kernel may compute is made of, and what computing it in pieces costs. Imports no CuPy.

Every such problem has two halves that come one after the other, and a half may be such a problem itself:

==================================================  ==================================  ==============================
problem                                             first half                          second half
==================================================  ==================================  ==============================
a pair that has one following                       the pair alone                      the one that follows
a pair                                              its first convolution               its second, with what is added
a convolution with a shortcut                       the shortcut                        the convolution, with what that
                                                                                        gives as its residual
==================================================  ==================================  ==============================
"""

from math import inf

from ..errors import UnsupportedProblemError
from .back_to_back import BackToBackConfig, back_to_back_candidates
from .cost_model import BANDWIDTH, back_to_back_microseconds
from .device import Device
from .heuristics import automatic, fastest
from .problem import Conv2dPair, Conv2dProblem, Problem

LEAST_SHARE = 0.7
"""Of the multiprocessors, how many must have a tile for the cost model to be asked about a pair at all.

A tile goes through all convolutions on one multiprocessor; apart, they share few pixels out by filters and depth.
"""


def halves(problem: Problem) -> tuple[Problem, Problem] | None:
    """Returns what computes `problem` in two steps; None for a convolution that is one step anyway."""
    if isinstance(problem, Conv2dPair):
        third = problem.third
        return (problem.first, problem.second) if third is None else (problem.without_following(), third)
    if problem.shortcut_channels:
        return problem.shortcut_alone(), problem.without_shortcut()
    return None


def steps(problem: Problem) -> int:
    """How many launches compute `problem` when nothing is fused."""
    parts = halves(problem)
    return 1 if parts is None else sum(map(steps, parts))


def adds_residual(problem: Problem) -> bool:
    """Whether the second half of `problem` adds an array: the residual of a pair, or the first half's output."""
    return not (isinstance(problem, Conv2dPair) and (problem.following or problem.shortcut_channels))


def cheapest(pair: Conv2dPair, device: Device) -> BackToBackConfig | None:
    """Returns the configuration of the one kernel that the cost model expects to be fastest, if there is any."""
    candidates = back_to_back_candidates(pair, device)
    return min(candidates, key=lambda config: back_to_back_microseconds(pair, device, config), default=None)


def tiles_if_few(pair: Conv2dPair, device: Device, config: BackToBackConfig) -> int | None:
    """Returns the number of blocks that have a tile, or a part of one, where it is too small for the cost model to be
    asked, else None.
    """
    tiles = -(-pair.first.gemm_m // config.tile_m) * config.cluster_size
    return tiles if tiles < LEAST_SHARE * device.sm_count else None


def microseconds_together(problem: Problem, device: Device, spread_nan: bool) -> float:
    """Returns what the cost model expects of one kernel for all of `problem`; infinity where none should do that."""
    if isinstance(problem, Conv2dPair):
        config = cheapest(problem, device)
        if config is None or tiles_if_few(problem, device, config) is not None:
            return inf
        return back_to_back_microseconds(problem, device, config)
    try:
        names = automatic(problem, device, spread_nan)
    except UnsupportedProblemError:
        return inf
    return min(fastest(name, problem, device, spread_nan)[1] for name in names)


def microseconds_apart(problem: Problem, device: Device, spread_nan: bool) -> float:
    """Returns what the cost model expects of the two halves of `problem`, each in the way that is fastest for it.

    Infinity where no kernels compute them, and where `problem` has none.
    """
    parts = halves(problem)
    if parts is None:
        return inf
    added = 0.0
    if adds_residual(problem):
        second = parts[1]
        assert isinstance(second, Conv2dProblem)
        added = second.gemm_m * second.K * second.arithmetic.element_size / BANDWIDTH
    return added + sum(
        min(microseconds_together(part, device, spread_nan), microseconds_apart(part, device, spread_nan))
        for part in parts
    )
