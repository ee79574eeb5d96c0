"""conv2d_wgmma_patch: which pixels make a tile, and its launch."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .. import jit
from . import configs, tensor_maps
from .device import Device
from .params import conv2d_params
from .problem import Conv2dProblem
from .tensor_core_variants import HopperVariant, multiprocessors, splits_well
from .variant import Operands, Support, blocks

STATIC_SHARED = 1024
"""Bytes for the barriers, so that what follows is aligned to as much."""

_ALIGNMENT = 1024
_MAX_BOX = 256
_MIN_STAGES = 3


@dataclass(frozen=True)
class PatchTile:
    """The struct of this name in the kernel, all 32-bit ints: how the output is cut into tiles.

    Args:
        images: whole images per tile, if more than one.
        rows: of the output, per image.
        columns: of the patch: W + pad_w, each row of pixels behind pad_w zeros, which also end the row before.
        patch_rows: rows of the patch per image.
        row_tiles: tiles per image.
        pixel_tiles: tiles in all, for 64 filters.
        box_bytes: of a patch as it is fetched.
        patch_bytes: of its place, with the zeros behind it.
        store_bytes: of a tile as it is stored by way of shared memory; 0 if it is not.
        staged_bytes: of its place; 0 if it has none.
        sum_bytes: of the partial sums that a block receives; 0 if it shares its tiles with none.
        num_stages: slices of the filter in shared memory.
    """

    images: int
    rows: int
    columns: int
    patch_rows: int
    row_tiles: int
    pixel_tiles: int
    box_bytes: int
    patch_bytes: int
    store_bytes: int
    staged_bytes: int
    sum_bytes: int
    num_stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block: a tile is staged where there are no more consumers than two."""
        config = configs.WgmmaPatchConfig
        places = config.PATCHES * self.patch_bytes + config.CONSUMERS * self.staged_bytes + self.sum_bytes
        return places + self.num_stages * config.FILTERS * config.ROW_BYTES

    @property
    def stored_rows(self) -> int:
        """Rows per image of the box that is stored, or brought to L2, those of zeros included: they lie outside of the
        output.
        """
        return self.rows if self.images == 1 else self.patch_rows


