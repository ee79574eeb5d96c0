"""Which kernel computes a convolution, and in which configuration. Needs no measurement, imports no CuPy."""

from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnsupportedProblemError
from . import configs
from .device import Device
from .problem import Conv2dProblem
from .variants import VARIANTS

DEFAULT = "conv2d_implicit_gemm"
"""The fastest kernel that solves every problem."""


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


def choose(
    problem: Conv2dProblem,
    device: Device,
    kernel: str = "auto",
    strict: bool = False,
    *,
    allow_winograd: bool = False,
) -> Choice:
    """Decides which kernel computes `problem` on `device`.

    Args:
        problem: the convolution.
        device: the GPU.
        kernel: ``"auto"``, or the name of a variant, which is used wherever it applies.
        strict: raise instead of falling back where the demanded variant does not apply.
        allow_winograd: whether ``"auto"`` may choose conv2d_winograd where it is expected to be faster. It spreads a
            NaN or Inf one pixel beyond its reach and turns Inf into NaN: of no consequence where the result is
            pooled over the image anyway, as in a classifier's forward pass, but not what a convolution on its own
            should do.

    Raises:
        ValueError: `kernel` is no variant's name.
        UnsupportedProblemError: no kernel solves the problem, or `strict` and the demanded one does not.
    """
    if kernel != "auto" and kernel not in VARIANTS:
        raise ValueError(f"unknown kernel {kernel!r}; choose 'auto' or one of {', '.join(VARIANTS)}")
    return _choose(problem, device, kernel, strict, allow_winograd)


@lru_cache(maxsize=4096)
def _choose(problem: Conv2dProblem, device: Device, kernel: str, strict: bool, allow_winograd: bool) -> Choice:
    fallback = None
    if kernel != "auto":
        supported, why_not = VARIANTS[kernel].supports(problem, device)
        if supported:
            return Choice(kernel, fastest(kernel, problem, device)[0], "asked for by name")
        if strict:
            raise UnsupportedProblemError(f"{kernel} does not support conv2d {problem}: {why_not}")
        fallback = f"{kernel} {why_not}"
    supported, why_not = VARIANTS[DEFAULT].supports(problem, device)
    if not supported:
        raise UnsupportedProblemError(f"conv2d {problem} cannot be computed: {why_not}")
    config, cost = fastest(DEFAULT, problem, device)
    if allow_winograd and VARIANTS["conv2d_winograd"].supports(problem, device)[0]:
        winograd, winograd_cost = fastest("conv2d_winograd", problem, device)
        if winograd_cost < cost:
            reason = f"2.25× fewer multiplications; {cost / winograd_cost:.2f}× faster than {DEFAULT} by the model"
            return Choice("conv2d_winograd", winograd, reason, fallback)
    assert isinstance(config, configs.ImplicitGemmConfig)
    tiles = _tiles(problem, config)
    return Choice(DEFAULT, config, f"{tiles} tiles on {device.sm_count} multiprocessors", fallback)


def fastest(variant: str, problem: Conv2dProblem, device: Device) -> tuple[configs.Config, float]:
    """Returns the configuration of a variant that the cost model expects to be fastest, and its cost."""
    costs = {config: cost(problem, device, config) for config in VARIANTS[variant].candidates(problem, device)}
    best = min(costs, key=costs.__getitem__)
    return best, costs[best]


IMPLICIT_GEMM_EFFICIENCY = {(256, 128): 1.0, (128, 128): 0.985, (128, 64): 0.94, (64, 64): 0.93, (64, 32): 0.68}
"""Rate of a full wave per tile shape, relative to the best; from 14²×256 → 256, N = 256 on an H100."""

WINOGRAD_EFFICIENCY = 0.70
WINOGRAD_OVERHEAD = 16
"""Rate of Winograd's multiplications on the same scale, and its fixed work per block in channels; from 56²×64 and
14²×256, N = 256 on an H100."""


def cost(problem: Conv2dProblem, device: Device, config: configs.Config) -> float:
    """Predicted time of a configuration: multiply-adds of the busiest multiprocessor over the rate it reaches.

    The last wave of blocks counts whole, since its blocks take as long as any other's. The unit is arbitrary but the
    same for conv2d_implicit_gemm and conv2d_winograd; kernels with nothing to choose cost 0.
    """
    if isinstance(config, configs.WinogradConfig):
        tiles = problem.N * -(-problem.P // 2) * -(-problem.Q // 2)
        blocks = -(-tiles // config.TILES) * -(-problem.K // config.TILE_K)
        channels = -(-problem.C // config.chunk) * config.chunk + WINOGRAD_OVERHEAD
        work = 16 * config.TILES * config.TILE_K * channels
        return -(-blocks // device.sm_count) * work / WINOGRAD_EFFICIENCY
    if isinstance(config, configs.ImplicitGemmConfig):
        full, rest = divmod(_tiles(problem, config), device.sm_count * config.min_blocks)
        blocks = full * config.min_blocks + -(-rest // device.sm_count)
        work = config.tile_m * config.tile_n * problem.gemm_k
        return blocks * work / IMPLICIT_GEMM_EFFICIENCY[config.tile_m, config.tile_n]
    return 0.0


def _tiles(problem: Conv2dProblem, config: configs.ImplicitGemmConfig) -> int:
    return -(-problem.gemm_m // config.tile_m) * -(-problem.gemm_n // config.tile_n) * problem.groups
