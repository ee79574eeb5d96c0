"""Recordings as folders, to be compared on another machine or with another program.

A dump holds

- ``input.npy``: what the network was given, (N, C, H, W), normalised, floating point;
- for each checkpoint a file ``<name>.npz`` with one array, whatever its key: ``stem.npz`` and ``layer1.0.npz`` with
  (N, C, H, W), ``gap.npz`` and ``logits.npz`` with (N, C); float16, float32 or float64;
- ``manifest.json``, which a dump of another program need not have: an object with

  - ``format``, ``"cupy_resnet checkpoints"``, and ``version``, 1;
  - ``model``: the network's name or null; ``weights``: an object with their ``name`` and the ``sha256`` of their file,
    both empty strings if unknown;
  - ``computed_by``: in words; ``precision``: as ``cupy_resnet.load`` takes it, ``"fp32"`` if absent;
  - ``input``: an object with ``from``, in words, and ``shape``;
  - ``checkpoints``: in the order they were computed, objects with ``name``, ``shape`` and ``dtype``.

Without a manifest every ``.npz`` file is a checkpoint, and the model is the one it is compared with.
"""

import contextlib
import io
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...weights_store.writing import write_file
from .recording import Recording

FORMAT, VERSION = "cupy_resnet checkpoints", 1
MANIFEST, INPUT = "manifest.json", "input.npy"

_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]*")
_LAST = ("gap", "logits")


def write_dump(folder: Path, recording: Recording) -> None:
    """Writes a recording; the folder appears as a whole or not at all.

    Args:
        folder: what is not there yet, an empty folder, or an earlier dump, which is replaced.
        recording: with names of checkpoints that can be names of files.

    Raises:
        OSError: the folder holds other things, or cannot be written.
        ValueError: a checkpoint's name cannot be a file's.
    """
    check_target(folder)
    if wrong := [name for name in recording.values if not _NAME.fullmatch(name)]:
        raise ValueError(f"a checkpoint called {wrong[0]!r} cannot be a file")
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(folder.parent) as temporary:
        checkpoints = []
        for name, value in recording.values.items():
            file = io.BytesIO()
            np.savez(file, output=value)
            write_file(temporary / f"{name}.npz", file.getvalue())
            checkpoints.append({"name": name, "shape": list(value.shape), "dtype": value.dtype.name})
        file = io.BytesIO()
        np.save(file, recording.input)
        write_file(temporary / INPUT, file.getvalue())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "model": recording.model,
            "weights": {"name": recording.weights, "sha256": recording.weights_sha256},
            "computed_by": recording.computed_by,
            "precision": recording.precision,
            "input": {"from": recording.input_from, "shape": list(recording.input.shape)},
            "checkpoints": checkpoints,
        }
        write_file(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        with _temporary_folder(folder.parent) as before:
            replaced = folder.exists() and folder.rename(before)
            try:
                temporary.rename(folder)
            except OSError:
                if replaced:
                    before.rename(folder)
                raise


def check_target(folder: Path) -> None:
    """Raises FileExistsError if `write_dump` would refuse this place: work of hours should not end there."""
    if folder.is_dir():
        others = [
            path.name for path in folder.iterdir() if not (path.name in (MANIFEST, INPUT) or path.suffix == ".npz")
        ]
        if others or (any(folder.iterdir()) and _manifest(folder).get("format") != FORMAT):
            raise FileExistsError(
                f"{folder} is neither empty nor a dump of this program ({', '.join(others[:3]) or f'no {MANIFEST}'}); "
                "name a new folder"
            )
    elif folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists and is not a folder; name a new folder")


def read_dump(folder: Path) -> Recording:
    """Reads a dump, of this program or another; a checkpoint's file is read when it is asked for.

    Raises:
        FileNotFoundError: there is no such folder, or no input or no checkpoint in it.
        ValueError: a file is damaged or not of the format; the message names it and what is wrong.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if not (folder / INPUT).is_file():
        raise FileNotFoundError(f"{folder} is no dump: it has no {INPUT}, the network's input as (N, C, H, W)")
    manifest = _manifest(folder)
    if manifest and (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{folder / MANIFEST} is not of the format {FORMAT!r}, version {VERSION}")
    if manifest:
        names = [str(_entry(folder, checkpoint, "name", str)) for checkpoint in _entry(folder, manifest, "checkpoints")]
        if wrong := [name for name in names if not _NAME.fullmatch(name)]:
            raise ValueError(f"{folder / MANIFEST}: {wrong[0]!r} cannot be a checkpoint's name")
    else:
        names = sorted((path.stem for path in folder.glob("*.npz")), key=_order)
    if not names:
        raise FileNotFoundError(f"{folder} is no dump: it has no checkpoints, files such as stem.npz and logits.npz")
    weights, given = (_entry(folder, manifest, key, dict, {}) for key in ("weights", "input"))
    return Recording(
        values=_Files(folder, names),
        input=_floating(folder / INPUT, _load(folder / INPUT)),
        input_from=_entry(folder, given, "from", str, ""),
        model=_entry(folder, manifest, "model", (str, type(None)), None),
        computed_by=f"{_entry(folder, manifest, 'computed_by', str, 'another program')} (dump {folder})",
        precision=_entry(folder, manifest, "precision", str, "fp32"),
        weights=_entry(folder, weights, "name", str, ""),
        weights_sha256=_entry(folder, weights, "sha256", str, ""),
    )


class _Files(Mapping[str, np.ndarray]):
    """Checkpoints in files, each read when it is asked for."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = folder, names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        path = self._folder / f"{name}.npz"
        arrays = _load(path)
        if not isinstance(arrays, dict) or len(arrays) != 1:
            held = ", ".join(arrays) if isinstance(arrays, dict) else "no named arrays"
            raise ValueError(f"{path} must hold one array, got {held or 'none'}")
        value = _floating(path, next(iter(arrays.values())))
        # Hooks on torch's pooling layer give (N, C, 1, 1).
        return value.reshape(value.shape[:2]) if name in _LAST and value.shape[2:] == (1, 1) else value

    def __contains__(self, name: object) -> bool:  # without reading the file
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _load(path: Path) -> Any:
    """Reads an array of .npy, or the arrays of .npz by their keys."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {MANIFEST} lists it") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _floating(path: Path, array: Any) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"{path} must hold float16, float32 or float64, got {getattr(array, 'dtype', 'an archive')}")
    return array


def _manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest, empty if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} is not a JSON object")
    return manifest


_REQUIRED = object()


def _entry(folder: Path, values: Any, key: str, kind: Any = list, default: Any = _REQUIRED) -> Any:
    value = values.get(key, default) if isinstance(values, dict) else _REQUIRED
    if value is _REQUIRED or not isinstance(value, kind):
        raise ValueError(f"{folder / MANIFEST}: {key!r} is missing or of the wrong type")
    return value


def _order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """A key that sorts as networks compute: the stem, blocks by their numbers, the pooled features, the logits."""
    parts = re.split(r"(\d+)", name)
    numbered = [(int(part), "") if part.isdigit() else (0, part) for part in parts]
    return 0 if name == "stem" else 2 + _LAST.index(name) if name in _LAST else 1, numbered


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """Gives an empty folder; it is removed at the end, with what is in it, unless it was renamed."""
    path = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
