"""The ladder's upper half: convolution on tensor cores."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit
from . import configs, tensor_maps
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
CLUSTERS_SINCE = (9, 0)
"""Compute capability from which on blocks can form a cluster."""

IN_CLUSTERS = frozenset(configs.MMA_IN_CLUSTERS + configs.MMA_PATCH_IN_CLUSTERS)


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
        kernel(grid, (config.threads,), arguments)


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
        return configs.MMA + configs.MMA_IN_CLUSTERS

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.MmaConfig]:
        return [
            replace(config, merged_groups=merged)
            for merged in sorted({1, merged_groups(problem)})
            for tile in self._tiles(as_merged(problem, merged), device)
            for config in with_split_k(as_merged(problem, merged), device, tile)
        ]

    @staticmethod
    def _tiles(problem: Conv2dProblem, device: Device) -> Iterator[configs.MmaConfig]:
        aligned = is_aligned(problem)
        for config in configs.MMA:
            fits = shared_memory(problem, config) <= device.shared_memory_per_block
            if fits and (config.precision, config.aligned) == (problem.precision, aligned):
                yield config

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.MmaConfig) -> None:
        merged = as_merged(problem, config.merged_groups)
        weight = merged_filter(problem, operands.filter, config.merged_groups)
        _launch_mma(self.name, merged, operands, weight, config, ())


class MmaPatch(Variant):
    """conv2d_mma_patch: conv2d_mma with the input of a tile in shared memory."""

    name = "conv2d_mma_patch"
    precisions = ("fp16", "bf16", "tf32", "fp32-tc")
    sources = ("conv2d_mma_patch",)

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        if device.compute_capability < (8, 0):
            return False, f"needs compute capability 8.0, {device.name} has {device.number}"
        if (problem.stride_h, problem.stride_w) != (1, 1):
            return False, f"needs stride 1, not {problem.stride_h}×{problem.stride_w}"
        if (problem.dilation_h, problem.dilation_w) != (1, 1):
            return False, f"needs dilation 1, not {problem.dilation_h}×{problem.dilation_w}"
        if problem.groups != 1:
            return False, f"needs groups 1, not {problem.groups}"
        supported, why_not = super().supports(problem, device)
        if not supported:
            return False, why_not
        if not is_aligned(problem):
            per_chunk = 16 // problem.arithmetic.element_size
            return False, f"needs C a multiple of {per_chunk} and K of 8, not {problem.C} and {problem.K}"
        tiles = [config for config in configs.MMA_PATCH if config.precision == problem.precision]
        if not any(patch_arrives_in_time(problem, config) for config in tiles):
            return False, f"needs more taps than {problem.R}×{problem.S} for as many channels as {problem.C}"
        if not self.candidates(problem, device):
            return False, f"needs more shared memory for rows of {problem.W} pixels than {device.name} has"
        return True, ""

    def configurations(self) -> Sequence[configs.MmaConfig]:
        return configs.MMA_PATCH + configs.MMA_PATCH_IN_CLUSTERS

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.MmaConfig]:
        return [
            config
            for tile in configs.MMA_PATCH
            if tile.precision == problem.precision
            and patch_arrives_in_time(problem, tile)
            and shared_memory(problem, tile) <= device.shared_memory_per_block
            for config in with_split_k(problem, device, tile)
        ]

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.MmaConfig) -> None:
        rows = np.int32(patch_rows(problem, config.tile_m))
        _launch_mma(self.name, problem, operands, operands.filter.weight, config, (rows,))


class HopperVariant(Variant):
    """A kernel of Hopper's warpgroup instructions."""

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        if device.compute_capability != (9, 0):
            return False, f"needs compute capability 9.0, {device.name} has {device.number}"
        if problem.groups != 1:
            return False, f"needs groups 1, not {problem.groups}"
        return super().supports(problem, device)


