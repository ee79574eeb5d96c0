"""bfloat16, which NumPy lacks, as its 16 bits in a uint16: the upper half of a float32."""

import numpy as np


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds float32 or float64 values once, to nearest even; NaN stays NaN, overflow gives Inf.

    Returns:
        uint16 of the same shape, C-contiguous.
    """
    values = np.ascontiguousarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        bits = single.view(np.uint32)
        if values.dtype == np.float64:
            # Rounding to float32 and that again goes wrong where the first step ends on a tie of the second. So the
            # first rounds to odd: towards zero, with the last bit set if anything was cut off.
            bits = bits - (np.abs(single) > np.abs(values))
            bits |= single != values
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Returns the values of bfloat16 bits (uint16 or int16) as float32 of the same shape, C-contiguous; exact."""
    bits = np.ascontiguousarray(bits).view(np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
