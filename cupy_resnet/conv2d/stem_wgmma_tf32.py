"""The launch of conv2d_stem_wgmma_tf32, the stem on Hopper's warpgroup instructions in TF32 and fp32-tc."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit
from .device import Device
from .precision import PRECISIONS, Precision
from .stem import INPUTS, multiprocessors_of, stem_params
from .stem_wgmma import FILTERS, PIXELS, Costs, launch_grid, stage_bytes, supports_stem_on_hopper, tiling
from .tf32_parts import split_tf32
from .variant import NULL, Filter, Support

if TYPE_CHECKING:
    import cupy

SOURCE = "conv2d_stem_wgmma_tf32"
CONSUMERS, WARPGROUP = 2, 128
THREADS = (2 + CONSUMERS) * WARPGROUP
PRECISION_NAMES = ("tf32", "fp32-tc")

COSTS = {
    products: Costs(
        blocks_per_multiprocessor=1,  # shared memory holds the filters
        cycles_per_row_and_pixel=10.5 * products,  # 21 instructions for 3 channels, which take 32 cycles for 64 outputs
        cycles_after_a_row=100,  # one consumer stores its sums while the other multiplies
        cycles_before_a_unit=100,
    )
    for products in (1, 3)
}
"""TF32 products per product → costs."""

TAP_COLUMNS = (0, 2, 4, 6, 1, 3, 5)
"""Columns of the filter in the order of the depth: those that meet odd columns of the image, then the others."""

_PAIRS = 8  # of input rows in shared memory
_GROUP = 16  # outputs that a warp computes at a time


def configurations() -> list[dict[str, int | str]]:
    """Returns every set of ``#define``s that the kernel is compiled with, the commonest first."""
    return [
        _defines(precision, element, channels, pixels)
        for precision in PRECISION_NAMES
        for element in dict.fromkeys(("float", *INPUTS.values()))
        for channels in (3, 1, 2, 4)
        for pixels in reversed(PIXELS)
    ]


def _defines(precision: str, element: str, channels: int, pixels: int) -> dict[str, int | str]:
    return {"PRODUCTS": PRECISIONS[precision].products, "INPUT": element, "CHANNELS": channels, "PIXELS": pixels}


def supports_stem_wgmma_tf32(
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


def launch_stem_wgmma_tf32(
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
        filter: (K, 7, 7, C) float32.
        bias: (K,) float32.
        mean, std: (C,) float32, or None.
        y: (N, PP, PQ, K) as `pooled_shape` says, C-contiguous, float32, not empty.
        precision: the network's, one of `PRECISION_NAMES`.
    """
    K, C, products = y.shape[3], x.shape[3], precision.products
    sm_count = multiprocessors_of(x.device.id)
    cut = tiling(y.shape, sm_count, COSTS[products])
    kernel = jit.get_function(SOURCE, defines=_cached_defines(precision.name, str(x.dtype), C, cut.pixels))
    params = stem_params(x.shape, tuple(stride // x.itemsize for stride in x.strides), K)
    vectors = (NULL, NULL) if mean is None else (mean, std)
    arguments = (x, step_filter(filter, products), bias, *vectors, y, params, np.int32(cut.stripe_rows))
    shared = shared_memory(products, cut.pixels, INPUTS[str(x.dtype)], C)
    grid = launch_grid(cut, K, sm_count, COSTS[products])
    jit.launch(kernel, grid, (THREADS,), arguments, shared=shared, waits=True)


@lru_cache(maxsize=256)
def _cached_defines(precision: str, dtype: str, channels: int, pixels: int) -> dict[str, int | str]:
    return _defines(precision, INPUTS[dtype], channels, pixels)


def step_filter(filter: Filter, products: int) -> "cupy.ndarray":
    """Returns the filter as `in_steps` lays it out; made once per filter and number of products."""

    def make(weight: "cupy.ndarray") -> "cupy.ndarray":
        import cupy

        return in_steps(weight, products, cupy)

    return filter.derived((SOURCE, products), make)


def in_steps(weight: "cupy.ndarray", products: int, xp: Any) -> "cupy.ndarray":
    """Returns a (K, 7, 7, C) filter as tensor cores read it, (K / 64, 7 · C, parts, 2, 64, 4), C-contiguous.

    A step of the depth is a column of the filter in one channel: for each of 64 filters rows 0 to 3, and then for each
    of them rows 4 to 6 and a zero.

    Args:
        weight: float32 array of the module `xp`.
        products: 1: the one part is the nearest TF32; 3: that is the first part, and `split_tf32` makes two.
        xp: CuPy or NumPy.
    """
    K, R, S, C = weight.shape
    rows = xp.zeros((K, 8, S, C), weight.dtype)
    rows[:, :R] = weight
    by_step = rows[:, :, list(TAP_COLUMNS)].reshape(K // FILTERS, FILTERS, 2, 4, S, C).transpose(0, 5, 4, 2, 1, 3)
    steps = xp.ascontiguousarray(by_step.reshape(K // FILTERS, C * S, 2, FILTERS, 4))
    high, low = split_tf32(steps)
    if products == 3:
        return xp.stack((high, low), axis=2)
    return xp.where(xp.isnan(steps), steps.dtype.type(np.nan), high)[:, :, None]


def shared_memory(products: int, pixels: int, element: str, channels: int) -> int:
    """Bytes of dynamic shared memory, by the constants of the kernel's source.

    Args:
        products: TF32 products per product, 1 or 3.
        pixels: columns of the convolution in a tile.
        element: the pixels' C++ type.
        channels: of the image.
    """
    words = (channels * (2 * pixels + 6) + 23) // 32 * 32 + 8  # of a row of input
    parts = 2 if products == 3 else 1
    filters = channels * 7 * parts * FILTERS * 32
    crowded = products * channels > 9
    rows, stages = (2, 2) if crowded else (3, 4)
    pooled_row = (pixels // 2 + pixels // _GROUP) * FILTERS * 4
    return _PAIRS * 2 * words * 4 + filters + rows * pooled_row + stages * stage_bytes(pixels, element, channels)
