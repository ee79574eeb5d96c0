"""Whether a block's last convolution and its downsample are one kernel or two. Imports no CuPy: usable anywhere.

As one, the 1×1 convolution of the block's input is more depth of the last convolution: its output is neither written
nor read again, and a launch is saved. As two, each has the kernel and the tile that suit it; not all can do both.
"""

from functools import lru_cache

from ..errors import UnsupportedProblemError
from . import tuned
from .cost_model import BANDWIDTH, cost
from .device import Device
from .heuristics import automatic, check_kernel, choose
from .problem import Conv2dProblem
from .variants import VARIANTS


def choose_shortcut(
    problem: Conv2dProblem,
    device: Device,
    kernel: str = "auto",
    *,
    spread_nan: bool = False,
    use_tables: bool = True,
) -> tuple[bool, str]:
    """Decides whether a convolution with a shortcut is computed by one kernel, and says why or why not.

    Where all three were timed on this GPU or one like it, the two and the one that takes their place, the times are
    compared, elsewhere what the cost model expects.

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
    parts = problem.shortcut_alone(), problem.without_shortcut()
    try:
        automatic(problem, device, spread_nan)
    except UnsupportedProblemError as error:
        return False, str(error)
    times = [None if known is None else _measured(part, spread_nan, known) for part in (problem, *parts)]
    if None not in times:
        together, *apart = (time for time in times if time is not None)
        return _compared(together, sum(apart), "when they were timed")
    residual = problem.arithmetic.element_size * problem.gemm_m * problem.K / BANDWIDTH  # read by the second of the two
    together, *separate = (_expected(part, device, spread_nan) for part in (problem, *parts))
    return _compared(together, sum(separate) + residual, "by the model")


def _compared(together: float, apart: float, how: str) -> tuple[bool, str]:
    return together <= apart, f"{together:.1f} µs as one kernel, {apart:.1f} as two {how}"


def _measured(problem: Conv2dProblem, spread_nan: bool, known: tuned.Lookup) -> float | None:
    """Returns the microseconds of the most trustworthy entry for a problem, or None."""
    return next((entry.microseconds for entry, _ in known.found(problem, spread_nan)), None)


def _expected(problem: Conv2dProblem, device: Device, spread_nan: bool) -> float:
    """Returns what the fastest kernel takes by the cost model, on tensor cores in microseconds."""
    return cost(problem, device, choose(problem, device, spread_nan=spread_nan, use_tables=False).config)
