"""Whether a block's last convolution and its downsample are one kernel or two. Imports no CuPy: usable anywhere.

As one, the 1×1 convolution of the block's input is more depth of the last convolution: its output is neither written
nor read again, and a launch is saved. As two, each has the kernel and the tile that suit it; not all can do both.
"""

import logging
from functools import lru_cache

from ..errors import UnsupportedProblemError
from . import tuned
from .device import Device
from .heuristics import allowed, automatic, check_kernel
from .pieces import microseconds_apart, microseconds_together
from .problem import Conv2dProblem
from .variants import VARIANTS

logger = logging.getLogger(__name__)


def choose_shortcut(
    problem: Conv2dProblem,
    device: Device,
    kernel: str = "auto",
    *,
    spread_nan: bool = False,
    use_tables: bool = True,
) -> tuple[bool, str]:
    """Decides whether a convolution with a shortcut is computed by one kernel, and says why or why not.

    Where one kernel and two were timed against each other on this GPU or one like it, with this batch size or one near
    it (`tuned`), the faster way is taken, elsewhere the one that the cost model expects to be faster.

    Args:
        problem: a convolution with a shortcut.
        device: the GPU.
        kernel: ``"auto"``, or the name of a variant that is to be used wherever it applies.
        spread_nan: as for `choose`.
        use_tables: whether times that were measured count.

    Raises:
        ValueError: `problem` has no shortcut, or `kernel` is no variant's name.
    """
    check_kernel(kernel)
    if not problem.shortcut_channels:
        raise ValueError(f"conv2d {problem} has no shortcut")
    known = tuned.lookup(device.name) if use_tables else None
    return _choose(problem, device, kernel, spread_nan, known)


@lru_cache(maxsize=4096)
def _choose(
    problem: Conv2dProblem, device: Device, kernel: str, spread_nan: bool, known: tuned.Lookup | None
) -> tuple[bool, str]:
    if kernel != "auto":
        supported, why_not = VARIANTS[kernel].supports(problem, device)
        if not supported:
            return False, f"{kernel} was asked for, which {why_not}"
        return True, f"{kernel} was asked for"
    try:
        names = automatic(problem, device, spread_nan)
    except UnsupportedProblemError as error:
        return False, str(error)
    for entry, reason in () if known is None else known.found(problem, spread_nan):
        if entry.variant == tuned.APART:
            return False, f"two kernels are faster: {reason}"
        if entry.variant in names and entry.config_among(allowed(entry.variant, problem, device, spread_nan)):
            return True, reason
        logger.debug("%s: %s has no configuration %s here", problem, entry.variant, entry.config)
    together = microseconds_together(problem, device, spread_nan)
    apart = microseconds_apart(problem, device, spread_nan)
    return together <= apart, f"{together:.1f} µs as one kernel, {apart:.1f} as two by the model"
