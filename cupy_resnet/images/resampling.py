"""The size torchvision resizes to, and Pillow's bilinear enlargement of nothing but the window that is kept.

A strip of 1 × 3000 pixels enlarged to a shorter side of 256 is an image of 197 million pixels, of which the crop keeps
224 × 224; `enlarge_window` computes those alone. The algorithm is Pillow's (``src/libImaging/Resample.c``): each
output mixes two neighbours with weights rounded to 22 bits, horizontally, then vertically, and either result is
rounded to eight bits; every operation is in Pillow's order, so that every pixel is Pillow's. Images that shrink are
left to Pillow: what it makes of them is no larger than what it was given, and which of its two passes comes first
depends on its version.
"""

import numpy as np
from PIL import Image

_PRECISION_BITS = 22


def resized_size(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Returns the (width, height) of an image of `size` once its shorter side is `shorter`, rounded as torchvision."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def crop_offset(length: int, crop: int) -> int:
    """Returns where a centre crop begins along a side, rounded as torchvision; negative where zeros are padded."""
    if crop > length:
        return -((crop - length) // 2)
    return int(round((length - crop) / 2.0))  # noqa: RUF046 (as in torchvision, to the even neighbour)


def enlarge_window(image: Image.Image, size: tuple[int, int], box: tuple[int, int, int, int]) -> np.ndarray:
    """Returns ``image.resize(size, BILINEAR).crop(box)`` bit for bit, without the resized image ever existing.

    Args:
        image: an RGB image.
        size: (width, height) to resize to, neither less than the image's.
        box: (left, top, right, bottom) of the window; what lies outside the resized image is zero.

    Returns:
        uint8 (bottom − top, right − left, 3).
    """
    left, top, right, bottom = box
    columns = slice(max(left, 0), min(right, size[0]))
    rows = slice(max(top, 0), min(bottom, size[1]))
    column, column_weight = _neighbours(image.width, size[0], columns)
    row, row_weight = _neighbours(image.height, size[1], rows)

    x, y = int(column.min()), int(row.min())
    pixels = np.asarray(image.crop((x, y, int(column.max()) + 1, int(row.max()) + 1)))
    pixels = _mix(pixels.transpose(1, 0, 2), column - x, column_weight).transpose(1, 0, 2)
    pixels = _mix(pixels, row - y, row_weight)
    window = np.zeros((bottom - top, right - left, 3), np.uint8)
    window[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left] = pixels
    return window


def _neighbours(length: int, resized: int, kept: slice) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each kept output the two inputs it mixes and their weights × 2^22, both int64 (2, n)."""
    centre = (np.arange(kept.start, kept.stop) + 0.5) * (length / resized)
    first = np.maximum((centre - 0.5).astype(np.int64), 0)
    index = first + np.array([[0], [1]])
    inside = index < np.minimum((centre + 1.5).astype(np.int64), length)
    weight = np.where(inside, 1.0 - np.abs(index - centre + 0.5), 0.0)
    weight = (0.5 + weight / weight.sum(axis=0) * (1 << _PRECISION_BITS)).astype(np.int64)
    return np.minimum(index, length - 1), weight


def _mix(pixels: np.ndarray, index: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Mixes lines of uint8 (H, W, 3) by twos to uint8 (n, W, 3)."""
    half = 1 << (_PRECISION_BITS - 1)
    total = pixels[index[0]] * weight[0, :, None, None] + pixels[index[1]] * weight[1, :, None, None] + half
    return np.clip(total >> _PRECISION_BITS, 0, 255).astype(np.uint8)
