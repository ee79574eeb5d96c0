"""conv2d_wgmma_patch and conv2d_wgmma_patch_split_k: which pixels make a tile, and their launch."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .. import jit
from . import configs, tensor_maps
from .device import Device
from .params import conv2d_params
from .problem import Conv2dProblem
from .tensor_core_variants import HopperVariant, multiprocessors
from .variant import Operands, Support, blocks

STATIC_SHARED = 1024
"""Bytes for the barriers, so that what follows is aligned to as much."""

_ALIGNMENT = 1024
_MAX_BOX = 256
_MIN_STAGES = 3
_BLOCKS_AT_A_TIME = 2
"""That a multiprocessor runs where blocks share tiles: more blocks than that would wait."""

_SYSTEM_SHARED = 1024
"""Bytes that the system takes of a multiprocessor's shared memory for each block; a block may have the rest."""


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
        store_bytes: of a tile as it is stored; 0 where blocks share one.
        staged_bytes: of its place; where blocks share a tile, of a consumer's partial sums.
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
    num_stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block."""
        config = configs.WgmmaPatchConfig
        places = config.PATCHES * self.patch_bytes + config.CONSUMERS * self.staged_bytes
        return places + self.num_stages * config.FILTERS * config.ROW_BYTES

    @property
    def stored_rows(self) -> int:
        """Rows per image of the box that is stored, those of zeros included: they lie outside of the output."""
        return self.rows if self.images == 1 else self.patch_rows


@lru_cache(maxsize=4096)
def patch_tile(
    problem: Conv2dProblem, pixels: int, shared_limit: int, split_k_slices: int = 0
) -> PatchTile | None:
    """Returns the largest tile whose pixels and zeros are at most `pixels` columns, or None where there is none.

    Args:
        problem: a convolution that keeps the size.
        pixels: columns of the product.
        shared_limit: bytes of dynamic shared memory that a block may have.
        split_k_slices: as of `configs.WgmmaPatchConfig`.
    """
    config = configs.WgmmaPatchConfig
    row_bytes = config.ROW_BYTES
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
    stored = 0 if split_k_slices else images * (rows if images == 1 else patch_rows) * columns
    patch_bytes, staged_bytes = _aligned((box + zeros) * row_bytes), _aligned(max(stored, pixels) * row_bytes)
    places = config.PATCHES * patch_bytes + config.CONSUMERS * staged_bytes
    num_stages = _stages(problem, shared_limit - STATIC_SHARED - places, shared_limit, split_k_slices)
    if num_stages is None:
        return None
    row_tiles = blocks(problem.H, rows)
    return PatchTile(
        images=images,
        rows=rows,
        columns=columns,
        patch_rows=patch_rows,
        row_tiles=row_tiles,
        pixel_tiles=blocks(problem.N, images) * row_tiles,
        box_bytes=box * row_bytes,
        patch_bytes=patch_bytes,
        store_bytes=stored * row_bytes,
        staged_bytes=staged_bytes,
        num_stages=num_stages,
    )


def _stages(problem: Conv2dProblem, room: int, shared_limit: int, split_k_slices: int) -> int | None:
    """Returns how many slices of the filter to keep in `room` bytes, None where these are too few.

    Where blocks share tiles, no more than a block needs; and only what leaves room for a second block, if that is
    enough for all taps.
    """
    config = configs.WgmmaPatchConfig
    size, taps, most = config.FILTERS * config.ROW_BYTES, problem.R * problem.S, config.MAX_STAGES
    if split_k_slices:
        most = min(most, blocks(problem.C // config.CHANNELS, split_k_slices) * taps)
    found = min(most, room // size)
    if found < min(most, _MIN_STAGES):
        return None
    if split_k_slices:
        other = (shared_limit + _SYSTEM_SHARED) // _BLOCKS_AT_A_TIME
        beside = (room - other) // size
        found = min(found, beside) if beside >= min(most, taps) else found
    return found


class WgmmaPatch(HopperVariant):
    """conv2d_wgmma_patch: conv2d_wgmma with the input of a tile in shared memory."""

    name = "conv2d_wgmma_patch"
    precisions = ("fp16", "bf16")
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
        if problem.C % configs.WgmmaPatchConfig.CHANNELS or problem.K % 8:
            return False, f"needs C a multiple of 64 and K of 8, not {problem.C} and {problem.K}"
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
        """Of the forms that hold the same tile, and as many blocks of which share it, the narrowest.

        First those that tables from before tiles were shared mean.
        """
        narrowest = {}
        for config in self.configurations():
            if config.precision == problem.precision:
                slices = config.split_k_slices
                tile = patch_tile(problem, config.pixels, device.shared_memory_per_block, slices)
                if tile is not None and (not slices or splits_well(problem, device, tile, slices)):
                    narrowest[tile.images, tile.rows, slices] = config
        return list(narrowest.values())

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
            np.array(astuple(tile), np.int32).view(f"V{4 * len(astuple(tile))}"),
            conv2d_params(problem, operands.relu),
        )
        tiles = tile.pixel_tiles * blocks(problem.K, config.FILTERS)
        grid: tuple[int, ...]
        arguments: tuple[Any, ...]
        if config.split_k_slices:
            grid, arguments = (tiles, 1, config.split_k_slices), (*factors, *operands.tail(), *described)
        else:
            stored = (tile.columns, tile.stored_rows, tile.images)
            residuals = tensor_maps.NONE
            if operands.residual is not None:
                residuals = tensor_maps.tensor_map(problem, operands.residual, stored)
            outputs = tensor_maps.tensor_map(problem, operands.y, stored)
            grid = (min(tiles, multiprocessors()),)
            arguments = (*factors, residuals, outputs, *operands.tail()[:2], *described)
        jit.launch(kernel, grid, (config.threads,), arguments, shared=tile.shared_memory, waits=True)


def splits_well(problem: Conv2dProblem, device: Device, tile: PatchTile, split_k_slices: int) -> bool:
    """Whether conv2d_wgmma_patch_split_k has a slice of channels for each block, and no more blocks than run at a time."""
    enough = problem.C // configs.WgmmaPatchConfig.CHANNELS >= split_k_slices
    tiles = tile.pixel_tiles * blocks(problem.K, configs.WgmmaPatchConfig.FILTERS)
    return enough and tiles * split_k_slices <= _BLOCKS_AT_A_TIME * device.sm_count


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
