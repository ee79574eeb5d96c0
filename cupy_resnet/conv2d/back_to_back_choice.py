"""Whether two or three convolutions in a row are one kernel or several. Needs no measurement, imports no CuPy.

As for single convolutions, a table of measured choices decides where one knows the batch size or one near it
(`tuned`), elsewhere the cost model.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache

from . import back_to_back, tuned
from .back_to_back import BackToBackConfig, back_to_back_candidates, supports_back_to_back
from .cost_model import back_to_back_microseconds
from .device import Device
from .pieces import cheapest, microseconds_apart, tiles_if_few
from .problem import Conv2dPair

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackToBackChoice:
    """The decision for one pair.

    Args:
        config: of the kernel that computes all of it; None where there are several.
        reason: why.
    """

    config: BackToBackConfig | None
    reason: str


def choose_back_to_back(
    pair: Conv2dPair, device: Device, *, spread_nan: bool = False, use_tables: bool = True
) -> BackToBackChoice:
    """Decides whether one kernel computes all convolutions of `pair` on `device`, and in which configuration.

    It does where it is faster than the best known way in pieces. With one that follows, that is `pair` without it,
    as one kernel or two, and the one that follows; with a shortcut, the first convolution, and the second with its
    shortcut, as one kernel or two (`choose_shortcut`).

    Args:
        pair: the convolutions.
        device: the GPU.
        spread_nan, use_tables: as in `choose`; the former is about the pieces, whose time is what the kernel is
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
        if entry.variant == tuned.APART:
            return BackToBackChoice(None, f"several kernels are faster: {reason}")
        config = entry.config_among(candidates) if entry.variant == back_to_back.name else None
        if config is not None:
            assert isinstance(config, BackToBackConfig)
            return BackToBackChoice(config, reason)
        logger.debug("%s: %s has no configuration %s here", pair, entry.variant, entry.config)
    best = cheapest(pair, device)
    if best is None:
        return BackToBackChoice(None, f"{back_to_back.name} has no configuration for it")
    tiles = tiles_if_few(pair, device, best)
    if tiles is not None:
        return BackToBackChoice(None, f"{tiles} tiles are few for {device.sm_count} multiprocessors")
    together = back_to_back_microseconds(pair, device, best)
    apart = microseconds_apart(pair, device, spread_nan)
    compared = f"{together:.1f} µs by the model, {apart:.1f} in pieces"
    return BackToBackChoice(best if together < apart else None, compared)
