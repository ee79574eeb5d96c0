"""The launch of conv2d_stem_wgmma, the stem on Hopper's warpgroup instructions, and how its work is cut.

How it is cut, and what is supported, is shared with conv2d_stem_wgmma_tf32 (`stem_wgmma_tf32`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import jit
from .device import Device
from .precision import PRECISIONS, Precision
from .stem import INPUTS, multiprocessors_of, pooled_shape, stem_params, supports_stem
from .variant import NULL, Filter, Support, blocks

if TYPE_CHECKING:
    import cupy

SOURCE = "conv2d_stem_wgmma"
THREADS = 256
FILTERS = 64
PIXELS = (64, 80, 112)
"""Columns of the convolution that a tile may have; 112 are those of an image 224 wide."""

BLOCKS_PER_MULTIPROCESSOR = 2
PRECISION_NAMES = ("fp16", "bf16")

_PAIRS = 8  # of input rows in shared memory
_STAGES = 4  # pairs of them on their way there
_INPUT_BYTES = {"unsigned char": 1, "float": 4, "Half": 2, "BFloat16": 2}


class Costs(NamedTuple):
    """What a kernel's work takes.

    Args:
        blocks_per_multiprocessor: that are resident, and whose products take turns.
        cycles_per_row_and_pixel: of products, for a column of the convolution.
        cycles_after_a_row: until its block multiplies again.
        cycles_before_a_unit: until its first products.
    """

    blocks_per_multiprocessor: int
    cycles_per_row_and_pixel: float
    cycles_after_a_row: int
    cycles_before_a_unit: int


COSTS = Costs(
    BLOCKS_PER_MULTIPROCESSOR,
    cycles_per_row_and_pixel=7,  # 14 instructions, each of which takes half a cycle per column
    cycles_after_a_row=300,  # sums are rounded
    cycles_before_a_unit=100,
)


def configurations() -> list[dict[str, int | str]]:
    """Returns every set of ``#define``s that the kernel is compiled with, the commonest first."""
    return [
        _defines(precision, element, channels, pixels)
        for precision in PRECISION_NAMES
        for element in dict.fromkeys(INPUTS.values())
        for channels in (3, 1, 2, 4)
        for pixels in reversed(PIXELS)
    ]


def _defines(precision: str, element: str, channels: int, pixels: int) -> dict[str, int | str]:
    return {
        "ELEMENT": PRECISIONS[precision].element,
        "INPUT": element,
        "CHANNELS": channels,
        "PIXELS": pixels,
        "ACCUMULATORS": pixels // 2,
    }


def supports_stem_wgmma(
    precision: Precision, x_shape: tuple[int, ...], filter_shape: tuple[int, ...], device: Device
) -> Support:
    """Whether the kernel computes this stem on `device`, and if not, why.

    Args:
        precision: the network's.
        x_shape: (N, H, W, C).
        filter_shape: (K, R, S, C).
        device: the GPU.
    """
    return supports_stem_on_hopper(PRECISION_NAMES, precision, x_shape, filter_shape, device)


def supports_stem_on_hopper(
    names: Sequence[str], precision: Precision, x_shape: tuple[int, ...], filter_shape: tuple[int, ...], device: Device
) -> Support:
    """The same of a kernel that computes in the precisions of these names."""
    supported, reason = supports_stem(precision, x_shape, filter_shape, device)
    if not supported:
        return False, reason
    if precision.name not in names:
        return False, f"computes in {' or '.join(names)}, not in {precision.name}"
    if device.compute_capability != (9, 0):
        return False, f"needs compute capability 9.0, {device.name} has {device.number}"
    N, PP, PQ, _ = pooled_shape(x_shape, filter_shape[0])
    if N * PP * column_tiles(PQ, PIXELS[0]) > 2**31 - 1:
        return False, "has more tiles than an int counts"
    return True, ""


class Tiling(NamedTuple):
    """How the pooled map is cut into units of work.

    Args:
        pixels: columns of the convolution in a tile.
        stripe_rows: pooled rows of a unit.
        units: of 64 filters.
    """

    pixels: int
    stripe_rows: int
    units: int


