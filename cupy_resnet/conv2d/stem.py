"""The launch of conv2d_stem: a whole ImageNet stem, from pixels to the pooled map, in one kernel."""

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .. import jit
from .device import Device
from .precision import PRECISIONS, Precision
from .variant import NULL, Filter, Support, blocks

if TYPE_CHECKING:
    import cupy

SOURCE = "conv2d_stem"
THREADS = 256
TILE_FILTERS = 64
POOLED_ROWS, POOLED_COLUMNS = 7, 8
OUTPUTS, OUTPUT_BYTES = 256, 144
"""Pixels of the convolution that have room in shared memory, and how much, with padding."""

BLOCKS_PER_MULTIPROCESSOR = {1: 2, 3: 1}
"""TF32 products per product → blocks whose registers fit at once, ``MIN_BLOCKS`` in the kernel."""

INPUTS = {"uint8": "unsigned char", "float32": "float", "float16": "Half", "uint16": "BFloat16", "int16": "BFloat16"}
"""dtype of the pixels → C++ type in the kernel."""

PARAMS_DTYPE = np.dtype(
    [(name, np.int32) for name in ("N", "H", "W", "K", "P", "Q", "PP", "PQ")]
    + [(name, np.int64) for name in ("stride_n", "stride_h", "stride_w", "stride_c")]
)
"""Mirror of ``StemParams`` in kernels_cu/include/stem_params.cuh."""


def configurations() -> list[dict[str, int | str]]:
    """Returns every set of ``#define``s that the kernel is compiled with."""
    return [
        _defines(precision, element, channels)
        for precision in PRECISIONS.values()
        if precision.tensor_cores
        for element in dict.fromkeys(INPUTS.values())
        for channels in (1, 2, 3, 4)
    ]


def _defines(precision: Precision, element: str, channels: int) -> dict[str, int | str]:
    return {**precision.defines(), "INPUT": element, "CHANNELS": channels}


def supports_stem(
    precision: Precision, x_shape: tuple[int, ...], filter_shape: tuple[int, ...], device: Device
) -> Support:
    """Whether the kernel computes this stem on `device`, and if not, why.

    Args:
        precision: the network's.
        x_shape: (N, H, W, C).
        filter_shape: (K, R, S, C).
        device: the GPU.
    """
    K, R, S, C = filter_shape
    if not precision.tensor_cores:
        return False, f"computes on tensor cores, not in {precision.name}"
    if device.compute_capability < (8, 0):
        return False, f"needs compute capability 8.0, {device.name} has {device.number}"
    if (R, S) != (7, 7):
        return False, f"convolves with 7×7 filters, not {R}×{S}"
    if C > 4 or x_shape[3] != C:
        return False, f"takes 1 to 4 channels, not {C}"
    if K % TILE_FILTERS:
        return False, f"needs a multiple of {TILE_FILTERS} filters, not {K}"
    if _shared_memory(precision, C) > device.shared_memory_per_block:
        return False, f"needs {_shared_memory(precision, C)} bytes of shared memory per block"
    if _tiles(pooled_shape(x_shape, K)) > 2**31 - 1:
        return False, "has more tiles than an int counts"
    return True, ""


def pooled_shape(x_shape: tuple[int, ...], K: int) -> tuple[int, int, int, int]:
    """Returns the output's shape (N, PP, PQ, K) for an input (N, H, W, C)."""
    N, H, W, _ = x_shape
    P, Q = (H - 1) // 2 + 1, (W - 1) // 2 + 1
    return N, (P - 1) // 2 + 1, (Q - 1) // 2 + 1, K


def launch_stem(
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
        precision: the network's.
    """
    _, _, _, C = x.shape
    kernel = jit.get_function(SOURCE, defines=_cached_defines(precision.name, str(x.dtype), C))
    params = stem_params(x.shape, tuple(stride // x.itemsize for stride in x.strides), y.shape[3])
    grid = launch_grid(y.shape, precision, multiprocessors_of(x.device.id))
    vectors = (NULL, NULL) if mean is None else (mean, std)
    arguments = (x, padded_filter(filter), bias, *vectors, y, params)
    jit.launch(kernel, grid, (THREADS,), arguments, shared=_shared_memory(precision, C))


@lru_cache(maxsize=256)
def _cached_defines(precision: str, dtype: str, channels: int) -> dict[str, int | str]:
    return _defines(PRECISIONS[precision], INPUTS[dtype], channels)


@lru_cache(maxsize=256)
def stem_params(x_shape: tuple[int, int, int, int], strides: tuple[int, ...], K: int) -> np.ndarray:
    """Returns ``StemParams`` for an input (N, H, W, C), its strides in elements, and K filters."""
    N, H, W, _ = x_shape
    _, PP, PQ, _ = pooled_shape(x_shape, K)
    params = np.zeros(1, PARAMS_DTYPE)
    params[0] = (N, H, W, K, (H - 1) // 2 + 1, (W - 1) // 2 + 1, PP, PQ, *strides)
    params.flags.writeable = False
    return params


@cache
def multiprocessors_of(device_id: int) -> int:
    """Returns how many multiprocessors a GPU has."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceProperties(device_id)["multiProcessorCount"])


def launch_grid(y_shape: tuple[int, ...], precision: Precision, sm_count: int) -> tuple[int, int]:
    """Returns the blocks that are launched: one per tile, but no more than are resident at once, to take turns.

    Args:
        y_shape: (N, PP, PQ, K), as `pooled_shape` says.
        precision: the network's.
        sm_count: the GPU's multiprocessors.
    """
    groups = y_shape[3] // TILE_FILTERS
    resident = sm_count * BLOCKS_PER_MULTIPROCESSOR[precision.products]
    return min(_tiles(y_shape), blocks(resident, groups)), groups


def _tiles(y_shape: tuple[int, ...]) -> int:
    return y_shape[0] * blocks(y_shape[1], POOLED_ROWS) * blocks(y_shape[2], POOLED_COLUMNS)


def padded_filter(filter: Filter) -> "cupy.ndarray":
    """Returns the filter as (K, 7, 8 · units): each row's 7 · C values, then zeros; made once per filter."""

    def make(weight: "cupy.ndarray") -> "cupy.ndarray":
        import cupy

        K, R, S, C = weight.shape
        padded = cupy.zeros((K, R, 8 * _units(C)), weight.dtype)
        padded[:, :, : S * C] = weight.reshape(K, R, S * C)
        return padded

    return filter.derived(SOURCE, make)


def _units(channels: int) -> int:
    return blocks(7 * channels, 8)


def _shared_memory(precision: Precision, channels: int) -> int:
    """Bytes of dynamic shared memory, by the constants of the kernel's source."""
    size, units = precision.element_size, _units(channels)
    rows, columns = 2 * POOLED_ROWS + 1, 2 * POOLED_COLUMNS + 1
    pitch = (2 * (columns - 1) * channels + 8 * units + 1) // 2 * 2
    rows_at_once = THREADS // (pitch // 2)
    patch = blocks(blocks(2 * (rows - 1) + 7, rows_at_once) * rows_at_once * pitch * size, 16) * 16
    steps = blocks(7 * units, 4 // size)
    filter = TILE_FILTERS * (2 * steps | 1) * 16
    outputs = OUTPUTS * OUTPUT_BYTES
    vectors = (TILE_FILTERS + 2 * channels) * 4
    if size * channels == 16:  # the outputs take the place of the patch
        patch = 0
    return patch + filter + outputs + vectors
