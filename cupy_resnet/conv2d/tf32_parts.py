"""fp32 operands as tensor cores multiply them, as TF32: the nearest, or two parts for kernels that find them split."""

from typing import Any

import numpy as np

MULTIPLIED = np.uint32(0xFFFFE000)
"""The bits of an fp32 operand that tensor cores look at when they multiply TF32."""

TRUNCATION = float.fromhex("0x1.4p-25")
"""What tensor cores lose of a sum on average: `make_up_for_truncation` in kernels_cu/include/tensor_core.cuh."""


def nearest_tf32(values: Any) -> Any:
    """Rounds fp32 operands to TF32, whose mantissa has 10 bits; ties to even, as tensor memory accelerators round them.

    Args:
        values: a float32 array of NumPy or CuPy, C-contiguous.

    Returns:
        A float32 array whose lowest 13 bits are 0, but for those of a NaN. What is too large becomes infinite.
    """
    bits = values.view(np.uint32)
    last = bits >> np.uint32(13) & np.uint32(1)
    rounded = ((bits + np.uint32(0xFFF) + last) & MULTIPLIED).view(np.float32)
    nan = values != values
    rounded[nan] = values[nan]
    return rounded


def split_tf32(values: Any) -> tuple[Any, Any]:
    """Splits fp32 operands in two that tensor cores multiply, as the function of this name in tensor_core.cuh does.

    Args:
        values: a float32 array of NumPy or CuPy, C-contiguous.

    Returns:
        The nearest TF32, and what that leaves with what `make_up_for_truncation` adds to it: float32 arrays. Where the
        first is not finite, the second is NaN, as for the kernels that split on the GPU.
    """
    high = ((values.view(np.uint32) + np.uint32(0x1000)) & MULTIPLIED).view(np.float32)
    with np.errstate(invalid="ignore"):
        exact = high.astype(np.float64)  # as are differences and sums of these: low is rounded once, as by fmaf
        low = (values.astype(np.float64) - exact + exact * TRUNCATION).astype(np.float32)
    return high, low
