"""Any Pillow mode to RGB.

| mode | becomes |
| --- | --- |
| RGB | itself |
| 1, L | grey in all three channels |
| P | the palette's colours |
| CMYK, YCbCr, HSV, RGBX | Pillow's conversion (CMYK without a profile) |
| LAB | Pillow's conversion through LittleCMS, D50 to sRGB |
| LA, PA, RGBA; La, RGBa (premultiplied) | composited on white |
| 1, L, P, RGB, I;16, I with a transparent colour or palette (``info["transparency"]``) | composited on white |
| I;16, I;16L, I;16B, I;16N | 0–65535 scaled to 0–255 and rounded, grey |
| I | the same; values that all lie in 0–255 are taken as they are; beyond 0–65535 it is refused |
| F | 0–1 scaled to 0–255 and rounded, grey; with values beyond 1.25 and in 0–255, as they are; others are refused |

White is what cut-outs and icons are shown on; whatever colour a file hides under full transparency never appears.
ICC profiles are ignored, as torchvision ignores them, so that opaque images become what ``convert("RGB")`` makes them.
"""

import numpy as np
from PIL import Image

from .errors import RefusedError

OVERSHOOT = 0.25
"""How far a resize with a cubic or Lanczos filter takes floats out of 0–1; what lies beyond has another range."""

_WHITE = (255, 255, 255)


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in RGB by the table above; an RGB image is returned itself, no image is changed.

    Raises:
        RefusedError: the range of its values is unknown, or Pillow cannot convert its mode.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_to_rgb(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else _convert(image, "RGB")
    if image.mode == "P":
        image = image.copy()  # Pillow writes the transparency into the palette of the image it converts
    elif image.mode == "La":
        image = _convert(image, "LA")
    return _on_white(_convert(image, "RGBA"))


def scale_to_uint8(values: np.ndarray, full: int) -> np.ndarray:
    """Maps integers 0 … `full` to 0 … 255, rounded to nearest."""
    return ((values.astype(np.uint32) * 255 + full // 2) // full).astype(np.uint8)


def _deep_to_rgb(image: Image.Image) -> Image.Image:
    """Converts grey images of more than eight bits."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F":
        if not (low >= 0 and high <= 255):  # written so that NaN is refused
            raise RefusedError(f"mode F with values from {low:g} to {high:g}: floats must lie in 0–1 or in 0–255")
        if 1 < high <= 1 + OVERSHOOT:  # as 0–255 it would be black
            raise RefusedError(f"mode F with values from {low:g} to {high:g}: clip what a resize pushed beyond 0–1")
        grey = np.rint(values * (255.0 if high <= 1 else 1.0)).astype(np.uint8)
    elif low < 0 or high > 65535:
        raise RefusedError(f"mode {image.mode} with values from {low} to {high}: they must lie in 0–65535")
    else:
        eight_bits = image.mode == "I" and high <= 255
        grey = values.astype(np.uint8) if eight_bits else scale_to_uint8(values, 65535)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(values == transparent, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def _convert(image: Image.Image, mode: str) -> Image.Image:
    try:
        return image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:  # an impossible info["transparency"], a Pillow built without LittleCMS, and so on
        raise RefusedError(f"mode {image.mode} cannot be converted to {mode}: {error}") from error


def _on_white(image: Image.Image) -> Image.Image:
    """Composites an RGBA image on white; each channel is the exact mixture, rounded to nearest."""
    canvas = Image.new("RGB", image.size, _WHITE)
    canvas.paste(image, mask=image)
    return canvas