class WgmmaIm2col(HopperVariant):
    """A kernel that has the tensor memory accelerator walk the output's pixels."""

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        supported, why_not = super().supports(problem, device)
        if not supported:
            return False, why_not
        size = problem.arithmetic.element_size
        if problem.C % (128 // size) or problem.K % (16 // size):
            return False, (
                f"needs C a multiple of {128 // size} and K of {16 // size}, not {problem.C} and {problem.K}"
            )
        if problem.shortcut_channels % (128 // size):
            return False, f"needs the shortcut's C a multiple of {128 // size}, not {problem.shortcut_channels}"
        if problem.shortcut_stride > tensor_maps.MAX_STRIDE:
            return False, f"needs the shortcut's stride up to {tensor_maps.MAX_STRIDE}, not {problem.shortcut_stride}"
        if max(problem.stride_h, problem.stride_w) > tensor_maps.MAX_STRIDE:
            return False, f"needs strides up to {tensor_maps.MAX_STRIDE}, not {problem.stride_h}×{problem.stride_w}"
        reach = max((problem.R - 1) * problem.dilation_h, (problem.S - 1) * problem.dilation_w)
        if max(reach, problem.pad_h, problem.pad_w) > tensor_maps.MAX_OFFSET:
            return False, f"needs filters and padding up to {tensor_maps.MAX_OFFSET} pixels wide"
        return True, ""


class Wgmma(WgmmaIm2col):
    """conv2d_wgmma: Hopper's warpgroup instructions, fed by the tensor memory accelerator."""

    name = "conv2d_wgmma"
    precisions = ("fp16", "bf16", "tf32")
    sources = ("conv2d_wgmma", "conv2d_wgmma_split_k")
    adds_shortcut = True

    def configurations(self) -> Sequence[configs.WgmmaConfig]:
        return configs.WGMMA + configs.WGMMA_SPLIT_K

    def sources_of(self, config: configs.Config) -> tuple[str, ...]:
        assert isinstance(config, configs.WgmmaConfig)
        return (config.source,)

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.WgmmaConfig]:
        widest = max(64, 1 << (problem.K - 1).bit_length())
        return [
            config
            for config in self.configurations()
            if config.precision == problem.precision
            and config.tile_n <= widest
            and (not config.cluster or self._shares_well(problem, device, config))
        ]

    @staticmethod
    def _shares_well(problem: Conv2dProblem, device: Device, config: configs.WgmmaConfig) -> bool:
        """Whether conv2d_wgmma_split_k solves a problem, with a slice of the depth for each consumer of the blocks that
        share a tile, and no more blocks than run at a time.
        """
        slices = blocks(problem.depth, config.tile_k) // config.CONSUMERS
        return splits_well(problem, config, slices, tile_count(problem, config), 2 * device.sm_count)

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.WgmmaConfig) -> None:
        kernel = jit.get_function(config.source, defines=config.defines())
        tiles = tile_count(problem, config)
        factors: tuple[Any, ...] = (
            tensor_maps.im2col_map(problem, operands.x, config.tile_m),
            tensor_maps.matrix_map(problem, operands.filter.weight, problem.gemm_k, config.tile_n),
        )
        shortcut = operands.shortcut
        if shortcut is None:
            factors += tensor_maps.NONE, tensor_maps.NONE
        else:
            alone = problem.shortcut_alone(shortcut.x.shape)
            factors += (
                tensor_maps.im2col_map(alone, shortcut.x, config.tile_m),
                tensor_maps.matrix_map(alone, shortcut.filter.weight, alone.C, config.tile_n),
            )
        params = conv2d_params(problem, operands.relu, operands.backwards)
        grid: tuple[int, ...]
        arguments: tuple[Any, ...]
        if config.cluster:
            grid, arguments = (tiles, 1, config.split_k_slices), (*factors, *operands.tail(), params)
        else:
            residuals = tensor_maps.NONE
            if operands.residual is not None:
                residuals = tensor_maps.matrix_map(problem, operands.residual, problem.K, config.tile_m, factor=False)
            outputs = tensor_maps.matrix_map(problem, operands.y, problem.K, config.tile_m, factor=False)
            grid, arguments = (
                (min(tiles, multiprocessors()),),
                (*factors, residuals, outputs, *operands.tail(), params),
            )
        jit.launch(kernel, grid, (config.threads,), arguments, shared=config.shared_memory, waits=True)


def splits_well(
    problem: Conv2dProblem,
    config: configs.WgmmaConfig | configs.WgmmaPatchConfig,
    slices: int,
    tiles: int,
    most_blocks: int,
) -> bool:
    """Whether the blocks of a cluster can share a tile's `slices` of the depth, and `tiles` take few enough blocks."""
    size = config.split_k_slices
    return problem.K % 8 == 0 and slices >= size and tiles * size <= most_blocks


def multiprocessors() -> int:
    """Returns how many multiprocessors the current device has."""
    import cupy

    return _multiprocessors_of(cupy.cuda.runtime.getDevice())


