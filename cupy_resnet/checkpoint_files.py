"""Reads checkpoint files into nested mappings of arrays. Imports no CuPy, and torch only to read torch's own files.

safetensors and npz cannot run code; ``.pth`` and ``.pt`` are pickles and are read with ``weights_only=True``. A
``.json`` file is a manifest: a description of the network, with the tensors in an ``.npz`` beside it.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError

SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".json")

METADATA_KEY = "cupy_resnet"
"""Entry of a safetensors header under which the package keeps what it knows about the weights, as one JSON text."""

MANIFEST_FORMAT = "cupy_resnet npz+json 1"
"""What a manifest's ``format`` says; the number grows when a reader of this one could not read the next."""

_SAFETENSORS_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def read_file(path: Path) -> Mapping[str, Any]:
    """Reads one checkpoint file.

    Returns:
        What the file holds: arrays (NumPy, or torch's on the CPU) under their keys, possibly nested.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a folder, an empty, truncated or foreign file, or an unknown suffix.
        ImportError: a torch file without torch installed.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; give one that ends in {', '.join(SUFFIXES)}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise CheckpointError(f"{path} has the suffix {suffix!r}; checkpoints end in {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty; the download or copy was not finished")
    if suffix == ".safetensors":
        return _read_safetensors(path)
    if suffix == ".npz":
        return _read_npz(path)
    if suffix == ".json":
        return _read_manifest_tensors(path)
    return _read_torch(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns what the package recorded in a file beside the tensors; empty for files it did not write.

    Args:
        path: a file that `read_file` has read.

    Raises:
        CheckpointError: there is a record, but it is no JSON object.
    """
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _read_manifest(path)
    if suffix != ".safetensors":
        return {}
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    text = header.get("__metadata__", {}).get(METADATA_KEY, "{}")
    try:
        metadata = json.loads(text)
        if not isinstance(metadata, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise CheckpointError(f"{path}: the metadata under {METADATA_KEY!r} cannot be read: {error}") from error
    return metadata


def file_sha256(path: Path) -> str:
    """Returns the sha256 of a whole file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_sha256(array: np.ndarray) -> str:
    """Returns the sha256 of an array's elements in C order and little-endian, in hexadecimal."""
    little_endian = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return hashlib.sha256(little_endian.tobytes()).hexdigest()


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widens bfloat16, given as uint16 bit patterns, to float32: exact, bfloat16 being float32's upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    import safetensors

    try:
        entries = safetensors.deserialize(path.read_bytes())
    except Exception as error:
        raise _unreadable(path, "a safetensors file", error) from error
    tensors = {}
    for key, entry in entries:
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{path}: {key} is {entry['dtype']}; the library reads F64, F32, F16 and BF16")
        array = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
        tensors[key] = bfloat16_to_float32(array) if entry["dtype"] == "BF16" else array
    return tensors


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY" and not zipfile.is_zipfile(path):
                # NumPy takes such a file for a pickle, and its text advises allow_pickle, which would run its code.
                raise ValueError("it is no complete zip archive")
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array, not an archive of named arrays")
        with archive:
            content = {key: archive[key] for key in archive.files}
    except Exception as error:
        raise _unreadable(path, "an npz file of plain arrays", error) from error
    if not all(isinstance(value, np.ndarray) for value in content.values()):
        raise _unreadable(path, "an npz file of plain arrays", ValueError("it holds files that are no arrays"))
    return content


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unreadable(path, "a manifest", error) from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != MANIFEST_FORMAT:
        raise CheckpointError(f"{path} is no manifest of weights: its format is {found!r}, not {MANIFEST_FORMAT!r}")
    return manifest


def _read_manifest_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads the archive that a manifest names, and checks each tensor's shape, dtype and sha256."""
    manifest = _read_manifest(path)
    try:
        archive = str(manifest["tensors_file"])
        table = {
            key: (tuple(entry["shape"]), str(entry["dtype"]), str(entry["sha256"]))
            for key, entry in manifest["tensors"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no complete manifest: {type(error).__name__} {error}") from error
    if Path(archive).name != archive:
        raise CheckpointError(f"{path} names {archive!r} as its archive, which is not a file's name beside it")
    if not path.with_name(archive).is_file():
        raise FileNotFoundError(f"{path} keeps its tensors in {archive}, which does not lie beside it")
    tensors = _read_npz(path.with_name(archive))
    faults = [f"{key} is left over" for key in tensors if key not in table]
    for key, (shape, dtype, sha256) in table.items():
        array = tensors.get(key)
        if array is None:
            faults.append(f"{key} is missing")
        elif (array.shape, array.dtype.name) != (shape, dtype):
            faults.append(f"{key} is {array.dtype.name} {array.shape}, not {dtype} {shape}")
        elif tensor_sha256(array) != sha256:
            faults.append(f"{key} has another sha256")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{archive} is not the archive that {path} describes: {'; '.join(faults[:3])}{more}")
    return tensors


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs torch: pip install 'cupy-resnet[torch]', "
            "or convert the file to safetensors where torch is installed"
        ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own text advises weights_only=False, which would let the file run code.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused:
            raise CheckpointError(
                f"{path} holds a Python object ({refused[1]}), and such files can run code; where you trust it, "
                "load it in torch and save model.state_dict()"
            ) from error
        reason = ValueError("it cannot be unpickled") if "weights_only" in str(error) else error
        raise _unreadable(path, "a torch file of tensors", reason) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict; save model.state_dict()")
    return content


def _unreadable(path: Path, wanted: str, error: Exception) -> CheckpointError:
    detail = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    looks_like = _sniff(path)
    found = f"; it looks like {looks_like}" if looks_like else ""
    size = path.stat().st_size
    return CheckpointError(f"{path} ({size} bytes) cannot be read as {wanted}: {detail.rstrip('.')[:200]}{found}")


def _sniff(path: Path) -> str | None:
    """Says what a file that its suffix belies really is, or that it is cut short."""
    with path.open("rb") as file:
        head = file.read(200)
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer: run git lfs pull"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page saved in place of the file"
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile:
            return "a truncated archive"
        if any(name.endswith("data.pkl") for name in names):
            return "a torch file (.pth)"
        return "an npz file" if any(name.endswith(".npy") for name in names) else "a zip archive of something else"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{":
        try:
            with path.open("rb") as file:
                file.seek(8)
                json.loads(file.read(length))
        except (ValueError, OverflowError, MemoryError):
            return "a truncated safetensors file"
        return "a safetensors file, damaged or truncated" if path.suffix == ".safetensors" else "a safetensors file"
    return "a pickle" if head.startswith(b"\x80") else None
