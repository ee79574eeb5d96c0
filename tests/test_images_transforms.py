"""`prepare` and `normalize` against torchvision's own presets, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.models import ResNet18_Weights, ResNet50_Weights
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as reference
from torchvision.transforms._presets import ImageClassification

from cupy_resnet.images import Source, Transforms, decode, expand, normalize, prepare
from cupy_resnet.images.resampling import crop_offset, enlarge_window, resized_size

TORCHVISION = {
    "IMAGENET1K_V1": ResNet18_Weights.IMAGENET1K_V1.transforms(),
    "IMAGENET1K_V2": ResNet50_Weights.IMAGENET1K_V2.transforms(),
}


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def torchvision_pixels(image: Image.Image, resize: int, crop: int) -> np.ndarray:
    """What ImageClassification.forward does before it turns to floats."""
    image = reference.resize(image, [resize], interpolation=InterpolationMode.BILINEAR, antialias=True)
    return np.asarray(reference.center_crop(image, [crop]))


sides = st.one_of(st.integers(1, 40), st.integers(200, 300), st.integers(1, 900))


@given(width=sides, height=sides, preset=st.sampled_from(sorted(TORCHVISION)), seed=st.integers(0, 9))
@example(width=1, height=1, preset="IMAGENET1K_V1", seed=0)
@example(width=256, height=256, preset="IMAGENET1K_V1", seed=0)
@example(width=224, height=300, preset="IMAGENET1K_V1", seed=0)
@example(width=1, height=700, preset="IMAGENET1K_V1", seed=0)
@example(width=900, height=2, preset="IMAGENET1K_V2", seed=0)
@settings(max_examples=80, deadline=None)
def test_pixels_are_torchvisions(width: int, height: int, preset: str, seed: int) -> None:
    image, transforms = noise(width, height, seed), Transforms.preset(preset)
    pixels = prepare(image, transforms)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, torchvision_pixels(image, transforms.resize, transforms.crop))


@given(width=st.integers(1, 200), height=st.integers(1, 200), resize=st.integers(1, 90), crop=st.integers(1, 120))
@example(width=5, height=9, resize=30, crop=31)  # padding by an odd number
@example(width=100, height=63, resize=32, crop=25)  # an offset of 12.5 or 3.5 rounds to the even neighbour
@settings(max_examples=150, deadline=None)
def test_any_sizes_smaller_than_the_crop_too(width: int, height: int, resize: int, crop: int) -> None:
    image = noise(width, height)
    transforms = Transforms.preset("IMAGENET1K_V1").replace(resize=resize, crop=crop)
    np.testing.assert_array_equal(prepare(image, transforms), torchvision_pixels(image, resize, crop))


@given(width=st.integers(1, 200), height=st.integers(1, 200), grow=st.integers(0, 150), crop=st.integers(1, 220))
@example(width=1, height=3000, grow=19, crop=16)
@example(width=3000, height=3, grow=14, crop=40)
@settings(max_examples=200, deadline=None)
def test_the_window_alone_equals_the_whole_enlargement(width: int, height: int, grow: int, crop: int) -> None:
    resize = min(width, height) + grow
    image, size = noise(width, height), resized_size((width, height), resize)
    left, top = crop_offset(size[0], crop), crop_offset(size[1], crop)
    window = enlarge_window(image, size, (left, top, left + crop, top + crop))
    np.testing.assert_array_equal(window, torchvision_pixels(image, resize, crop))


@pytest.mark.parametrize("size", [(3, 1000), (1000, 3), (300, 80_000)])
def test_a_strip_beyond_the_limit_equals_torchvision(size: tuple[int, int]) -> None:
    image = noise(*size)
    np.testing.assert_array_equal(
        prepare(image, Transforms.preset("IMAGENET1K_V1")), torchvision_pixels(image, 256, 224)
    )


def test_a_strip_torchvision_cannot_hold_is_cut_at_its_middle() -> None:
    # Resized to 256 × 25,600,000, 26 GB as Pillow stores them: the crop lies within the two middle rows.
    pixels = np.zeros((100_000, 1, 3), np.uint8)
    pixels[49_999], pixels[50_000] = (10, 20, 30), (200, 100, 50)
    result = prepare(Image.fromarray(pixels), Transforms.preset("IMAGENET1K_V1"))
    assert (result == result[:, :1]).all()
    np.testing.assert_array_equal(result[0, 0] <= result[-1, 0], True)
    # Halfway between two rows, bilinear interpolation gives their mean.
    middle = (result[111, 0].astype(int) + result[112, 0]) / 2
    np.testing.assert_allclose(middle, [105, 60, 40], atol=1)


def test_prepare_writes_into_a_slot_of_a_batch() -> None:
    image, transforms = noise(300, 200), Transforms.preset("IMAGENET1K_V1")
    batch = np.zeros((2, 224, 224, 3), np.uint8)
    assert np.shares_memory(prepare(image, transforms, out=batch[1]), batch)
    np.testing.assert_array_equal(batch[1], prepare(image, transforms))
    assert not batch[0].any()


def test_prepare_says_what_it_does_not_take() -> None:
    transforms = Transforms.preset("IMAGENET1K_V1")
    with pytest.raises(ValueError, match="takes RGB images, got one in mode L"):
        prepare(Image.new("L", (9, 9)), transforms)
    with pytest.raises(ValueError, match="0 × 9"):
        prepare(Image.new("RGB", (0, 9)), transforms)
    with pytest.raises(ValueError, match=r"float32 of shape \(224, 224, 3\)"):
        prepare(noise(9, 9), transforms, out=np.zeros((224, 224, 3), np.float32))


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance of two float32 arrays in units of the last place, across zero too."""
    ordered = []
    for values in (a, b):
        bits = np.ascontiguousarray(values).view(np.int32).astype(np.int64)
        ordered.append(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    return int(np.abs(ordered[0] - ordered[1]).max())


@pytest.mark.parametrize("preset", sorted(TORCHVISION))
def test_every_normalised_value_is_torchvisions(preset: str) -> None:
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    transforms, theirs = Transforms.preset(preset), TORCHVISION[preset]
    floats = reference.convert_image_dtype(torch.from_numpy(values).permute(0, 3, 1, 2), torch.float)
    expected = reference.normalize(floats, theirs.mean, theirs.std).permute(0, 2, 3, 1).numpy()
    result = normalize(values, transforms)
    assert result.dtype == np.float32
    assert ulps(result, expected) <= 2


def test_normalize_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"got float32 of shape \(2, 3\)"):
        normalize(np.zeros((2, 3), np.float32), Transforms.preset("CIFAR10"))


