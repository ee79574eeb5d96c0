"""Arrays and tensors a person holds: told apart by shape, brought to uint8.

A single image is HW, HWC or CHW, a batch NHWC or NCHW, with C = 1 (grey), 3 (RGB) or 4 (RGB and alpha). The axis of
length 1, 3 or 4 says which: the last one means channels last, the first one of the image channels first. If both fit
(an image one, three or four pixels wide), the shape is refused rather than guessed. Values by dtype:

| dtype | full range |
| --- | --- |
| uint8 | 0–255 |
| uint16 | 0–65535 |
| bool | False, True |
| float16, float32, float64 | 0–1; anything outside and NaN are errors |
| other integers | 0–255; anything outside is an error |
"""

from typing import Any

import numpy as np
from PIL import Image

from .colors import OVERSHOOT, scale_to_uint8
from .errors import RefusedError

_CHANNELS = (1, 3, 4)
_ACCEPTED = "accepted are (H, W), (H, W, C), (C, H, W), (N, H, W, C) and (N, C, H, W) with C = 1, 3 or 4"


def is_array(value: Any) -> bool:
    """Returns whether `value` is an array or tensor of any library; none is imported to find out."""
    return isinstance(value, np.ndarray) or _is_torch(value) or _is_cupy(value) or hasattr(value, "__array__")


def to_numpy(value: Any) -> np.ndarray:
    """Returns an array or tensor, on whatever device, as a NumPy array: a view where the memory can be shared.

    Raises:
        RefusedError: the library that owns it cannot hand it over.
    """
    try:
        if _is_torch(value):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # unknown to NumPy; float32 holds every one of its values
                value = value.float()
            return value.numpy()
        return value.get() if _is_cupy(value) else np.asarray(value)
    except Exception as error:  # whatever a foreign library raises
        raise RefusedError(f"the {type(value).__name__} cannot be read as an array: {error}") from error


def split(array: np.ndarray) -> list[np.ndarray]:
    """Returns the images of an array as views, (H, W) or (H, W, C); a batch of none gives none.

    Raises:
        RefusedError: the shape is none of those accepted, is ambiguous, or an image has no pixels.
    """
    shape = array.shape
    if array.ndim == 1 and array.dtype == np.uint8:
        raise RefusedError(f"an array of shape {shape} is not an image; to decode a file's bytes pass array.tobytes()")
    if array.ndim not in (2, 3, 4):
        raise RefusedError(f"an array of shape {shape} is not an image: {_ACCEPTED}")
    if array.ndim == 2:
        images = [array]
    else:
        last, first = shape[-1] in _CHANNELS, shape[-3] in _CHANNELS
        if first and last:
            raise RefusedError(
                f"an array of shape {shape} may have its channels first or last; pass PIL.Image.fromarray(…) instead"
            )
        if not (first or last):
            grey = "; grey images in a batch need a channel axis, array[..., None]" if array.ndim == 3 else ""
            raise RefusedError(f"an array of shape {shape} is not an image: {_ACCEPTED}{grey}")
        if first:
            array = np.moveaxis(array, -3, -1)
        images = [array] if array.ndim == 3 else list(array)
    if images and 0 in images[0].shape:
        raise RefusedError(f"an array of shape {shape} has no pixels")
    return images


def to_image(pixels: np.ndarray, channel_order: str) -> Image.Image:
    """Returns one image of `split` as a Pillow image in mode L, RGB or RGBA; any strides and byte order will do.

    Args:
        pixels: (H, W) or (H, W, C).
        channel_order: ``"rgb"``, or ``"bgr"`` if blue comes first; alpha is last in both.

    Raises:
        RefusedError: the dtype is not one of pixels, or a value lies outside the dtype's range.
    """
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    elif pixels.ndim == 3 and channel_order == "bgr":
        pixels = pixels[:, :, [2, 1, 0, 3][: pixels.shape[2]]]
    return Image.fromarray(np.ascontiguousarray(_to_uint8(pixels)))


def _to_uint8(pixels: np.ndarray) -> np.ndarray:
    kind, what = pixels.dtype.kind, f"{pixels.dtype} pixels"
    if pixels.dtype == np.uint8:
        return pixels
    if kind == "b":
        return pixels.astype(np.uint8) * np.uint8(255)
    if kind == "u" and pixels.dtype.itemsize == 2:
        return scale_to_uint8(pixels, 65535)
    if kind not in "iuf":
        raise RefusedError(f"{what} are not understood; pass uint8, uint16, bool or floats in 0–1")
    low, high = pixels.min(), pixels.max()
    if kind in "iu":
        if low < 0 or high > 255:
            raise RefusedError(f"{what} must lie in 0–255, found {low} to {high}; for 0–65535 pass uint16")
        return pixels.astype(np.uint8)
    if np.isnan(low):
        place = tuple(int(i) for i in np.argwhere(np.isnan(pixels))[0])
        raise RefusedError(f"{what} contain NaN, the first at {place} of shape {pixels.shape}")
    if low < 0 or high > 1:
        if low >= -OVERSHOOT and high <= 1 + OVERSHOOT:
            advice = "clip what a resize or rounding pushed beyond, numpy.clip(array, 0, 1)"
        elif low >= 0 and high <= 255:
            advice = "divide by 255, or pass uint8"
        else:
            advice = "pass pixels as they are before normalisation"
        raise RefusedError(f"{what} must lie in 0–1, found {low:g} to {high:g}; {advice}")
    return np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)


def _is_torch(value: Any) -> bool:
    return any(kind.__name__ == "Tensor" and kind.__module__ == "torch" for kind in type(value).__mro__)


def _is_cupy(value: Any) -> bool:
    return hasattr(value, "__cuda_array_interface__") and hasattr(value, "get")
