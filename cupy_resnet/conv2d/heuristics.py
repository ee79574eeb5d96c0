"""Which kernel computes a convolution, and in which configuration. Needs no measurement, imports no CuPy."""

from dataclasses import dataclass
from functools import lru_cache

from .._names import unknown_name
from ..errors import UnsupportedProblemError
from . import configs
from .cost_model import cost, implicit_gemm_tiles
from .device import Device
from .problem import Conv2dProblem
from .variants import VARIANTS

FP32_DEFAULT = "conv2d_implicit_gemm"
TENSOR_CORE_DEFAULTS = ("conv2d_mma", "conv2d_wmma")
"""The fastest kernels that solve every problem; on tensor cores the first that the GPU supports."""


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

    Raises:
        ValueError: `kernel` is no variant's name.
        UnsupportedProblemError: no kernel solves the problem, or `strict` and the demanded one does not.
    """
    check_kernel(kernel)
    return _choose(problem, device, kernel, strict, spread_nan)


@lru_cache(maxsize=4096)
def _choose(problem: Conv2dProblem, device: Device, kernel: str, strict: bool, spread_nan: bool) -> Choice:
    fallback = None
    if kernel != "auto":
        supported, why_not = VARIANTS[kernel].supports(problem, device)
        if supported:
            return Choice(kernel, fastest(kernel, problem, device, spread_nan)[0], "asked for by name")
        if strict:
            raise UnsupportedProblemError(f"{kernel} does not support conv2d {problem}: {why_not}")
        fallback = f"{kernel} {why_not}"
    default = _default(problem, device)
    config, expected = fastest(default, problem, device, spread_nan)
    if default != FP32_DEFAULT:
        return Choice(default, config, f"{expected:.1f} µs by the model", fallback)
    if spread_nan and VARIANTS["conv2d_winograd"].supports(problem, device)[0]:
        winograd, winograd_cost = fastest("conv2d_winograd", problem, device)
        if winograd_cost < expected:
            reason = f"2.25× fewer multiplications; {expected / winograd_cost:.2f}× faster than {default} by the model"
            return Choice("conv2d_winograd", winograd, reason, fallback)
    assert isinstance(config, configs.ImplicitGemmConfig)
    tiles = implicit_gemm_tiles(problem, config)
    return Choice(default, config, f"{tiles} tiles on {device.sm_count} multiprocessors", fallback)


def _default(problem: Conv2dProblem, device: Device) -> str:
    """Returns the kernel that is used unless there is a reason for another one."""
    names = TENSOR_CORE_DEFAULTS if problem.arithmetic.tensor_cores else (FP32_DEFAULT,)
    why_not = ""
    for name in names:
        supported, reason = VARIANTS[name].supports(problem, device)
        if supported:
            return name
        why_not = why_not or reason
    raise UnsupportedProblemError(f"conv2d {problem} cannot be computed: {why_not}")


def fastest(
    variant: str, problem: Conv2dProblem, device: Device, spread_nan: bool = False
) -> tuple[configs.Config, float]:
    """Returns the configuration of a variant that the cost model expects to be fastest, and its cost."""
    candidates = VARIANTS[variant].candidates(problem, device)
    if not spread_nan:
        candidates = [c for c in candidates if getattr(c, "merged_groups", 1) == 1]
    costs = {config: cost(problem, device, config) for config in candidates}
    best = min(costs, key=costs.__getitem__)
    return best, costs[best]
