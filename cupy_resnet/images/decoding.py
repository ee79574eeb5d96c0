"""Reads one source into an RGB image, or says in one sentence why it cannot be read."""

import io
import stat
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
import PIL
from PIL import Image

from . import arrays, colors, urls
from .errors import ImageError, RefusedError
from .sources import Source

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image upright whose EXIF orientation is the key (1 is upright)."""

_PROGRAMS = ("EPS", "WMF")
"""Formats Pillow renders by running Ghostscript or Windows; a classifier's input must not start programs."""

_NOT_IMAGES = (
    (b"%PDF", "this is a PDF; export its pages as images"),
    (b"<svg", "this is an SVG drawing; render it to PNG"),
    (b"<!doctype html", "this is a web page, not an image"),
    (b"<html", "this is a web page, not an image"),
    (b"<?xml", "this is XML, not an image"),
    (b"version https://git-lfs", "this is a Git LFS pointer; fetch the file itself with git lfs pull"),
    (b"PK\x03\x04", "this is a ZIP archive; unpack it and pass the folder"),
    (b"\x1f\x8b", "this is gzip data; unpack it"),
)
"""How files begin that people take for images, in lower case, and what to tell them."""

_HEIF = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"heim", b"heis")

# Pillow loads a file's pixels on first use and is not made for two threads doing so on one image, which they do if it
# is passed twice.
_LOCKS = [threading.Lock() for _ in range(64)]


def decode(
    source: Source,
    *,
    exif: bool = True,
    channel_order: str = "rgb",
    url_timeout: float = urls.TIMEOUT,
    url_limit: int = urls.LIMIT,
) -> Image.Image:
    """Reads a source into an RGB image; may be called from several threads at once.

    Of files with several frames or pages the first is taken; `colors` tells how other modes become RGB. A PIL image
    that is RGB already is returned itself, and none that was passed is changed.

    Args:
        source: what `expand` yielded.
        exif: bring files and bytes upright by their EXIF orientation; False leaves them as they are stored, as
            torchvision's loaders do. PIL images and arrays are always taken as they are.
        channel_order: ``"rgb"``, or ``"bgr"`` for arrays with blue first, as OpenCV has them; nothing else heeds it.
        url_timeout: seconds that one download may take.
        url_limit: bytes that one download may have.

    Raises:
        ImageError: there is no image to be had from this source: whatever the reason, so that one bad file among
            many is one bad result. Pillow's limit on the number of pixels is among the reasons.
        ValueError: `channel_order` is another word.
    """
    if channel_order not in ("rgb", "bgr"):
        raise ValueError(f"channel_order must be 'rgb' or 'bgr', got {channel_order!r}")
    payload = source.payload
    if isinstance(payload, RefusedError):
        raise ImageError(source.name, str(payload)) from payload.__cause__
    try:
        if isinstance(payload, Path):
            image = _read_file(payload, exif=exif)
        elif isinstance(payload, urls.Url):
            image = _read_url(payload, exif=exif, timeout=url_timeout, limit=url_limit)
        elif isinstance(payload, bytes):
            image = _read_bytes(payload, exif=exif)
        elif isinstance(payload, np.ndarray):
            image = arrays.to_image(payload, channel_order)
        else:
            image = payload
            with _LOCKS[id(image) // 64 % len(_LOCKS)]:
                _load(image)
        if min(image.size) < 1:
            raise RefusedError(f"an image of {image.width} × {image.height} pixels has nothing in it")
        return colors.to_rgb(image)
    except RefusedError as error:
        raise ImageError(source.name, str(error)) from error.__cause__
    except MemoryError as error:
        raise ImageError(source.name, "there is not enough memory to decode it") from error


def _read_file(path: Path, *, exif: bool) -> Image.Image:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise RefusedError("this is not a regular file; pass an open file object to read from a pipe or device")
        if status.st_size == 0:
            raise RefusedError("the file is empty (0 bytes)")
        with path.open("rb") as file:
            return _read_stream(file, exif=exif)
    except OSError as error:
        raise RefusedError(f"the file cannot be read: {error.strerror or error}") from error


def _read_url(url: urls.Url, *, exif: bool, timeout: float, limit: int) -> Image.Image:
    download = urls.fetch(url, timeout=timeout, limit=limit)
    try:
        return _read_bytes(download.body, exif=exif)
    except RefusedError as error:
        said = f" (the server calls it {download.content_type})" if download.content_type else ""
        raise RefusedError(f"{error}{said}") from error.__cause__


def _read_bytes(content: bytes, *, exif: bool) -> Image.Image:
    if not content:
        raise RefusedError("there are no bytes to decode")
    return _read_stream(io.BytesIO(content), exif=exif)


def _read_stream(file: BinaryIO, *, exif: bool) -> Image.Image:
    try:
        image = Image.open(file)
    except PIL.UnidentifiedImageError as error:
        file.seek(0)
        raise RefusedError(_describe(file.read(64))) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes Pillow's plugins raise nearly anything
        raise RefusedError(f"the image cannot be opened: {_sentence(error)}") from error
    if image.format in _PROGRAMS:
        raise RefusedError(f"{image.format} files are drawings that other programs render; convert it to PNG")
    _load(image)
    transpose = _UPRIGHT.get(_orientation(image)) if exif else None
    return image if transpose is None else image.transpose(transpose)


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise RefusedError(f"the image cannot be decoded: {_sentence(error)}") from error


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, 1 where there is none or the EXIF data is damaged: the pixels still are good."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as above
        return 1
    return value if isinstance(value, int) else 1


def _describe(head: bytes) -> str:
    """Returns why a file that begins with `head` is no image Pillow knows."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for signature, reason in _NOT_IMAGES:
        if start.startswith(signature.lower()):
            return reason
    if head[4:8] == b"ftyp" and head[8:12] in _HEIF:
        return "HEIC needs a plugin: pip install pillow-heif, then call pillow_heif.register_heif_opener()"
    if head[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF needs a Pillow that was built with it: pip install --upgrade pillow"
    return f"no image format that Pillow {PIL.__version__} can read begins with {head[:8]!r}"


def _sentence(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
