"""Which kernel computes a convolution, and in which configuration. Needs no measurement, imports no CuPy.

A table of measured choices decides where one knows the batch size or one near it (`tuned`), elsewhere the cost model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .._names import unknown_name
from ..errors import UnsupportedProblemError
from . import configs, tuned
from .cost_model import cost, implicit_gemm_tiles
from .device import Device
from .problem import Conv2dProblem
from .variants import VARIANTS

logger = logging.getLogger(__name__)

FP32_DEFAULT = "conv2d_implicit_gemm"
TENSOR_CORE_DEFAULTS = ("conv2d_mma", "conv2d_wmma")
"""The fastest kernels that solve every problem; on tensor cores the first that the GPU supports."""

FAST_WHERE_THEY_APPLY = ("conv2d_mma_patch", "conv2d_wgmma", "conv2d_wgmma_patch", "conv2d_wgmma_3xtf32")
"""Kernels on tensor cores that solve some problems."""


@dataclass(frozen=True)
class Choice:
    """The decision for one problem.

    Args:
        variant: name of the kernel, a key of `variants.VARIANTS`.
        config: its configuration; prints as a short description.
        reason: why this one.
        fallback: why the kernel demanded by name was not used, or None.
    """

    variant: str
    config: configs.Config
    reason: str
    fallback: str | None = None


def check_kernel(kernel: str) -> None:
    """Raises ValueError unless `kernel` is ``"auto"`` or the name of a variant."""
    if kernel != "auto" and kernel not in VARIANTS:
        raise ValueError(unknown_name("kernel", kernel, ["auto", *VARIANTS]))


def choose(
    problem: Conv2dProblem,
    device: Device,
    kernel: str = "auto",
    strict: bool = False,
    *,
    spread_nan: bool = False,
    use_tables: bool = True,
) -> Choice:
    """Decides which kernel computes `problem` on `device`.

    Args:
        problem: the convolution.
        device: the GPU.
        kernel: ``"auto"``, or the name of a variant, which is used wherever it applies.
        strict: raise instead of falling back where the demanded variant does not apply.
        spread_nan: whether kernels may be chosen that let a NaN or Inf reach further than it should, where they are
            expected to be faster: conv2d_winograd (one pixel further, and Inf becomes NaN) and merged groups (into the
            neighbouring groups). That is of no consequence where the result is pooled over the image and mixed over
            the channels anyway, as in a classifier's forward pass, but not what a convolution on its own should do.
        use_tables: whether `tuned` may know better than the cost model: which kernel, unless one is asked for by name,
            and which configuration of it.

    Raises:
        ValueError: `kernel` is no variant's name.
        UnsupportedProblemError: no kernel solves the problem, or `strict` and the demanded one does not.
    """
    check_kernel(kernel)
    known = tuned.lookup(device.name) if use_tables else None
    return _choose(problem, device, kernel, strict, spread_nan, known)


@lru_cache(maxsize=4096)
def _choose(
    problem: Conv2dProblem, device: Device, kernel: str, strict: bool, spread_nan: bool, known: tuned.Lookup | None
) -> Choice:
    fallback = None
    if kernel != "auto":
        supported, why_not = VARIANTS[kernel].supports(problem, device)
        if supported:
            measured = _measured([kernel], problem, device, spread_nan, known)
            if measured is not None:
                return Choice(kernel, measured.config, f"asked for by name; {measured.reason}")
            return Choice(kernel, fastest(kernel, problem, device, spread_nan)[0], "asked for by name")
        if strict:
            raise UnsupportedProblemError(f"{kernel} does not support conv2d {problem}: {why_not}")
        fallback = f"{kernel} {why_not}"
    names = automatic(problem, device, spread_nan)
    measured = _measured(names, problem, device, spread_nan, known)
    if measured is not None:
        return replace(measured, fallback=fallback)
    default = names[0]
    config, expected = fastest(default, problem, device, spread_nan)
    if default != FP32_DEFAULT:
        best = {name: fastest(name, problem, device, spread_nan) for name in names}
        name = min(best, key=lambda name: best[name][1])
        return Choice(name, best[name][0], f"{best[name][1]:.1f} µs by the model", fallback)
    if "conv2d_winograd" in names:
        winograd, winograd_cost = fastest("conv2d_winograd", problem, device)
        if winograd_cost < expected:
            reason = f"2.25× fewer multiplications; {expected / winograd_cost:.2f}× faster than {default} by the model"
            return Choice("conv2d_winograd", winograd, reason, fallback)
    assert isinstance(config, configs.ImplicitGemmConfig)
    tiles = implicit_gemm_tiles(problem, config)
    return Choice(default, config, f"{tiles} tiles on {device.sm_count} multiprocessors", fallback)


def _measured(
    names: Sequence[str], problem: Conv2dProblem, device: Device, spread_nan: bool, known: tuned.Lookup | None
) -> Choice | None:
    """Returns what was fastest when it was timed, if that is one of the kernels `names`."""
    for entry, reason in () if known is None else known.found(problem, spread_nan):
        if entry.variant not in names:
            continue
        config = entry.config_among(allowed(entry.variant, problem, device, spread_nan))
        if config is not None:
            return Choice(entry.variant, config, reason)
        logger.debug("%s: %s has no configuration %s here", problem, entry.variant, entry.config)
    return None


def automatic(problem: Conv2dProblem, device: Device, spread_nan: bool = False) -> list[str]:
    """Returns the kernels that ``"auto"`` chooses among, first the one that needs no reason; arguments as of `choose`.

    The weights of fully connected layers are not kept as filters: nothing is derived from them.

    Raises:
        UnsupportedProblemError: there is none.
    """
    names = [_default(problem, device)]
    if spread_nan and VARIANTS["conv2d_winograd"].supports(problem, device)[0]:
        names.append("conv2d_winograd")
    if names[0] == "conv2d_mma":
        names += [name for name in FAST_WHERE_THEY_APPLY if VARIANTS[name].supports(problem, device)[0]]
    if (problem.H, problem.W, problem.R, problem.S) == (1, 1, 1, 1):
        names = [name for name in names if not VARIANTS[name].derives_filter]
    return names


def _default(problem: Conv2dProblem, device: Device) -> str:
    """Returns the kernel that is used unless there is a reason for another one."""
    names: tuple[str, ...] = TENSOR_CORE_DEFAULTS if problem.arithmetic.tensor_cores else (FP32_DEFAULT,)
    if problem.shortcut_channels and problem.arithmetic.tensor_cores:
        names = tuple(name for name in FAST_WHERE_THEY_APPLY if VARIANTS[name].adds_shortcut)  # the others never do
    why_not = ""
    for name in names:
        supported, reason = VARIANTS[name].supports(problem, device)
        if supported:
            return name
        why_not = why_not or reason
    raise UnsupportedProblemError(f"conv2d {problem} cannot be computed: {why_not}")


def allowed(variant: str, problem: Conv2dProblem, device: Device, spread_nan: bool = False) -> list[configs.Config]:
    """Returns the configurations of a variant that solve `problem`; without `spread_nan` only those that keep a NaN
    within its group.
    """
    candidates = VARIANTS[variant].candidates(problem, device)
    return [config for config in candidates if spread_nan or getattr(config, "merged_groups", 1) == 1]


def fastest(
    variant: str, problem: Conv2dProblem, device: Device, spread_nan: bool = False
) -> tuple[configs.Config, float]:
    """Returns the configuration of a variant that the cost model expects to be fastest, and its cost."""
    costs = {config: cost(problem, device, config) for config in allowed(variant, problem, device, spread_nan)}
    best = min(costs, key=costs.__getitem__)
    return best, costs[best]