def column_tiles(PQ: int, pixels: int) -> int:
    """Returns how many tiles of `pixels` columns a row of `PQ` pooled ones takes; all but the first overlap by two."""
    return max(1, blocks(PQ - 1, pixels // 2 - 1))


@lru_cache(maxsize=256)
def tiling(y_shape: tuple[int, ...], sm_count: int, costs: Costs = COSTS) -> Tiling:
    """Returns what is expected to take the least time.

    The products of a multiprocessor's blocks take turns; the rest of what one does happens beside products. A
    stripe costs a row of the convolution that the one above has computed too.

    Args:
        y_shape: (N, PP, PQ, K), not empty.
        sm_count: the GPU's multiprocessors.
        costs: of the kernel.
    """
    N, PP, PQ, K = y_shape
    groups = K // FILTERS

    def cycles(cut: Tiling) -> float:
        rows = min(2 * cut.stripe_rows + 1, 2 * PP)
        products = rows * cut.pixels * costs.cycles_per_row_and_pixel
        alone = costs.cycles_before_a_unit + products + rows * costs.cycles_after_a_row
        units, resident = cut.units * groups, costs.blocks_per_multiprocessor * sm_count
        return max(blocks(units, sm_count) * products, blocks(units, resident) * alone)

    cuts = [
        Tiling(pixels, stripe_rows, N * blocks(PP, stripe_rows) * column_tiles(PQ, pixels))
        for pixels in PIXELS
        for stripe_rows in sorted({blocks(PP, stripes) for stripes in range(1, PP + 1)}, reverse=True)
    ]
    return min(cuts, key=cycles)


def launch_stem_wgmma(
    x: "cupy.ndarray",
    filter: Filter,
    bias: "cupy.ndarray",
    mean: "cupy.ndarray | None",
    std: "cupy.ndarray | None",
    y: "cupy.ndarray",
    precision: Precision,
) -> None:
    """Enqueues the kernel on the current stream of the current device.

    Args:
        x: (N, H, W, C) pixels of any strides; uint8, float32, float16, or bfloat16 as uint16 or int16.
        filter: (K, 7, 7, C) in the precision's storage dtype.
        bias: (K,) float32.
        mean, std: (C,) float32, or None.
        y: (N, PP, PQ, K) as `pooled_shape` says, C-contiguous, in the storage dtype, not empty.
        precision: the network's, one of `PRECISION_NAMES`.
    """
    K = y.shape[3]
    sm_count = multiprocessors_of(x.device.id)
    cut = tiling(y.shape, sm_count)
    C = x.shape[3]
    kernel = jit.get_function(SOURCE, defines=_cached_defines(precision.name, str(x.dtype), C, cut.pixels))
    params = stem_params(x.shape, tuple(stride // x.itemsize for stride in x.strides), K)
    vectors = (NULL, NULL) if mean is None else (mean, std)
    arguments = (x, cell_filter(filter), bias, *vectors, y, params, np.int32(cut.stripe_rows))
    grid = launch_grid(cut, K, sm_count)
    shared = shared_memory(cut.pixels, INPUTS[str(x.dtype)], C)
    jit.launch(kernel, grid, (THREADS,), arguments, shared=shared, waits=True)


@lru_cache(maxsize=256)
def _cached_defines(precision: str, dtype: str, channels: int, pixels: int) -> dict[str, int | str]:
    return _defines(precision, INPUTS[dtype], channels, pixels)


def launch_grid(cut: Tiling, K: int, sm_count: int, costs: Costs = COSTS) -> tuple[int, int]:
    """Returns the blocks that are launched: one per unit, but no more than are resident at once, to take turns."""
    groups = K // FILTERS
    return min(cut.units, blocks(sm_count * costs.blocks_per_multiprocessor, groups)), groups


def cell_filter(filter: Filter) -> "cupy.ndarray":
    """Returns the filter as (K, 7, 8, 4), its eighth column and the channels after C zeros; made once per filter."""

    def make(weight: "cupy.ndarray") -> "cupy.ndarray":
        import cupy

        K, R, S, C = weight.shape
        cells = cupy.zeros((K, R, 8, 4), weight.dtype)
        cells[:, :, :S, :C] = weight
        return cells

    return filter.derived(SOURCE, make)


def shared_memory(pixels: int, element: str, channels: int) -> int:
    """Bytes of dynamic shared memory, by the constants of the kernel's source.

    Args:
        pixels: columns of the convolution in a tile.
        element: the pixels' C++ type.
        channels: of the image.
    """
    row = (2 * pixels + 2) * 16
    pooled_row = pixels // 2 * (FILTERS * 2 + 16)
    return _PAIRS * 2 * row + 2 * pooled_row + _STAGES * stage_bytes(pixels, element, channels)


def stage_bytes(pixels: int, element: str, channels: int) -> int:
    """Bytes of a pair of input rows as they lie in x, by the arguments of `shared_memory`."""
    return 2 * channels * (blocks((2 * pixels + 6) * _INPUT_BYTES[element], 16) * 16 + 16)
