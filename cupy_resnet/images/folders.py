"""Finds image files: in folders, by patterns, and near a name that does not exist. Lists, and opens nothing."""

import difflib
import glob
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .errors import RefusedError

_KINDS = (
    "apng avif bmp gif heic heif ico j2k jfif jp2 jpe jpeg jpg jpx mpo pbm pgm png pnm ppm psd qoi tga tif tiff webp"
)
SUFFIXES = frozenset("." + kind for kind in _KINDS.split())
"""What a file's name ends with, in lower case, to be taken from a folder.

Those of photographs that only some installations can read (AVIF, HEIC) are among them: an error that says so beats a
photograph that is passed over in silence.
"""

_ARCHIVE_REMAINS = "__MACOSX"  # what macOS adds to ZIP archives: files named like the images that are none
_NAMES_COMPARED = 5000


def is_image_name(name: str) -> bool:
    """Returns whether a file of this name is taken from a folder: a suffix of `SUFFIXES`, and not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122


def walk(folder: Path, *, recursive: bool) -> Iterator[tuple[Path, RefusedError | None]]:
    """Yields the image files of a folder and its subfolders, sorted by the names along the path.

    Names that begin with a dot are left out, folders' too (``.thumbnails``, the ``._photo.jpg`` of macOS), and so is
    ``__MACOSX``. Links to folders are followed, but never in a circle. One folder's names are in memory at a time.

    Yields:
        An image file and None, or a folder and why it cannot be listed.
    """
    above = [_identity(folder)]
    names: list[Iterator[tuple[str, bool]]] = [iter(())]
    paths = [folder]
    try:
        names = [_listing(folder)]
    except OSError as error:
        yield folder, RefusedError(f"the folder cannot be listed: {error.strerror}")
    while names:
        name, is_folder = next(names[-1], ("", False))
        if not name:
            for stack in (names, paths, above):
                stack.pop()
            continue
        path = paths[-1] / name
        if not is_folder:
            yield path, None
        elif recursive and (identity := _identity(path)) not in above:
            try:
                names.append(_listing(path))
            except OSError as error:
                yield path, RefusedError(f"the folder cannot be listed: {error.strerror}")
                continue
            paths.append(path)
            above.append(identity)


def matches(pattern: str) -> Iterator[Path]:
    """Yields what a glob pattern matches (``**`` crosses folders), sorted by the names along the path.

    A pattern that ends in a suffix of its own, such as ``*.dat``, matches any file so named; one that does not, such
    as ``photos/*``, takes image files only, as a folder does. Folders that match are yielded too, for their images,
    except under ``**``, which would count their files twice.
    """
    suffix = os.path.splitext(pattern)[1]  # noqa: PTH122
    any_file = bool(suffix) and not glob.has_magic(suffix)
    found = (Path(name) for name in glob.iglob(os.path.expanduser(pattern), recursive=True))  # noqa: PTH111, PTH207
    for path in sorted(found, key=lambda path: path.parts):
        if _ARCHIVE_REMAINS in path.parts:
            continue
        if path.is_dir():
            if "**" not in pattern:
                yield path
        elif any_file or is_image_name(path.name):
            yield path


def is_pattern(text: str) -> bool:
    """Returns whether the text has one of glob's characters in it: ``*``, ``?`` or ``[``."""
    return glob.has_magic(text)


def describe_missing(path: Path) -> str:
    """Returns why there is no such file: a dead link, a missing folder, or names in the folder that are close."""
    if path.is_symlink():
        return f"the link points to {path.readlink()}, which does not exist"
    where = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
    if not path.parent.is_dir():
        return f"no such file: there is no folder {str(path.parent)!r} either{where}"
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _NAMES_COMPARED)]
    except OSError:
        names = []
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(path.name.lower(), lower, n=3, cutoff=0.75)
    hint = f"; did you mean {' or '.join(repr(str(path.with_name(lower[name]))) for name in close)}?" if close else ""
    return f"no such file{where}{hint}"


def describe_empty(folder: Path, *, recursive: bool) -> str:
    """Returns the reason for a folder in which no image file was found, with what is in it instead."""
    depth = "it or its subfolders" if recursive else "it (subfolders were not searched)"
    try:
        with os.scandir(folder) as entries:
            kinds = Counter(
                os.path.splitext(entry.name)[1].lower() or "no suffix"  # noqa: PTH122
                for entry in itertools.islice(entries, _NAMES_COMPARED)
                if not entry.is_dir()
            )
    except OSError:
        kinds = Counter()
    others = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
    return f"the folder has no image files in {depth}" + (f"; it holds {others}" if others else "")


def _listing(folder: Path) -> Iterator[tuple[str, bool]]:
    """Returns the names of images and folders to look into, sorted, each with whether it is a folder."""
    with os.scandir(folder) as entries:
        listed = (
            (entry.name, entry.is_dir())
            for entry in entries
            if not entry.name.startswith(".") and entry.name != _ARCHIVE_REMAINS
        )
        return iter(sorted(item for item in listed if item[1] or is_image_name(item[0])))


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)
