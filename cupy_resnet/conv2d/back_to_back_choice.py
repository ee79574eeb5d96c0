"""Whether two convolutions in a row are one kernel or two. Needs no measurement, imports no CuPy.

As for single convolutions, a table of measured choices decides where there is one (`tuned`), elsewhere the cost model.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnsupportedProblemError
from . import back_to_back, tuned
from .back_to_back import BackToBackConfig, back_to_back_candidates, supports_back_to_back
from .cost_model import BANDWIDTH, back_to_back_microseconds
from .device import Device
from .heuristics import automatic, fastest
from .problem import Conv2dPair, Conv2dProblem

logger = logging.getLogger(__name__)

APART = "apart"
"""In a table, in place of a kernel's name: the two convolutions were faster one after the other."""

LEAST_SHARE = 0.7
"""Of the multiprocessors, how many must have a tile for the cost model to be asked at all.

A tile goes through both convolutions on one multiprocessor; the two apart share few pixels out by filters and depth.
"""


@dataclass(frozen=True)
class BackToBackChoice:
    """The decision for one pair.

    Args:
        config: of the kernel that computes both; None where they are two.
        reason: why.
    """

    config: BackToBackConfig | None
    reason: str


def choose_back_to_back(
    pair: Conv2dPair, device: Device, *, spread_nan: bool = False, use_tables: bool = True
) -> BackToBackChoice:
    """Decides whether one kernel computes both convolutions of `pair` on `device`, and in which configuration.

    Args:
        pair: the convolutions.
        device: the GPU.
        spread_nan, use_tables: as in `choose`; the former is about the two apart, whose time is what the kernel is
            compared with.
    """
    known = tuned.lookup(device.name) if use_tables else None
    return _choose(pair, device, spread_nan, known)


@lru_cache(maxsize=4096)
def _choose(pair: Conv2dPair, device: Device, spread_nan: bool, known: tuned.Lookup | None) -> BackToBackChoice:
    if pair.N == 0:
        return BackToBackChoice(None, "there are no images")
    supported, why_not = supports_back_to_back(pair, device)
    if not supported:
        return BackToBackChoice(None, f"{back_to_back.name} {why_not}")
    candidates = back_to_back_candidates(pair, device)
    for entry, reason in () if known is None else known.found(pair, spread_nan):
        if entry.variant == APART:
            return BackToBackChoice(None, f"two kernels are faster: {reason}")
        config = entry.config_among(candidates) if entry.variant == back_to_back.name else None
        if config is not None:
            assert isinstance(config, BackToBackConfig)
            return BackToBackChoice(config, reason)
        logger.debug("%s: %s has no configuration %s here", pair, entry.variant, entry.config)
    costs = {config: back_to_back_microseconds(pair, device, config) for config in candidates}
    if not costs:
        return BackToBackChoice(None, f"{back_to_back.name} has no configuration for it")
    config = min(costs, key=costs.__getitem__)
    tiles = -(-pair.first.gemm_m // config.tile_m)
    if tiles < LEAST_SHARE * device.sm_count:
        return BackToBackChoice(None, f"{tiles} tiles are few for {device.sm_count} multiprocessors")
    try:
        apart = _microseconds_apart(pair, device, spread_nan)
    except UnsupportedProblemError as error:
        return BackToBackChoice(None, str(error))
    compared = f"{costs[config]:.1f} µs by the model, {apart:.1f} as two kernels"
    return BackToBackChoice(config if costs[config] < apart else None, compared)


def _microseconds_apart(pair: Conv2dPair, device: Device, spread_nan: bool) -> float:
    """What the cost model expects of the two one after the other, the second with a residual."""
    residual = pair.second.gemm_m * pair.K * pair.first.arithmetic.element_size
    return sum(_best(problem, device, spread_nan) for problem in pair.parts) + residual / BANDWIDTH


def _best(problem: Conv2dProblem, device: Device, spread_nan: bool) -> float:
    return min(fastest(variant, problem, device, spread_nan)[1] for variant in automatic(problem, device, spread_nan))
