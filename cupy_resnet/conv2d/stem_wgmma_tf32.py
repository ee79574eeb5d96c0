"""The launch of conv2d_stem_wgmma_tf32, the stem on Hopper's warpgroup instructions in TF32."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit
from .device import Device
from .precision import Precision
from .stem import INPUTS, multiprocessors_of, stem_params
from .stem_wgmma import FILTERS, PIXELS, Costs, launch_grid, stage_bytes, supports_stem_on_hopper, tiling
from .variant import NULL, Filter, Support

if TYPE_CHECKING:
    import cupy

SOURCE = "conv2d_stem_wgmma_tf32"
CONSUMERS, WARPGROUP = 2, 128
THREADS = (1 + CONSUMERS) * WARPGROUP
PRECISION_NAMES = ("tf32",)

COSTS = Costs(
    blocks_per_multiprocessor=1,  # registers hold the filters
    cycles_per_row_and_pixel=12.5,  # 25 instructions, each of which takes half a cycle per column
    cycles_after_a_row=100,  # one consumer rounds sums while the other multiplies
    cycles_before_a_unit=100,
)

_PAIRS = 8  # of input rows in shared memory
_STAGES = 4  # pairs of them on their way there
_CHANNELS = 4  # of a pixel where it is multiplied

Tap = tuple[int, int]


def _taps() -> tuple[Tap | None, ...]:
    """(row, column) of the filter, in the order of the depth; None: zeros."""
    taps: list[Tap | None] = []
    for r in (0, 2, 4, 6):
        rows = (r, r + 1) if r < 6 else (r,)
        taps += [(row, s) for row in rows for s in (0, 2, 4, 6, 1, 3)]
        taps += [(row, 5) for row in rows]
    return (*taps, None)


TAPS = _taps()
"""An instruction multiplies two of them, each 4 channels deep."""

STEPS = len(TAPS) // 2


def configurations() -> list[dict[str, int | str]]:
    """Returns every set of ``#define``s that the kernel is compiled with, the commonest first."""
    return [
        _defines(element, channels, pixels)
        for element in dict.fromkeys(("float", *INPUTS.values()))
        for channels in (3, 1, 2, 4)
        for pixels in reversed(PIXELS)
    ]


def _defines(element: str, channels: int, pixels: int) -> dict[str, int | str]:
    columns = pixels // CONSUMERS
    return {"INPUT": element, "CHANNELS": channels, "COLUMNS": columns, "ACCUMULATORS": columns // 2}


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
        precision: TF32.
    """
    K, C = y.shape[3], x.shape[3]
    sm_count = multiprocessors_of(x.device.id)
    cut = tiling(y.shape, sm_count, COSTS)
    kernel = jit.get_function(SOURCE, defines=_cached_defines(str(x.dtype), C, cut.pixels))
    params = stem_params(x.shape, tuple(stride // x.itemsize for stride in x.strides), K)
    vectors = (NULL, NULL) if mean is None else (mean, std)
    arguments = (x, step_filter(filter), bias, *vectors, y, params, np.int32(cut.stripe_rows))
    shared = shared_memory(cut.pixels, INPUTS[str(x.dtype)], C)
    jit.launch(kernel, launch_grid(cut, K, sm_count, COSTS), (THREADS,), arguments, shared=shared, waits=True)


@lru_cache(maxsize=256)
def _cached_defines(dtype: str, channels: int, pixels: int) -> dict[str, int | str]:
    return _defines(INPUTS[dtype], channels, pixels)


def step_filter(filter: Filter) -> "cupy.ndarray":
    """Returns the filter as `in_steps` lays it out; made once per filter."""
    key = SOURCE
    if key not in filter.packed:
        import cupy

        steps = cupy.ascontiguousarray(in_steps(filter.weight, cupy))
        # Published only when it is there: another thread may use it on a stream that is not ordered after this one.
        cupy.cuda.get_current_stream().synchronize()
        filter.packed[key] = steps
    return filter.packed[key]


def in_steps(weight: "cupy.ndarray", xp: Any) -> "cupy.ndarray":
    """Returns a (K, 7, 7, C) filter as (K / 64, STEPS, 128, 4): what each thread of a consumer holds of a step.

    A warp's part of the operand is 16 filters. With g = lane / 4 and t = lane % 4, a thread has channel t of filters
    2g and 2g + 1, first of one of the step's two taps, then of the other.

    Args:
        weight: array of the module `xp`.
        xp: CuPy or NumPy.
    """
    K, _, _, C = weight.shape
    depth = xp.zeros((K, len(TAPS), _CHANNELS), weight.dtype)
    for number, tap in enumerate(TAPS):
        if tap is not None:
            depth[:, number, :C] = weight[:, tap[0], tap[1]]
    groups, warps = K // FILTERS, WARPGROUP // 32
    parts = depth.reshape(groups, warps, 8, 2, STEPS, 2, _CHANNELS)  # group, warp, g, filter, step, tap, t
    return parts.transpose(0, 4, 1, 2, 6, 5, 3).reshape(groups, STEPS, WARPGROUP, 4)


def shared_memory(pixels: int, element: str, channels: int) -> int:
    """Bytes of dynamic shared memory, by the constants of the kernel's source.

    Args:
        pixels: columns of the convolution in a tile.
        element: the pixels' C++ type.
        channels: of the image.
    """
    row = (2 * pixels + 5) * 16
    zeros = pixels // CONSUMERS * 16
    return _PAIRS * 2 * row + zeros + _STAGES * stage_bytes(pixels, element, channels)