def test_photographs_equal_torchvisions_whole_transform(data_folder) -> None:
    photos = sorted((data_folder / "imagenet" / "photos").iterdir())[::10]
    assert photos
    for preset, theirs in TORCHVISION.items():
        transforms = Transforms.preset(preset)
        for photo in photos:
            with Image.open(photo) as image:
                opened = image.convert("RGB")
            pixels = prepare(decode(Source(0, str(photo), photo), exif=False), transforms)
            np.testing.assert_array_equal(pixels, torchvision_pixels(opened, transforms.resize, transforms.crop))
            assert ulps(normalize(pixels, transforms), theirs(opened).permute(1, 2, 0).numpy()) <= 2


def test_an_exact_cifar_image_passes_unchanged() -> None:
    image = noise(32, 32)
    np.testing.assert_array_equal(prepare(image, Transforms.preset("CIFAR10")), np.asarray(image))


def test_presets_are_torchvisions_numbers() -> None:
    for name, theirs in TORCHVISION.items():
        assert isinstance(theirs, ImageClassification)
        ours = Transforms.preset(name)
        assert ([ours.resize], [ours.crop]) == (theirs.resize_size, theirs.crop_size)
        assert (list(ours.mean), list(ours.std)) == (theirs.mean, theirs.std)
    with pytest.raises(ValueError, match="no preset 'IMAGENET': there are IMAGENET1K_V1, IMAGENET1K_V2, CIFAR10"):
        Transforms.preset("IMAGENET")


def test_dict_and_replace() -> None:
    transforms = Transforms.preset("IMAGENET1K_V2")
    assert Transforms.from_dict(transforms.to_dict()) == transforms
    assert transforms.to_dict()["mean"] == [0.485, 0.456, 0.406]
    changed = transforms.replace(resize=64, std=[1, 2, 3])
    assert (changed.resize, changed.crop, changed.std, changed.mean) == (64, 224, (1.0, 2.0, 3.0), transforms.mean)
    assert transforms.replace() == transforms
    with pytest.raises(ValueError, match="unknown transforms size: there are crop"):
        Transforms.from_dict({**transforms.to_dict(), "size": 3})
    with pytest.raises(ValueError, match="transforms lack crop, mean"):
        Transforms.from_dict({"resize": 3, "std": [1, 1, 1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resize": 0}, "resize must be a positive whole number of pixels, got 0"),
        ({"crop": 2.5}, "crop must be"),
        ({"crop": True}, "crop must be"),
        ({"mean": (0.5,)}, "mean must be three finite numbers"),
        ({"mean": 0.5}, "mean must be three finite numbers"),
        ({"mean": (0.5, 0.5, float("nan"))}, "mean must be three finite numbers"),
        ({"std": (1, 0, 1)}, "every std must be greater than 0"),
    ],
)
def test_transforms_say_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transforms.preset("IMAGENET1K_V1").replace(**change)


def test_the_interpolation_is_bilinear_or_refused() -> None:
    with pytest.raises(ValueError, match="must be 'bilinear', got 'bicubic'"):
        Transforms.from_dict({**Transforms.preset("IMAGENET1K_V1").to_dict(), "interpolation": "bicubic"})


def test_an_rgb_image_is_decoded_to_itself() -> None:
    image = noise(333, 222)
    (source,) = expand(image)
    assert decode(source) is image
