"""fp32 operands in two parts that tensor cores multiply as TF32, for the kernels that find them split."""

from typing import Any

import numpy as np

TRUNCATION = float.fromhex("0x1.4p-25")
"""What tensor cores lose of a sum on average: `make_up_for_truncation` in kernels_cu/include/tensor_core.cuh."""


def split_tf32(values: Any) -> tuple[Any, Any]:
    """Splits fp32 operands in two that tensor cores multiply, as the function of this name in tensor_core.cuh does.

    Args:
        values: a float32 array of NumPy or CuPy, C-contiguous.

    Returns:
        The nearest TF32, and what that leaves with what `make_up_for_truncation` adds to it: float32 arrays. Where the
        first is not finite, the second is NaN, as for the kernels that split on the GPU.
    """
    high = ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    with np.errstate(invalid="ignore"):
        exact = high.astype(np.float64)  # as are differences and sums of these: low is rounded once, as by fmaf
        low = (values.astype(np.float64) - exact + exact * TRUNCATION).astype(np.float32)
    return high, low
