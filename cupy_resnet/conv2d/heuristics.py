"""Which kernel computes a convolution, and in which configuration. Needs no measurement, imports no CuPy."""

from dataclasses import dataclass
from functools import lru_cache

from .._names import unknown_name
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
    check_kernel(kernel)
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


IMPLICIT_GEMM_EFFICIENCY = {
    (128, 256, 4): 1.04,
    (256, 128, 4): 1.0,
    (128, 128, 4): 0.97,
    (64, 128, 4): 0.96,
    (128, 64, 4): 0.925,
    (64, 64, 4): 0.925,
    (64, 32, 4): 0.71,
    (128, 64, 1): 0.56,
    (64, 64, 1): 0.61,
    (64, 32, 1): 0.46,
}
"""Rate of a full wave per (tile_m, tile_n, vector), relative to 41.9 TFLOP/s. Measured on an H100, N = 256: for 16-byte
loads on 14²×256 → 256, 3×3; for 4-byte loads on 224²×3 → 64, 7×7, stride 2."""

PROLOGUE_AND_EPILOGUE = 16, 28
"""Fixed work of a block of conv2d_implicit_gemm, in steps of depth: where other blocks of the multiprocessor overlap
it, and where it has the multiprocessor to itself; from 56²×64 → 256, 1×1, N = 64 on an H100."""

WINOGRAD_EFFICIENCY = 0.70
WINOGRAD_OVERHEAD = 16
"""Rate of Winograd's multiplications on the same scale, and its fixed work per block in channels; from 56²×64 and
14²×256, N = 256 on an H100."""


def cost(problem: Conv2dProblem, device: Device, config: configs.Config) -> float:
    """Predicted time of a configuration: multiply-adds of the busiest multiprocessor over the rate it reaches.

    Blocks are dealt out evenly, and the last round counts whole, since its blocks take as long as any other's. The
    unit is arbitrary but the same for conv2d_implicit_gemm and conv2d_winograd; kernels with nothing to choose cost 0.
    """
    if isinstance(config, configs.WinogradConfig):
        tiles = problem.N * _ceil(problem.P, 2) * _ceil(problem.Q, 2)
        blocks = _ceil(tiles, config.TILES) * _ceil(problem.K, config.TILE_K)
        channels = _ceil(problem.C, config.chunk) * config.chunk + WINOGRAD_OVERHEAD
        work = 16 * config.TILES * config.TILE_K * channels
        return _ceil(blocks, device.sm_count) * work / WINOGRAD_EFFICIENCY
    if isinstance(config, configs.ImplicitGemmConfig):
        work = config.tile_m * config.tile_n * (problem.gemm_k + PROLOGUE_AND_EPILOGUE[config.min_blocks == 1])
        rate = IMPLICIT_GEMM_EFFICIENCY[config.tile_m, config.tile_n, config.vector]
        return _ceil(_tiles(problem, config), device.sm_count) * work / rate
    return 0.0


def _tiles(problem: Conv2dProblem, config: configs.ImplicitGemmConfig) -> int:
    return _ceil(problem.gemm_m, config.tile_m) * _ceil(problem.gemm_n, config.tile_n) * problem.groups


def _ceil(size: int, step: int) -> int:
    return -(-size // step)