@cache
def _multiprocessors_of(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def _launch_mma(
    name: str,
    problem: Conv2dProblem,
    operands: Operands,
    weight: "cupy.ndarray",
    config: configs.MmaConfig,
    more: tuple[np.int32, ...],
) -> None:
    """Launches one of the two kernels, with `more` arguments in front of the description of the problem."""
    kernel = jit.get_function(name, defines=config.defines())
    tiles = blocks(problem.gemm_m, config.tile_m) * blocks(problem.gemm_n, config.tile_n)
    grid = (tiles, problem.groups, config.split_k_slices)
    workspace, arrived = NULL, NULL
    if config.split_k_slices > 1 and not config.cluster:
        import cupy

        floats = tiles * problem.groups * config.split_k_slices * config.tile_m * config.tile_n
        workspace, arrived = cupy.empty(floats, cupy.float32), counters()
    params = conv2d_params(problem, operands.relu)
    arguments = (operands.x, weight, *operands.tail(), workspace, arrived, *more, params)
    jit.launch(kernel, grid, (config.threads,), arguments, shared=shared_memory(problem, config), waits=True)


def shared_memory(problem: Conv2dProblem, config: configs.MmaConfig) -> int:
    """Returns the bytes of dynamic shared memory per block of conv2d_mma or conv2d_mma_patch."""
    received = 4 * config.tile_m * config.tile_n if config.cluster else 0
    if not isinstance(config, configs.MmaPatchConfig):
        return config.stages * (config.tile_m + config.tile_n) * config.ROW_BYTES + 16 * config.tile_m + received
    rows = patch_rows(problem, config.tile_m)
    pixels = min(2, blocks(problem.C, config.tile_k)) * rows * (problem.Q + problem.S - 1)
    return (pixels + config.stages * config.tile_n) * config.ROW_BYTES + 8 * rows + received


def patch_rows(problem: Conv2dProblem, tile_m: int) -> int:
    """Returns how many padded rows of the input the windows of `tile_m` neighbouring output pixels touch at most."""
    output_rows = min((tile_m + problem.Q - 2) // problem.Q + 1, max(1, problem.N * problem.P))
    borders = min((output_rows + problem.P - 2) // problem.P, max(0, problem.N - 1))  # between images
    return output_rows + (problem.R - 1) * (1 + borders)


def patch_arrives_in_time(problem: Conv2dProblem, config: configs.MmaPatchConfig) -> bool:
    """Whether conv2d_mma_patch has waited for a slice of channels before it reads it.

    From the third on, a slice is fetched when the one before it begins, that is R·S slices of the filter before it is
    read, together with a slice of the filter that is waited for `stages` − 1 slices later.
    """
    return config.stages - 1 <= problem.R * problem.S or blocks(problem.C, config.tile_k) <= 2


def with_split_k(problem: Conv2dProblem, device: Device, tile: configs.MmaConfig) -> Iterator[configs.MmaConfig]:
    """Yields a tile's form with the whole depth, and with as many slices as give every multiprocessor something.

    They meet in a cluster wherever there is such a form and the GPU can run it.
    """
    yield tile
    tiles = tile_count(problem, tile)
    for slices in SPLIT_K_SLICES:
        useful = tiles * slices <= 4 * device.sm_count and slices <= blocks(problem.gemm_k, tile.tile_k)
        if not useful or tiles > COUNTERS:
            continue
        split = replace(tile, split_k_slices=slices)
        together = replace(split, cluster=True)
        fits = shared_memory(problem, together) <= device.shared_memory_per_block
        runs = together in IN_CLUSTERS and device.compute_capability >= CLUSTERS_SINCE
        yield together if fits and runs else split


def as_merged(problem: Conv2dProblem, count: int) -> Conv2dProblem:
    """Returns the problem with `count` neighbouring groups as one."""
    return problem if count == 1 else replace(problem, groups=problem.groups // count)


def merged_filter(problem: Conv2dProblem, filter: Filter, count: int) -> "cupy.ndarray":
    """Returns the filter for `count` neighbouring groups as one, (K, R, S, count · C/groups), made once per filter."""
    if count == 1:
        return filter.weight

    def make(weight: "cupy.ndarray") -> "cupy.ndarray":
        import cupy

        K, R, S, C = weight.shape
        wide = cupy.zeros((problem.groups // count, count, problem.gemm_n, R, S, count, C), weight.dtype)
        narrow = weight.reshape(problem.groups // count, count, problem.gemm_n, R, S, C)
        for member in range(count):
            wide[:, member, :, :, :, member] = narrow[:, member]
        return wide.reshape(K, R, S, count * C)

    return filter.derived(("merged", count), make)


def tile_count(problem: Conv2dProblem, config: configs.MmaConfig | configs.WmmaConfig | configs.WgmmaConfig) -> int:
    """Returns the output tiles of a problem, over all groups."""
    return blocks(problem.gemm_m, config.tile_m) * blocks(problem.gemm_n, config.tile_n) * problem.groups
