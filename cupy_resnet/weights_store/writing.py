"""Files that exist as a whole or not at all."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_TEMPORARY = ".writing-"
_STALE_SECONDS = 7 * 24 * 3600  # a night's run writes its JSON or table at the end: its file is old, yet in use


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, replacing an existing one: under a temporary name, to the disk, then renamed.

    A process killed at any moment leaves what was there before; its temporary file is removed by a later call in the
    same folder, a week after it was last written.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(path.parent) as temporary:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextlib.contextmanager
def temporary_file(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Gives the path of a new, empty file in `folder`; it is removed at the end unless it was renamed."""
    _remove_stale(folder)
    path = folder / f"{_TEMPORARY}{uuid.uuid4().hex}{suffix}"
    path.open("xb").close()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
