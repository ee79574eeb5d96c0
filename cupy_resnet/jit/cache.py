"""A content-addressed cache of cubins, on disk and in memory.

On disk an entry is two files: ``<name>-<key>.json`` (the log, and the sha256 of the cubin) and
``<name>-<sha256 of the cubin>.cubin``, a plain cubin that the driver can load from there. Each file is written
under a temporary name and put in place by ``os.replace``, the cubin first. So a reader sees either a complete entry
or none: a process that is killed leaves at most an orphan, and processes that race put equal or complete files over
each other. What was read is checked against its sha256; an entry that fails is compiled again and replaced.

No lock is held between processes: eight that start cold may compile the same kernel eight times, once, and none can
be left waiting for a lock whose owner died or whose file system does not know locks.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_TEMPORARY = ".writing-"
_STALE_SECONDS = 3600
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A cubin, the compiler's log, and the cubin's file (None if it is only in memory)."""

    cubin: bytes
    log: str
    path: Path | None


class KernelCache:
    """Cubins by key. Safe to use from threads and from any number of processes on one folder.

    Args:
        folder: where entries are kept; created when the first is written. None keeps them in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._writable = folder is not None
        self._entries: dict[str, Entry] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()

    def get(self, key: str, name: str, build: Callable[[], tuple[bytes, str]]) -> Entry:
        """Returns the entry of a key; calls `build` for (cubin, log) if there is none.

        Of several threads that ask for one key, one builds and the others wait for its result.

        Args:
            key: hexadecimal digest of everything the cubin depends on.
            name: prefix of the file names, for people who look into the folder.
            build: compiles; what it raises is passed on and nothing is stored.
        """
        entry = self._entries.get(key)
        if entry is not None:
            return entry
        with self._guard:
            lock = self._locks[key]
        with lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._read(key, name) or self._write(key, name, *build())
                self._entries[key] = entry
        return entry

    def _read(self, key: str, name: str) -> Entry | None:
        if self.folder is None:
            return None
        path = self.folder / f"{name}-{key}.json"
        try:
            metadata = json.loads(path.read_bytes())
            sha256, log = metadata["sha256"], metadata["log"]
            if not (isinstance(log, str) and _SHA256.fullmatch(sha256)):
                raise ValueError("not an entry of this cache")
            cubin_path = self.folder / f"{name}-{sha256}.cubin"
            cubin = cubin_path.read_bytes()
            if hashlib.sha256(cubin).hexdigest() != sha256:
                raise ValueError(f"{cubin_path.name} does not have the sha256 in its name")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("cache entry %s is unusable and will be compiled again: %s", path, error)
            return None
        return Entry(cubin, log, cubin_path)

    def _write(self, key: str, name: str, cubin: bytes, log: str) -> Entry:
        if self.folder is None or not self._writable:
            return Entry(cubin, log, None)
        sha256 = hashlib.sha256(cubin).hexdigest()
        cubin_path = self.folder / f"{name}-{sha256}.cubin"
        metadata = json.dumps({"sha256": sha256, "log": log}).encode()
        try:
            if not self.folder.is_absolute():
                raise OSError("the folder's path is relative: this system has no home folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.folder)
            _replace(cubin_path, cubin)
            _replace(self.folder / f"{name}-{key}.json", metadata)
        except OSError as error:
            with self._guard:
                first, self._writable = self._writable, False
            if first:
                logger.warning(
                    "compiled kernels cannot be kept in %s (%s); they are kept in memory and compiled again by every "
                    "process. Set CUPY_RESNET_CACHE_DIR to a writable folder.",
                    self.folder,
                    error,
                )
            return Entry(cubin, log, None)
        return Entry(cubin, log, cubin_path)


def file_of(entry: Entry) -> Path:
    """Returns a file with an entry's cubin: the cache's own, or a temporary one that lives as long as the process."""
    if entry.path is not None and entry.path.is_file():
        return entry.path
    path = _temporary_folder() / f"{hashlib.sha256(entry.cubin).hexdigest()}.cubin"
    if not path.is_file():
        _replace(path, entry.cubin)
    return path


def _replace(path: Path, content: bytes) -> None:
    """Puts a file in place as a whole: no reader sees a part of it."""
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_stale(folder: Path) -> None:
    """Removes temporary files that killed processes left, none that may still be written."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


_temporary_folders: dict[int, Path] = {}
_temporary_guard = threading.Lock()


def _temporary_folder() -> Path:
    # By process id: a forked child neither uses nor removes its parent's folder.
    with _temporary_guard:
        pid = os.getpid()
        if pid not in _temporary_folders:
            path = Path(tempfile.mkdtemp(prefix="cupy_resnet-"))
            _temporary_folders[pid] = path
            atexit.register(_remove_temporary_folder, pid)
        return _temporary_folders[pid]


def _remove_temporary_folder(pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(_temporary_folders[pid], ignore_errors=True)
