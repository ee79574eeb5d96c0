"""Which kernel computes a convolution, and in which configuration. Needs no measurement, imports no CuPy."""

from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnsupportedProblemError
from . import configs
from .device import Device
from .problem import Conv2dProblem
from .variants import VARIANTS

AUTO = "conv2d_implicit_gemm"
"""What ``kernel="auto"`` means. Winograd is faster on 3×3 layers but spreads a NaN or Inf beyond its receptive field
and rounds more; whoever accepts that asks for it by name."""


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


def choose(problem: Conv2dProblem, device: Device, kernel: str = "auto", strict: bool = False) -> Choice:
    """Decides which kernel computes `problem` on `device`.

    Args:
        problem: the convolution.
        device: the GPU.
        kernel: ``"auto"``, or the name of a variant, which is used wherever it applies.
        strict: raise instead of falling back where the demanded variant does not apply.

    Raises:
        ValueError: `kernel` is no variant's name.
        UnsupportedProblemError: no kernel solves the problem, or `strict` and the demanded one does not.
    """
    if kernel != "auto" and kernel not in VARIANTS:
        raise ValueError(f"unknown kernel {kernel!r}; choose 'auto' or one of {', '.join(VARIANTS)}")
    return _choose(problem, device, kernel, strict)


@lru_cache(maxsize=4096)
def _choose(problem: Conv2dProblem, device: Device, kernel: str, strict: bool) -> Choice:
    fallback = None
    if kernel != "auto":
        supported, why_not = VARIANTS[kernel].supports(problem, device)
        if supported:
            config, _ = _configuration(kernel, problem, device)
            return Choice(kernel, config, "asked for by name")
        if strict:
            raise UnsupportedProblemError(f"{kernel} does not support conv2d {problem}: {why_not}")
        fallback = f"{kernel} {why_not}"
    supported, why_not = VARIANTS[AUTO].supports(problem, device)
    if not supported:
        raise UnsupportedProblemError(f"conv2d {problem} cannot be computed: {why_not}")
    config, reason = _configuration(AUTO, problem, device)
    return Choice(AUTO, config, reason, fallback)


def _configuration(kernel: str, problem: Conv2dProblem, device: Device) -> tuple[configs.Config, str]:
    candidates = VARIANTS[kernel].candidates(problem, device)
    if kernel != "conv2d_implicit_gemm":
        return candidates[0], "only configuration that fits"
    costs = {config: implicit_gemm_cost(problem, device, config) for config in candidates}  # type: ignore[arg-type]
    best = min(candidates, key=costs.__getitem__)
    tiles = _tiles(problem, best)  # type: ignore[arg-type]
    return best, f"{tiles} tiles on {device.sm_count} SMs"


EFFICIENCY = {
    (256, 128): 1.0,
    (128, 128): 1.0,
    (128, 64): 1.0,
    (64, 64): 0.85,
    (64, 32): 0.6,
}
"""Rate of a full wave per tile shape, relative to the best, measured on an H100."""


def _tiles(problem: Conv2dProblem, config: configs.ImplicitGemmConfig) -> int:
    return -(-problem.gemm_m // config.tile_m) * -(-problem.gemm_n // config.tile_n) * problem.groups


def implicit_gemm_cost(problem: Conv2dProblem, device: Device, config: configs.ImplicitGemmConfig) -> float:
    """Predicted time of a configuration, in arbitrary units: waves of blocks times the work of a wave.

    The last wave counts whole: its blocks take as long as any other's. Blocks that share a multiprocessor share its
    arithmetic, so a wave of `min_blocks` per multiprocessor takes `min_blocks` times as long as one of a single block.
    """
    tiles = _tiles(problem, config)
    slots = device.sm_count * config.min_blocks
    full, rest = divmod(tiles, slots)
    busiest = full * config.min_blocks + -(-rest // device.sm_count)
    work = config.tile_m * config.tile_n / EFFICIENCY[config.tile_m, config.tile_n]
    return busiest * work
