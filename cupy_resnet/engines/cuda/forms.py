"""The forms in which the engine's own kernels are compiled: per element type, input type and width of access.

The engine launches only forms that these functions return, and `SPECIALISATIONS` lists all that they can return.
Imports no CuPy.
"""

from functools import cache
from typing import Any

from ...conv2d.precision import PRECISIONS
from ...conv2d.stem import INPUTS

Form = dict[str, int | str]
"""``#define``s."""

ELEMENT_SIZES = {precision.element: precision.element_size for precision in PRECISIONS.values()}
"""C++ type of activations → bytes."""

CHUNK = 16
"""Bytes that a thread moves at once, at best."""

POINTWISE = ("relu", "add", "add_relu", "nhwc_to_nchw")
CHANNELWISE = ("batch_norm2d", "max_pool2d", "avg_pool2d", "global_avg_pool2d")
PIXELS = ("normalize", "nchw_to_nhwc")


@cache
def pointwise(element: str) -> Form:
    """The form of a kernel of `POINTWISE` for activations of a C++ type."""
    return {"ELEMENT": element}


@cache
def channelwise(element: str, channels: int) -> Form:
    """The form of a kernel of `CHANNELWISE`: 16 bytes at once where the channels allow it, else one element."""
    vector = CHUNK // ELEMENT_SIZES[element]
    return {"ELEMENT": element, "VECTOR": 1 if channels % vector else vector}


@cache
def pixels(element: str, dtype: Any) -> Form:
    """The form of a kernel of `PIXELS` that reads a NumPy dtype."""
    return {"ELEMENT": element, "INPUT": INPUTS[str(dtype)]}


@cache
def pad_channels(element: str, *channels: int) -> tuple[Form, int]:
    """The form of pad_channels, which moves units of 16 bytes or of one element, and the elements of a unit."""
    size = ELEMENT_SIZES[element]
    vector = CHUNK // size
    if any(count % vector for count in channels):
        return {"UNIT": {4: "float", 2: "Half"}[size]}, 1
    return {"UNIT": "Chunk"}, vector


@cache
def linear(N: int, C: int) -> Form:
    """The form of linear for N images of C features."""
    return {"ROWS": 1 if N == 1 else 8, "VECTOR": 1 if C % 4 else 4}


SPECIALISATIONS: dict[str, tuple[Form, ...]] = {
    **dict.fromkeys(POINTWISE, tuple(pointwise(element) for element in ELEMENT_SIZES)),
    **dict.fromkeys(CHANNELWISE, tuple(channelwise(element, C) for element in ELEMENT_SIZES for C in (8, 1))),
    **dict.fromkeys(
        PIXELS, tuple(pixels(element, dtype) for element in ELEMENT_SIZES for dtype in INPUTS if dtype != "int16")
    ),
    "pad_channels": ({"UNIT": "float"}, {"UNIT": "Half"}, {"UNIT": "Chunk"}),
    "linear": tuple(linear(N, C) for N in (1, 8) for C in (4, 1)),
}
"""Kernel file → every form in which the engine launches it, where there is more than one; the default's first."""
