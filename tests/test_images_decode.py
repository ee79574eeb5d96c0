"""`decode`: modes, orientation, frames, and everything that can be wrong with a file."""

import concurrent.futures
import contextlib
import io
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, features

from cupy_resnet.images import ImageError, decode, expand


def first(inputs, **options) -> Image.Image:
    (source,) = expand(inputs)
    return decode(source, **options)


def pixels(inputs, **options) -> np.ndarray:
    image = first(inputs, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 7, height: int = 5, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8).squeeze()


RGB = Image.fromarray(noise())

# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Image.MODES)
def test_every_mode_becomes_rgb_of_the_same_size_and_stays_untouched(mode: str) -> None:
    image = Image.new(mode, (4, 3))
    before = (image.tobytes(), image.mode, image.size, dict(image.info))
    assert pixels(image).shape == (3, 4, 3)
    assert (image.tobytes(), image.mode, image.size, dict(image.info)) == before


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"])
def test_opaque_modes_are_pillows_conversion(mode: str) -> None:
    image = RGB.convert(mode)
    np.testing.assert_array_equal(pixels(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_opaque_alpha_changes_nothing(mode: str) -> None:
    grey = mode in ("LA", "La")
    base = RGB.convert("L") if grey else RGB.quantize(16) if mode == "PA" else RGB
    image = base.convert("LA" if grey else "RGBA" if mode == "RGBa" else mode)
    np.testing.assert_array_equal(pixels(image.convert(mode)), np.asarray(base.convert("RGB")))


def exact_on_white(color: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    color, alpha = color.astype(int), alpha.astype(int)
    return (color * alpha + 255 * (255 - alpha)) / 255


def test_rgba_is_mixed_exactly_with_white() -> None:
    alpha, grey = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    result = pixels(Image.fromarray(np.dstack([grey, 255 - grey, grey // 2, alpha])))
    for channel, color in enumerate([grey, 255 - grey, grey // 2]):
        assert np.abs(result[..., channel] - exact_on_white(color, alpha)).max() <= 0.5


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_hidden_colour_never_shows(kind: str) -> None:
    hidden = noise(channels=4)
    hidden[:, :4, 3], hidden[:, 4:, 3] = 0, 255
    result = pixels(
        saved(Image.fromarray(hidden), kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    )
    assert (result[:, :4] == 255).all()
    np.testing.assert_array_equal(result[:, 4:], hidden[:, 4:, :3])


@pytest.mark.parametrize("mode", ["LA", "PA", "La", "RGBa", "RGBA"])
def test_full_transparency_is_white_in_every_mode(mode: str) -> None:
    if mode == "PA":
        image = RGB.quantize(8).convert("PA")
        image.putalpha(0)
    else:
        image = Image.new(mode, (3, 2), (0,) * len(mode))
    assert (pixels(image) == 255).all()


def test_palette_with_one_transparent_colour_and_with_many() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    one = saved(image, "PNG", transparency=0)
    np.testing.assert_array_equal(pixels(one), [[[255, 255, 255], [0, 255, 0], [0, 0, 255]]])
    many = saved(image, "PNG", transparency=bytes([0, 255, 51]))
    np.testing.assert_array_equal(pixels(many), [[[255, 255, 255], [0, 255, 0], [204, 204, 255]]])
    gif = saved(image, "GIF", transparency=1)
    np.testing.assert_array_equal(pixels(gif), [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]])


def test_a_palettes_transparency_is_not_written_into_the_callers_image() -> None:
    image = RGB.quantize(8)
    image.info["transparency"] = bytes([0] * 8)
    before = image.im.getpalette("RGBA", "RGBA")
    assert (pixels(image) == 255).all()
    assert image.im.getpalette("RGBA", "RGBA") == before
    assert image.info["transparency"] == bytes([0] * 8)


@pytest.mark.parametrize(
    ("mode", "transparent", "values"),
    [("L", 7, [[7, 8]]), ("RGB", (1, 2, 3), [[[1, 2, 3], [8, 8, 8]]]), ("1", 255, [[True, False]])],
)
def test_a_transparent_colour_in_a_png(mode: str, transparent, values) -> None:
    array = np.array(values, bool if mode == "1" else np.uint8)
    result = pixels(saved(Image.fromarray(array), "PNG", transparency=transparent))
    assert (result[0, 0] == 255).all()
    assert (result[0, 1] == (0 if mode == "1" else 8)).all()


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    expected = [0, 0, 1, 1, 128, 255]
    for content in (saved(Image.fromarray(values), "PNG"), saved(Image.fromarray(values), "TIFF")):
        np.testing.assert_array_equal(pixels(content)[0, :, 0], expected)
    pgm = b"P5 6 1 65535\n" + values.astype(">u2").tobytes()
    np.testing.assert_array_equal(pixels(pgm)[0, :, 1], expected)
    tiff_big_endian = Image.frombytes("I;16B", (6, 1), values.astype(">u2").tobytes())
    np.testing.assert_array_equal(pixels(tiff_big_endian)[0, :, 2], expected)


def test_sixteen_bit_grey_with_a_transparent_value() -> None:
    image = Image.fromarray(np.array([[1000, 2000]], np.uint16))
    image.info["transparency"] = 1000
    np.testing.assert_array_equal(pixels(image)[0, :, 0], [255, 8])


def test_mode_i_by_its_range() -> None:
    def mode_i(*values: int) -> Image.Image:
        return Image.fromarray(np.array([values], np.int32))

    np.testing.assert_array_equal(pixels(mode_i(0, 100, 255))[0, :, 0], [0, 100, 255])
    np.testing.assert_array_equal(pixels(mode_i(0, 257, 65535))[0, :, 0], [0, 1, 255])
    for values in ((-1, 5), (0, 65536)):
        with pytest.raises(ImageError, match=f"image 0: mode I with values from {values[0]} to {values[1]}"):
            first(mode_i(*values))


def test_mode_f_by_its_range() -> None:
    def mode_f(*values: float) -> Image.Image:
        return Image.fromarray(np.array([values], np.float32))

    np.testing.assert_array_equal(pixels(mode_f(0, 0.5, 1))[0, :, 0], [0, 128, 255])
    np.testing.assert_array_equal(pixels(mode_f(0, 127.6, 255))[0, :, 0], [0, 128, 255])
    for values in ((-0.5, 1), (0, 1.02), (0, 300), (0, np.nan), (0, np.inf)):
        with pytest.raises(ImageError, match="mode F with values"):
            first(mode_f(*values))


@pytest.mark.parametrize("transparency", ["red", 1.5, (1, 2, 3, 4, 5), b"12345", None])
@pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "I;16"])
def test_an_impossible_transparency_is_white_or_an_image_error(mode: str, transparency) -> None:
    image = RGB.convert("L").convert(mode) if mode != "I;16" else Image.new(mode, (7, 5))
    image.info["transparency"] = transparency
    with contextlib.suppress(ImageError):  # and nothing else
        assert first(image).size == (7, 5)


def test_icc_profiles_are_ignored() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    np.testing.assert_array_equal(pixels(saved(RGB, "PNG", icc_profile=profile)), np.asarray(RGB))


# --- orientation ------------------------------------------------------------------------------------------------------


def oriented(orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(RGB, kind, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_files_and_bytes_are_brought_upright(orientation: int, tmp_path: Path) -> None:
    upright = {  # EXIF 2.3, tag 274: where the stored row 0 and column 0 belong
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a),
    }[orientation](np.asarray(RGB))
    content = oriented(orientation)
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    for inputs in (content, path, str(path), io.BytesIO(content)):
        np.testing.assert_array_equal(pixels(inputs), upright)
        np.testing.assert_array_equal(
            pixels(inputs, exif=False) if inputs is path else np.asarray(RGB), np.asarray(RGB)
        )


def test_exif_false_and_pil_images_stay_as_stored() -> None:
    content = oriented(6)
    np.testing.assert_array_equal(pixels(content, exif=False), np.asarray(RGB))
    np.testing.assert_array_equal(pixels(Image.open(io.BytesIO(content))), np.asarray(RGB))


def test_a_jpeg_is_turned_like_torchvisions_loader_and_then_rotated() -> None:
    content = oriented(6, "JPEG")
    stored = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(pixels(content, exif=False), stored)
    np.testing.assert_array_equal(pixels(content), np.rot90(stored, -1))


@pytest.mark.parametrize("orientation", [0, 9, 300])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    np.testing.assert_array_equal(pixels(oriented(orientation)), np.asarray(RGB))


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"\0" * 9]
)
def test_damaged_exif_data_costs_the_orientation_not_the_image(exif: bytes) -> None:
    content = saved(RGB, "PNG", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(pixels(content), np.asarray(RGB))


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PNG", "WEBP", "MPO"])
def test_the_first_frame_is_taken(kind: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3
    path = tmp_path / "frames"
    path.write_bytes(content)
    for inputs in (content, path):
        result = pixels(inputs)
        assert np.abs(result.astype(int) - [255, 0, 0]).max() <= (2 if kind == "MPO" else 0)


def test_a_pil_image_is_taken_in_its_current_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime")]
    image = Image.open(io.BytesIO(saved(frames[0], "TIFF", save_all=True, append_images=frames[1:])))
    image.seek(1)
    assert (pixels(image) == [0, 255, 0]).all()


# --- what is wrong with files -----------------------------------------------------------------------------------------

PHOTO = saved(Image.fromarray(noise(64, 64)), "JPEG")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"the file is empty \(0 bytes\)"),
        (b"hello, world", "no image format that Pillow .* can read begins with b'hello, w'"),
        (PHOTO[: len(PHOTO) // 2], "the image cannot be decoded: image file is truncated"),
        (PHOTO[:2], "no image format"),
        (saved(RGB, "PNG")[:-40], "the image cannot be"),
        (b"\n <!DOCTYPE html><html>", "this is a web page"),
        (b"\xef\xbb\xbf<html>", "this is a web page"),
        (b"%PDF-1.7", "this is a PDF"),
        (b"<svg xmlns=''/>", "this is an SVG drawing; render it to PNG"),
        (b"version https://git-lfs.github.com/spec/v1\n", "this is a Git LFS pointer"),
        (b"PK\x03\x04....", "this is a ZIP archive"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC needs a plugin: pip install pillow-heif"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "EPS files are drawings"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=f"^{path}: {reason}") as caught:
        first(path)
    assert caught.value.name == str(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_bad_file_among_bytes_and_objects_is_named_by_its_place(tmp_path: Path) -> None:
    sources = list(expand([PHOTO, b"", b"nonsense", io.BytesIO(b"more nonsense")]))
    assert decode(sources[0]).size == (64, 64)
    for place, reason in ((1, "there are no bytes to decode"), (2, "no image format"), (3, "no image format")):
        with pytest.raises(ImageError, match=f"^image {place}: {reason}"):
            decode(sources[place])


@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO", "JPEG2000", "QOI", "PCX"]
)
def test_damage_anywhere_is_an_image_or_an_image_error(kind: str) -> None:
    if kind in ("WEBP",) and not features.check("webp"):
        pytest.skip("Pillow without WebP")
    content = saved(Image.fromarray(noise(24, 24)), kind)
    rng = np.random.default_rng(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(60):
            damaged = bytearray(content[: rng.integers(1, len(content) + 1)])
            for place in rng.integers(0, len(damaged), 4):
                damaged[place] = rng.integers(256)
            with contextlib.suppress(ImageError):  # and nothing else
                assert first(bytes(damaged)).mode == "RGB"


def test_pillows_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    content = saved(Image.new("RGB", (20, 20)), "PNG")
    with pytest.raises(
        ImageError, match=r"image 0: the image cannot be opened: Image size \(400 pixels\) exceeds limit"
    ):
        first(content)
    with pytest.warns(Image.DecompressionBombWarning):
        first(saved(Image.new("RGB", (15, 10)), "PNG"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match="exceeds limit of 100 pixels"):
            first(saved(Image.new("RGB", (15, 10)), "PNG"))


def test_running_out_of_memory_is_an_image_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: ImageFile.ImageFile) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(ImageError, match="not enough memory"):
        first(PHOTO)


def test_a_damaged_opened_image_is_an_image_error() -> None:
    image = Image.open(io.BytesIO(PHOTO[: len(PHOTO) // 2]))
    with pytest.raises(ImageError, match="image 0: the image cannot be decoded: image file is truncated"):
        first(image)
    (source,) = expand(iter([Image.open(io.BytesIO(PHOTO[: len(PHOTO) // 2]))]))
    with pytest.raises(ImageError, match="image 0: the image cannot be decoded: image file is truncated"):
        decode(source)


def test_an_empty_image_is_an_image_error() -> None:
    with pytest.raises(ImageError, match="an image of 0 × 4 pixels has nothing in it"):
        first(Image.new("I", (0, 4)))


def test_a_channel_order_that_does_not_exist_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="must be 'rgb' or 'bgr', got 'brg'") as caught:
        first(PHOTO, channel_order="brg")
    assert not isinstance(caught.value, ImageError)


def test_one_opened_image_passed_many_times_to_many_threads() -> None:
    big = saved(Image.fromarray(noise(400, 400)), "PNG")
    for _ in range(5):
        image = Image.open(io.BytesIO(big))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(decode, expand([image] * 8)))
        for result in results:
            np.testing.assert_array_equal(np.asarray(result), noise(400, 400))


def test_a_file_that_vanished_or_became_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(PHOTO)
    (source,) = expand(path)
    path.unlink()
    with pytest.raises(ImageError, match="the file cannot be read: No such file"):
        decode(source)
    os.mkfifo(path)
    with pytest.raises(ImageError, match="not a regular file"):
        first(path)
