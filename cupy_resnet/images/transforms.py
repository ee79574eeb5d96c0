"""From an RGB image to the pixels a network was trained on, exactly as torchvision's classification presets do it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from PIL import Image

from .resampling import crop_offset, enlarge_window, resized_size

_MAX_RESIZED_PIXELS = 1 << 24
"""Beyond this many pixels only the crop's window of an enlarged image is computed: 64 MiB as Pillow stores it."""


def _three_numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{name} must be three finite numbers, for red, green and blue, got {values!r}")
    return numbers


@dataclass(frozen=True)
class Transforms:
    """Resize, centre crop and normalisation, as ``torchvision.transforms._presets.ImageClassification``.

    Attributes:
        resize: length in pixels of the shorter side after resizing; the ratio of the sides is kept.
        crop: side in pixels of the square cut from the centre; where the image is smaller, zeros surround it.
        mean: of the red, green and blue channel, in units of the full range (0–1), subtracted from the pixels.
        std: of the red, green and blue channel, in the same units, by which they are then divided.
        interpolation: ``"bilinear"``, antialiased, as Pillow does it.

    Raises:
        ValueError: a size is not a positive integer, `mean` or `std` are not three finite numbers, a `std` is not
            positive, or the interpolation is another one.
    """

    resize: int
    crop: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be a positive whole number of pixels, got {value!r}")
            object.__setattr__(self, name, int(value))
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if min(self.std) <= 0:
            raise ValueError(f"every std must be greater than 0, got {self.std}")
        if self.interpolation != "bilinear":
            raise ValueError(f"interpolation must be 'bilinear', got {self.interpolation!r}")

    @classmethod
    def preset(cls, name: str) -> "Transforms":
        """Returns the transforms called ``"IMAGENET1K_V1"``, ``"IMAGENET1K_V2"`` or ``"CIFAR10"``.

        Raises:
            ValueError: there is no such preset.
        """
        if name not in _PRESETS:
            raise ValueError(f"no preset {name!r}: there are {', '.join(_PRESETS)}")
        return _PRESETS[name]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Transforms":
        """Returns the transforms that `to_dict` described.

        Raises:
            ValueError: a key is missing or unknown, or a value is not allowed.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown transforms {', '.join(unknown)}: there are {', '.join(sorted(known))}")
        if missing := sorted(known - {"interpolation"} - set(values)):
            raise ValueError(f"transforms lack {', '.join(missing)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as values that JSON can hold."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def replace(
        self,
        *,
        resize: int | None = None,
        crop: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "Transforms":
        """Returns a copy with what is not None put in place of what was there.

        Raises:
            ValueError: as for the class.
        """
        changes = {"resize": resize, "crop": crop, "mean": mean, "std": std}
        return Transforms(**asdict(self) | {name: value for name, value in changes.items() if value is not None})


_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_PRESETS = {
    "IMAGENET1K_V1": Transforms(256, 224, _IMAGENET_MEAN, _IMAGENET_STD),
    "IMAGENET1K_V2": Transforms(232, 224, _IMAGENET_MEAN, _IMAGENET_STD),
    # The moments of the 50,000 training images; weights that were trained with others say so in their metadata.
    "CIFAR10": Transforms(32, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def prepare(image: Image.Image, transforms: Transforms, *, out: np.ndarray | None = None) -> np.ndarray:
    """Resizes an RGB image and cuts its centre; the pixels are torchvision's bit for bit.

    Memory stays bounded for any ratio of the sides: of a strip that would be enormous once enlarged, only the part that
    is kept is computed.

    Args:
        image: an image in RGB, as `decode` returns it; it is not changed.
        transforms: the sizes to resize and crop to.
        out: a uint8 array of the result's shape to write into, such as one image of a pinned batch.

    Returns:
        uint8 (crop, crop, 3), RGB: `out` if it was given.

    Raises:
        ValueError: the image is not RGB or is empty, or `out` has another shape or dtype.
    """
    crop = transforms.crop
    if image.mode != "RGB":
        raise ValueError(f"prepare takes RGB images, got one in mode {image.mode}; decode converts it")
    if min(image.size) < 1:
        raise ValueError(f"an image of {image.width} × {image.height} pixels has nothing to resize")
    if out is None:
        out = np.empty((crop, crop, 3), np.uint8)
    elif out.shape != (crop, crop, 3) or out.dtype != np.uint8:
        raise ValueError(f"out must be uint8 of shape ({crop}, {crop}, 3), got {out.dtype} of shape {out.shape}")
    size = resized_size(image.size, transforms.resize)
    left, top = crop_offset(size[0], crop), crop_offset(size[1], crop)
    box = (left, top, left + crop, top + crop)
    if min(image.size) < transforms.resize and size[0] * size[1] > _MAX_RESIZED_PIXELS:
        out[...] = enlarge_window(image, size, box)
    else:
        out[...] = np.asarray(image.resize(size, Image.Resampling.BILINEAR).crop(box))
    return out


def normalize(pixels: np.ndarray, transforms: Transforms) -> np.ndarray:
    """Returns ``(pixels / 255 − mean) / std`` in float32, each step rounded as torchvision rounds it.

    Args:
        pixels: uint8 (…, 3), such as NHWC.
        transforms: whose `mean` and `std` to use.

    Returns:
        float32 of the same shape.

    Raises:
        ValueError: `pixels` is not uint8 with three channels last.
    """
    if pixels.dtype != np.uint8 or pixels.shape[-1:] != (3,):
        raise ValueError(f"normalize takes uint8 pixels (…, 3), got {pixels.dtype} of shape {pixels.shape}")
    mean, std = (np.asarray(values, np.float32) for values in (transforms.mean, transforms.std))
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std