@lru_cache(maxsize=4096)
def patch_tile(problem: Conv2dProblem, pixels: int, shared_limit: int, split_k_slices: int = 1) -> PatchTile | None:
    """Returns the largest tile whose pixels and zeros are at most `pixels` columns, or None where there is none.

    Args:
        problem: a convolution that keeps the size.
        pixels: columns of the product.
        shared_limit: bytes of dynamic shared memory that a block may have.
        split_k_slices: as of `configs.WgmmaPatchConfig`.
    """
    config = configs.WgmmaPatchConfig(problem.precision, pixels, split_k_slices)
    columns = problem.W + problem.pad_w
    whole = (problem.H - 1) * columns + problem.W
    if whole <= pixels:
        images = 1 + (pixels - whole) // ((problem.H + problem.pad_h) * columns)
        images, rows = max(1, min(images, problem.N)), problem.H
    elif pixels >= problem.W:
        most = 1 + (pixels - problem.W) // columns
        images, rows = 1, blocks(problem.H, blocks(problem.H, most))  # as even as they come
    else:
        return None
    patch_rows = rows + 2 * problem.pad_h if images == 1 else problem.H + problem.pad_h
    if max(columns, patch_rows, images) > _MAX_BOX:
        return None
    zeros = (problem.pad_h * columns if images > 1 else 0) + problem.pad_w
    box = images * patch_rows * columns
    stored = images * (rows if images == 1 else patch_rows) * columns
    row_tiles = blocks(problem.H, rows)
    tile = PatchTile(
        images=images,
        rows=rows,
        columns=columns,
        patch_rows=patch_rows,
        row_tiles=row_tiles,
        pixel_tiles=blocks(problem.N, images) * row_tiles,
        box_bytes=box * config.ROW_BYTES,
        patch_bytes=_aligned((box + zeros) * config.ROW_BYTES),
        store_bytes=stored * config.ROW_BYTES if config.staged else 0,
        staged_bytes=_aligned(max(stored, pixels) * config.ROW_BYTES) if config.staged else 0,
        sum_bytes=pixels * config.FILTERS * 4 if config.cluster else 0,
        num_stages=0,
    )
    most = config.max_stages
    if config.cluster:  # no more than a block's slices of the depth
        most = min(most, blocks(problem.C // config.channels, split_k_slices) * problem.R * problem.S)
    free = shared_limit - STATIC_SHARED - tile.shared_memory
    num_stages = min(most, free // (config.FILTERS * config.ROW_BYTES))
    return replace(tile, num_stages=num_stages) if num_stages >= min(most, _MIN_STAGES) else None


class WgmmaPatch(HopperVariant):
    """conv2d_wgmma_patch: conv2d_wgmma with the input of a tile in shared memory."""

    name = "conv2d_wgmma_patch"
    precisions = ("fp16", "bf16", "tf32")
    sources = ("conv2d_wgmma_patch", "conv2d_wgmma_patch_split_k")

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        supported, why_not = super().supports(problem, device)
        if not supported:
            return False, why_not
        steps = (problem.stride_h, problem.stride_w, problem.dilation_h, problem.dilation_w)
        if steps != (1, 1, 1, 1):
            return False, "needs stride 1 and dilation 1"
        if (2 * problem.pad_h + 1, 2 * problem.pad_w + 1) != (problem.R, problem.S):
            return False, f"needs a padding that keeps the size with a filter of {problem.R}×{problem.S}"
        size = problem.arithmetic.element_size
        if problem.C % (128 // size) or problem.K % (16 // size):
            return False, (
                f"needs C a multiple of {128 // size} and K of {16 // size}, not {problem.C} and {problem.K}"
            )
        if not self.candidates(problem, device):
            return (
                False,
                f"has no tile on {device.name} for rows of {problem.W} pixels and a filter of {problem.R}×{problem.S}",
            )
        return True, ""

    def configurations(self) -> Sequence[configs.WgmmaPatchConfig]:
        return configs.WGMMA_PATCH + configs.WGMMA_PATCH_SPLIT_K

    def sources_of(self, config: configs.Config) -> tuple[str, ...]:
        assert isinstance(config, configs.WgmmaPatchConfig)
        return (config.source,)

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.WgmmaPatchConfig]:
        """Of the forms that hold the same tile, which as many blocks share, the narrowest."""
        narrowest = {}
        for config in self.configurations():
            if config.precision == problem.precision:
                slices = config.split_k_slices
                tile = patch_tile(problem, config.pixels, device.shared_memory_per_block, slices)
                if tile is not None and (slices == 1 or self._shares_well(problem, device, tile, config)):
                    narrowest[tile.images, tile.rows, slices] = config
        return list(narrowest.values())

    @staticmethod
    def _shares_well(problem: Conv2dProblem, device: Device, tile: PatchTile, config: configs.WgmmaPatchConfig) -> bool:
        """Whether conv2d_wgmma_patch_split_k solves a problem, with a slice of channels for each block that shares a
        tile, and no more blocks than run at a time.
        """
        slices = problem.C // config.channels
        return splits_well(problem, config, slices, tile_count(problem, tile), device.sm_count)

    def launch(self, problem: Conv2dProblem, operands: Operands, config: configs.WgmmaPatchConfig) -> None:
        kernel = jit.get_function(config.source, defines=config.defines())
        tile = patch_tile(problem, config.pixels, shared_limit(), config.split_k_slices)
        assert tile is not None, "not one of the candidates"
        patch = (tile.columns, tile.patch_rows, tile.images)
        factors = (
            tensor_maps.tensor_map(problem, operands.x, patch),
            tensor_maps.matrix_map(problem, operands.filter.weight, problem.gemm_k, config.FILTERS),
        )
        described = (
            *operands.tail(),
            np.array(astuple(tile), np.int32).view(f"V{4 * len(astuple(tile))}"),
            conv2d_params(problem, operands.relu, operands.backwards),
        )
        tiles = tile_count(problem, tile)
        grid: tuple[int, ...]
        arguments: tuple[Any, ...]
        if config.cluster:
            grid, arguments = (tiles, 1, config.split_k_slices), (*factors, *described)
        else:
            stored = (tile.columns, tile.stored_rows, tile.images)
            residuals = outputs = tensor_maps.NONE
            if operands.residual is not None:
                residuals = tensor_maps.tensor_map(problem, operands.residual, stored)
            if config.staged:
                outputs = tensor_maps.tensor_map(problem, operands.y, stored)
            grid = (min(tiles, multiprocessors()),)
            arguments = (*factors, residuals, outputs, *described)
        jit.launch(kernel, grid, (config.threads,), arguments, shared=tile.shared_memory, waits=True)


def tile_count(problem: Conv2dProblem, tile: PatchTile) -> int:
    """Returns how many tiles there are, of all filters."""
    return tile.pixel_tiles * blocks(problem.K, configs.WgmmaPatchConfig.FILTERS)


def shared_limit() -> int:
    """Returns how many bytes of dynamic shared memory a block may have on the current device."""
    import cupy

    return _shared_limit_of(cupy.cuda.runtime.getDevice())


@cache
def _shared_limit_of(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def _aligned(size: int) -> int:
    return blocks(size, _ALIGNMENT) * _ALIGNMENT
