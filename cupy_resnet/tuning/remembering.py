"""Writes tables of measured choices, so that several processes that tune at once lose nothing of each other's."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..conv2d import tuned
from ..weights_store.writing import write_file

logger = logging.getLogger(__name__)

_told: set[Path] = set()


def remember(gpu: str, entries: Iterable[tuned.Entry]) -> Path | None:
    """Adds entries to the user's own table; they take effect at once.

    Where it cannot be written, one warning says so, and the entries hold for this process only.

    Args:
        gpu: name of the GPU they were measured on.
        entries: in place of older ones for the same problems.

    Returns:
        The table's file, or None where it cannot be written.
    """
    new = list(entries)
    path = tuned.own_path(gpu)
    try:
        if not path.is_absolute():
            raise OSError("this system knows no home folder")
        with _locked(path.with_suffix(".lock")):
            write_file(path, tuned.read_own(gpu).merged(new).dump())
    except OSError as error:
        if path not in _told:
            _told.add(path)
            logger.warning(
                "what was measured cannot be kept in %s (%s) and holds for this process only. "
                "Set CUPY_RESNET_CACHE_DIR to a writable folder.",
                path,
                error,
            )
        tuned.keep(gpu, new)
        return None
    tuned.forget(gpu)
    return path


def write_table(path: Path, gpu: str, entries: Iterable[tuned.Entry]) -> tuned.Table:
    """Writes a table that can be shipped as ``cupy_resnet/conv2d/tuned_*.json``, for the family of `gpu`.

    Entries are added to those that the file has for this family and the same kernels; any other content is replaced.

    Args:
        path: the file.
        gpu: name of the GPU they were measured on.
        entries: in place of older ones for the same problems.

    Returns:
        What was written.

    Raises:
        OSError: the file cannot be written.
    """
    table = tuned.Table(tuned.family(gpu), tuned.kernels_digest())
    with contextlib.suppress(FileNotFoundError, ValueError):
        before = tuned.Table.parse(path.read_bytes())
        if (before.gpu, before.sources_digest) == (table.gpu, table.sources_digest):
            table = before
        else:
            logger.info("%s was for %s or for other kernels; it is replaced", path, before.gpu)
    table = table.merged(entries)
    write_file(path, table.dump())
    return table


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that other processes and threads wait for.

    It goes with the process that holds it, however that ends. On systems and file systems that know no such locks
    nobody waits, and of two that write at the same moment one may lose its entries.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("%s cannot be locked: %s", path, error)
        yield
    finally:
        os.close(descriptor)
