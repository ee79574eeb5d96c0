"""From what a person passes to one `Source` for every image in it, lazily and in order."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import arrays, folders, urls
from .errors import RefusedError

Payload = Path | urls.Url | bytes | Image.Image | np.ndarray | RefusedError

_NESTING = 8
_ACCEPTED = (
    "a path, folder, pattern, URL, bytes, file object, PIL image, array, tensor, or a list or generator of those"
)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One image before it is read.

    Attributes:
        index: its place among all images of the call, from 0.
        path: the path or URL as given, or where it was found; None for what has no name, such as an array.
        payload: what `decode` reads it from; a `RefusedError` if it is already known that there is nothing to read.
    """

    index: int
    path: str | None
    payload: Payload

    @property
    def name(self) -> str:
        """What messages call it: the path, or ``image 3``."""
        return self.path or f"image {self.index}"


def expand(inputs: Any, *, recursive: bool = True) -> Iterator[Source]:
    """Yields one `Source` for every image in the inputs, in order.

    Nothing is opened or downloaded, and inputs are consumed no faster than sources are taken, so that a generator of a
    million images needs the memory of a few. What cannot be used yields one source all the same, whose decoding
    fails: results never shift against inputs.

    Args:
        inputs: any of the following, or a list, tuple, generator or other iterable of them, also nested.

            - str or path-like: an image file; a folder, of which all image files are taken, sorted, without hidden
              ones (`folders.walk`); a pattern of `glob`, if there is no file of that name (`folders.matches`). ``~``
              is the home folder. A str may be an http or https URL.
            - bytes, bytearray, memoryview: the content of an image file.
            - a binary file object, read from where it stands to its end, at once; it is not closed.
            - a PIL image, taken as it is, in its current frame and without looking at its EXIF orientation. A list of
              opened images holds the pixels of each once it is read; a list of paths holds none.
            - an array of NumPy, CuPy, torch (on any device) or another library with ``__array__``: one image or a
              batch (`arrays`). A batch of N gives N sources, none for N = 0. An array of str gives its paths.

            What an iterable that is not a list or tuple yields is copied where it could change, because generators
            reuse their buffers and close their files; opened images are therefore loaded as they come.
        recursive: whether folders' subfolders are searched too.

    Raises:
        Exception: whatever iterating over the inputs raises.
    """
    for index, (path, payload) in enumerate(_expand(inputs, recursive, lasting=True, depth=0)):
        yield Source(index, path, payload)


def _expand(value: Any, recursive: bool, *, lasting: bool, depth: int) -> Iterator[tuple[str | None, Payload]]:
    """Yields (path, payload); `lasting` says that the value stays what it is after the next one was asked for."""
    if isinstance(value, Image.Image):
        yield _image(value, lasting=lasting)
    elif isinstance(value, str | os.PathLike):
        yield from _expand_name(value, recursive)
    elif isinstance(value, bytes | bytearray | memoryview):
        yield None, bytes(value)
    elif arrays.is_array(value):
        yield from _expand_array(value, recursive, lasting=lasting, depth=depth)
    elif hasattr(value, "read"):
        yield _file_object(value)
    elif isinstance(value, Iterable) and not isinstance(value, Mapping | set | frozenset):
        lasting = lasting and isinstance(value, list | tuple)
        if depth == _NESTING:
            yield None, RefusedError(f"lists are nested more than {_NESTING} deep")
        elif lasting and _is_image_of_numbers(value):
            yield None, RefusedError("a list of numbers is not an image; pass numpy.array(list, dtype=numpy.uint8)")
        else:
            for item in value:
                yield from _expand(item, recursive, lasting=lasting, depth=depth + 1)
    else:
        hint = " (cv2.imread returns None for a file it cannot read)" if value is None else ""
        yield None, RefusedError(f"an object of type {type(value).__name__} is not an image{hint}; pass {_ACCEPTED}")


def _is_image_of_numbers(value: Any) -> bool:
    """Returns whether a list is what ``tolist`` makes of a row, a grey or a color image: one input, not one per row."""
    for _ in range(3):
        if not (isinstance(value, list | tuple) and value):
            return False
        value = value[0]
        if isinstance(value, Number):
            return True
    return False


def _expand_name(value: str | os.PathLike[Any], recursive: bool) -> Iterator[tuple[str, Payload]]:
    text = os.fsdecode(value)
    try:
        yield from _expand_path(text, Path(text).expanduser(), recursive)
    except RefusedError as error:
        yield text, error
    except (OSError, ValueError, RuntimeError) as error:  # too long, unreadable, ~ of an unknown user
        yield text, RefusedError(f"this is not a usable path: {error}")


def _expand_path(text: str, path: Path, recursive: bool) -> Iterator[tuple[str, Payload]]:
    if not text:
        raise RefusedError("the path is empty")
    if "\0" in text:
        raise RefusedError("there is a null byte in the path; the content of a file is passed as bytes, not as str")
    if path.is_dir():
        yield from _expand_folder(path, recursive)
    elif path.exists():
        yield text, path
    elif urls.scheme(text):
        yield text, urls.parse(text)
    elif folders.is_pattern(text):
        yield from _expand_pattern(text, recursive)
    else:
        raise RefusedError(folders.describe_missing(path))


def _expand_folder(folder: Path, recursive: bool) -> Iterator[tuple[str, Payload]]:
    empty = True
    for path, error in folders.walk(folder, recursive=recursive):
        empty = False
        yield str(path), error or path
    if empty:
        raise RefusedError(folders.describe_empty(folder, recursive=recursive))


def _expand_pattern(pattern: str, recursive: bool) -> Iterator[tuple[str, Payload]]:
    empty = True
    for match in folders.matches(pattern):
        files = folders.walk(match, recursive=recursive) if match.is_dir() else [(match, None)]
        for path, error in files:
            empty = False
            yield str(path), error or path
    if empty:
        raise RefusedError("no such file, and as a pattern it matches no image file")


def _expand_array(value: Any, recursive: bool, *, lasting: bool, depth: int) -> Iterator[tuple[str | None, Payload]]:
    try:
        array = arrays.to_numpy(value)
        if array.ndim == 1 and array.dtype.kind in "OUT":  # a column of paths
            yield from _expand(array.tolist(), recursive, lasting=lasting, depth=depth)
            return
        images = arrays.split(array)
    except RefusedError as error:
        yield None, error
        return
    for image in images:
        yield None, image if lasting else image.copy()


def _image(image: Image.Image, *, lasting: bool) -> tuple[str | None, Payload]:
    path = getattr(image, "filename", None) or None
    try:
        return (str(path) if path else None), (image if lasting else image.copy())
    except Exception as error:  # copying loads it, and a damaged file makes Pillow's plugins raise nearly anything
        reason = f"the image cannot be decoded: {str(error) or type(error).__name__}"
        return (str(path) if path else None), RefusedError(reason)


def _file_object(file: Any) -> tuple[str | None, Payload]:
    name = getattr(file, "name", None)
    path = name if isinstance(name, str) else None
    try:
        content = file.read()
    except Exception as error:  # anything: the object may be of any library
        return path, RefusedError(f"the file object cannot be read: {error}")
    if not isinstance(content, bytes):
        return path, RefusedError("the file object is opened for text; open it with mode 'rb'")
    if not content:
        return path, RefusedError("the file object has nothing left to read; seek(0) if it was read before")
    return path, content
