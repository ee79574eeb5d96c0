"""The ladder's upper half: convolution on tensor cores."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import jit
from . import configs
from .device import Device
from .params import conv2d_params
from .problem import Conv2dProblem
from .scratch import COUNTERS, counters
from .variant import NULL, Filter, Operands, Support, Variant, blocks

if TYPE_CHECKING:
    import cupy

MERGED_CHANNELS = 32
"""Channels per group up to which neighbouring groups are worth computing as one."""

SPLIT_K_SLICES = (2, 3, 4, 6, 8, 12, 16)


def is_aligned(problem: Conv2dProblem) -> bool:
    """Whether chunks of 16 bytes never straddle two taps, groups or pixels of the output."""
    per_chunk = 16 // problem.arithmetic.element_size
    return problem.group_channels % per_chunk == 0 and problem.gemm_n % 8 == 0


def merged_groups(problem: Conv2dProblem) -> int:
    """Returns how many neighbouring groups to compute as one, with a filter that is zero between them.

    Tensor cores multiply blocks of 8 filters by 16 elements of depth or more, of which a group of 4 channels would fill
    a fraction, and 16-byte loads want 8 channels: so narrow groups are merged up to `MERGED_CHANNELS`. The price is
    that a NaN or Inf spreads to the other groups.
    """
    best = 1
    for count in range(1, problem.groups + 1):
        if problem.groups % count:
            continue
        if is_aligned(replace(problem, groups=problem.groups // count)):
            best = count
            if problem.group_channels * count >= MERGED_CHANNELS:
                break
    return best


class Wmma(Variant):
    """conv2d_wmma: the WMMA API."""

    name = "conv2d_wmma"
    precisions = ("fp16", "bf16", "tf32")
    sources = ("conv2d_wmma",)

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        if problem.precision in ("bf16", "tf32") and device.compute_capability < (8, 0):
            return False, f"needs compute capability 8.0 for {problem.precision}, {device.name} has {device.number}"
        return super().supports(problem, device)

    def configurations(self) -> Sequence[configs.WmmaConfig]:
        return configs.WMMA

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.WmmaConfig]:
        aligned = is_aligned(problem)
        return [c for c in configs.WMMA if (c.precision, c.aligned) == (problem.precision, aligned)]

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.WmmaConfig) -> None:
        kernel = jit.get_function("conv2d_wmma", defines=config.defines())
        grid = (blocks(problem.gemm_m, config.tile_m) * blocks(problem.gemm_n, config.tile_n), problem.groups)
        arguments = (operands.x, operands.filter.weight, *operands.tail(), conv2d_params(problem, operands.relu))
        jit.launch(kernel, grid, (config.threads,), arguments, shared=config.shared_memory)


class Mma(Variant):
    """conv2d_mma: mma.sync, ldmatrix, cp.async."""

    name = "conv2d_mma"
    precisions = ("fp16", "bf16", "tf32", "fp32-tc")
    sources = ("conv2d_mma",)

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        if device.compute_capability < (8, 0):
            return False, f"needs compute capability 8.0, {device.name} has {device.number}"
        return super().supports(problem, device)

    def configurations(self) -> Sequence[configs.MmaConfig]:
        return configs.MMA

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.MmaConfig]:
        return [
            replace(config, split_k_slices=slices, merged_groups=merged)
            for merged in sorted({1, merged_groups(problem)})
            for config in self._tiles(as_merged(problem, merged), device)
            for slices in self._split_k(as_merged(problem, merged), device, config)
        ]

    @staticmethod
    def _tiles(problem: Conv2dProblem, device: Device) -> Iterator[configs.MmaConfig]:
        aligned = is_aligned(problem)
        for config in configs.MMA:
            if (config.precision, config.aligned) == (problem.precision, aligned):
                if config.shared_memory <= device.shared_memory_per_block:
                    yield config

    @staticmethod
    def _split_k(problem: Conv2dProblem, device: Device, config: configs.MmaConfig) -> Iterator[int]:
        """Yields into how many parts the depth may be cut: only as many as give every multiprocessor something."""
        yield 1
        tiles = tile_count(problem, config)
        for slices in SPLIT_K_SLICES:
            if tiles * slices <= 4 * device.sm_count and tiles <= COUNTERS:
                if slices <= blocks(problem.gemm_k, config.tile_k):
                    yield slices

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.MmaConfig) -> None:
        merged = as_merged(problem, config.merged_groups)
        weight = merged_filter(problem, operands.filter, config.merged_groups)
        kernel = jit.get_function("conv2d_mma", defines=config.defines())
        tiles = blocks(merged.gemm_m, config.tile_m) * blocks(merged.gemm_n, config.tile_n)
        grid = (tiles, merged.groups, config.split_k_slices)
        workspace, arrived = NULL, NULL
        if config.split_k_slices > 1:
            import cupy

            floats = tiles * merged.groups * config.split_k_slices * config.tile_m * config.tile_n
            workspace, arrived = cupy.empty(floats, cupy.float32), counters()
        arguments = (operands.x, weight, *operands.tail(), workspace, arrived, conv2d_params(merged, operands.relu))
        jit.launch(kernel, grid, (config.threads,), arguments, shared=config.shared_memory, waits=True)


def as_merged(problem: Conv2dProblem, count: int) -> Conv2dProblem:
    """Returns the problem with `count` neighbouring groups as one."""
    return problem if count == 1 else replace(problem, groups=problem.groups // count)


def merged_filter(problem: Conv2dProblem, filter: Filter, count: int) -> "cupy.ndarray":
    """Returns the filter for `count` neighbouring groups as one, (K, R, S, count · C/groups), made once per filter."""
    if count == 1:
        return filter.weight
    key = ("merged", count)
    if key not in filter.packed:
        import cupy

        K, R, S, C = filter.weight.shape
        wide = cupy.zeros((problem.groups // count, count, problem.gemm_n, R, S, count, C), filter.weight.dtype)
        narrow = filter.weight.reshape(problem.groups // count, count, problem.gemm_n, R, S, C)
        for member in range(count):
            wide[:, member, :, :, :, member] = narrow[:, member]
        # Published only when it is there: another thread may use it on a stream that is not ordered after this one.
        cupy.cuda.get_current_stream().synchronize()
        filter.packed[key] = wide.reshape(K, R, S, count * C)
    return filter.packed[key]


def tile_count(problem: Conv2dProblem, config: configs.MmaConfig | configs.WmmaConfig) -> int:
    """Returns the output tiles of a problem, over all groups."""
    return blocks(problem.gemm_m, config.tile_m) * blocks(problem.gemm_n, config.tile_n) * problem.groups
