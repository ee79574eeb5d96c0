"""Tensor maps: how Hopper's tensor memory accelerator is told what a tensor looks like and which boxes are wanted.

The driver encodes them (CUDA driver API, "Tensor Map Object Management"); CuPy has no call for it, so it is called
through ctypes. A map holds the tensor's address: it is good for one array.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EngineUnavailableError
from .problem import Conv2dProblem

if TYPE_CHECKING:
    import cupy

BYTES = 128
NONE = np.zeros(1, f"V{BYTES}")
"""In the place of a map that the kernel will not use."""

_DATA_TYPES = {"fp16": 6, "fp32-tc": 7, "bf16": 9, "tf32": 11}
"""By precision; elements of type 11 are rounded to TF32 on their way, those of type 7 are not."""

_FLOAT32 = 7

_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_256B, _FILL_ZEROS = 0, 3, 3, 0
_ROW_BYTES = 128
"""Of a box, innermost: what the swizzle takes."""

MAX_STRIDE = 8
MAX_OFFSET = 127
"""The encoding's limits for a convolution's stride and for how far its window reaches out of, or into, the image."""


def im2col_map(problem: Conv2dProblem, x: "cupy.ndarray", pixels: int) -> np.ndarray:
    """Returns the map of an NHWC input from which columns of output pixels are fetched, tap by tap.

    Args:
        problem: the convolution, of one group, within the limits above.
        x: (N, H, W, C), C-contiguous.
        pixels: of the output, per box; a box has 128 bytes of channels.

    Raises:
        EngineUnavailableError: the driver is too old to know tensor maps, or refuses.
    """
    size = x.dtype.itemsize
    N, H, W, C = x.shape
    reach_h, reach_w = (problem.R - 1) * problem.dilation_h, (problem.S - 1) * problem.dilation_w
    return _encode(
        "cuTensorMapEncodeIm2col",
        problem,
        x,
        (C, W, H, N),
        (C * size, W * C * size, H * W * C * size),
        _ints(ctypes.c_int, -problem.pad_w, -problem.pad_h),
        _ints(ctypes.c_int, problem.pad_w - reach_w, problem.pad_h - reach_h),
        ctypes.c_uint32(_ROW_BYTES // size),
        ctypes.c_uint32(pixels),
        _ints(ctypes.c_uint32, 1, problem.stride_w, problem.stride_h, 1),
    )


def tensor_map(problem: Conv2dProblem, array: "cupy.ndarray", box: tuple[int, int, int]) -> np.ndarray:
    """Returns the map of an (N, H, W, C) array in boxes of 128 bytes of channels.

    Args:
        problem: the convolution.
        array: C-contiguous.
        box: its width, height and images.

    Raises:
        EngineUnavailableError: as above.
    """
    size = array.dtype.itemsize
    N, H, W, C = array.shape
    return _encode(
        "cuTensorMapEncodeTiled",
        problem,
        array,
        (C, W, H, N),
        (C * size, W * C * size, H * W * C * size),
        _ints(ctypes.c_uint32, _ROW_BYTES // size, *box),
        _ints(ctypes.c_uint32, 1, 1, 1, 1),
    )


def matrix_map(
    problem: Conv2dProblem, array: "cupy.ndarray", columns: int, rows: int, *, factor: bool = True
) -> np.ndarray:
    """Returns the map of a C-contiguous array, seen as a matrix of `columns` columns, in boxes of 128 bytes × `rows`.

    Args:
        problem: the convolution.
        array: C-contiguous.
        columns: of the matrix.
        rows: of a box.
        factor: whether it will be multiplied, and is rounded to TF32 in that precision; residuals and outputs are not.

    Raises:
        EngineUnavailableError: as above.
    """
    size = array.dtype.itemsize
    return _encode(
        "cuTensorMapEncodeTiled",
        problem,
        array,
        (columns, array.size // columns),
        (columns * size,),
        _ints(ctypes.c_uint32, _ROW_BYTES // size, rows),
        _ints(ctypes.c_uint32, 1, 1),
        rounded=factor,
    )


def _encode(
    function: str,
    problem: Conv2dProblem,
    array: "cupy.ndarray",
    sizes: Sequence[int],
    strides: Sequence[int],
    *boxes: Any,
    rounded: bool = True,
) -> np.ndarray:
    encoded = np.zeros(2 * BYTES, np.uint8)
    aligned = encoded[-encoded.ctypes.data % 64 :][:BYTES]
    status = getattr(_driver(), function)(
        ctypes.c_void_p(aligned.ctypes.data),
        ctypes.c_int(_DATA_TYPES[problem.precision] if rounded or array.dtype != np.float32 else _FLOAT32),
        ctypes.c_uint32(len(sizes)),
        ctypes.c_void_p(array.data.ptr),
        _ints(ctypes.c_uint64, *sizes),
        _ints(ctypes.c_uint64, *strides),
        *boxes,
        *(ctypes.c_int(value) for value in (_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_256B, _FILL_ZEROS)),
    )
    if status:
        raise EngineUnavailableError(f"the driver refuses a tensor map for {problem}: {function} gives error {status}")
    return aligned.view(NONE.dtype)


def _ints(kind: Any, *values: int) -> Any:
    return (kind * len(values))(*values)


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        _ = driver.cuTensorMapEncodeIm2col
    except (OSError, AttributeError) as error:
        raise EngineUnavailableError(f"tensor maps need a CUDA driver of version 12 or newer: {error}") from error
    return driver
