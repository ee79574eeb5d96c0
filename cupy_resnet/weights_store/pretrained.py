"""torchvision's weights by their own names: fetched, checked and converted once, then read without torch.

In the cache folder an entry is two files: ``resnet50-IMAGENET1K_V2.safetensors``, and a ``.json`` of the same name
with its sha256 and what else is known, written last. An entry is used only if the whole file has that sha256, so
neither a killed process nor a failing disk makes half a file pass for weights. The lock beside them spares others the
download while one process is at it; should it not hold, they do the same work and write the same bytes.
"""

import contextlib
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .. import environment
from .._names import unknown_name
from ..checkpoint_files import file_sha256
from ..checkpoints import read_state_dict, verify
from ..errors import CheckpointError
from ..images.transforms import Transforms
from ..networks import describe
from .categories import imagenet_classes
from .download import DownloadError, Progress, download
from .encoding import safetensors_bytes
from .weights import Weights, described
from .writing import temporary_file, write_file

logger = logging.getLogger(__name__)

_V1, _V1_V2 = ("IMAGENET1K_V1",), ("IMAGENET1K_V1", "IMAGENET1K_V2")

NAMES = {
    "resnet18": _V1,
    "resnet34": _V1,
    "resnet50": _V1_V2,
    "resnet101": _V1_V2,
    "resnet152": _V1_V2,
    "resnext50_32x4d": _V1_V2,
    "resnext101_32x8d": _V1_V2,
    "resnext101_64x4d": _V1,
    "wide_resnet50_2": _V1_V2,
    "wide_resnet101_2": _V1_V2,
}
"""Network → the names of torchvision's weights; the last is what torchvision calls DEFAULT."""

_ENTRY_VERSION = 1
_LOCK_SECONDS = 1800
_NAME = re.compile(r"(?:(?P<owner>\w+)_Weights\.)?(?P<name>\w+)")


class UnobtainableError(RuntimeError):
    """torchvision's weights cannot be had; the message is the reason."""


def parse(network: str, text: str) -> str | None:
    """Returns torchvision's name of weights, DEFAULT replaced by what it stands for; None if `text` is no such name.

    Raises:
        ValueError: such a name, but of another network's weights or of weights that do not exist.
    """
    match = _NAME.fullmatch(text)
    if match is None or not (match["owner"] or text == "DEFAULT" or text.upper().startswith("IMAGENET1K")):
        return None
    if network not in NAMES:
        raise ValueError(f"torchvision has no weights of {network}: {text!r} is for {', '.join(NAMES)}")
    if match["owner"] and match["owner"].lower() != network:
        raise ValueError(f"{text} is not for {network}: its weights are {', '.join(NAMES[network])}")
    if match["name"] == "DEFAULT":
        return NAMES[network][-1]
    if match["name"] not in NAMES[network]:
        raise ValueError(unknown_name(f"weights of {network}", match["name"], [*NAMES[network], "DEFAULT"]))
    return match["name"]


def obtain(network: str, name: str, progress: Progress | None = None) -> Weights:
    """Returns torchvision's weights `name` of `network`: from the cache, else fetched and kept there.

    A cache that cannot be written costs a warning, and a download every time.

    Raises:
        UnobtainableError: they are not in the cache, and torch or the network is missing, or the download is wrong.
    """
    folder = environment.cache_dir() / "weights"
    found = _read_entry(folder, network, name)
    if found is not None:
        return found
    try:
        if not folder.is_absolute():
            raise OSError("its path is relative: this system has no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{network}-{name}.lock"):
            return _read_entry(folder, network, name) or _fetch(network, name, folder, progress)
    except OSError as error:
        logger.warning(
            "weights cannot be kept in %s (%s); they are fetched again every time. Set %s to a writable folder.",
            folder,
            error,
            environment.CACHE_DIR.name,
        )
    try:
        with tempfile.TemporaryDirectory(prefix="cupy_resnet-") as temporary:
            return replace(_fetch(network, name, Path(temporary), progress), path=None)
    except OSError as error:
        raise UnobtainableError(f"there is no folder to download them to ({error})") from error


def _read_entry(folder: Path, network: str, name: str) -> Weights | None:
    """Returns the cached conversion, None if there is none or it is damaged."""
    path = folder / f"{network}-{name}.safetensors"
    try:
        record = json.loads(path.with_suffix(".json").read_bytes())
        if record["version"] != _ENTRY_VERSION:
            raise ValueError(f"it was written by another version of cupy_resnet ({record['version']})")
        sha256 = file_sha256(path)
        if sha256 != record["sha256"]:
            raise ValueError(f"its sha256 is {sha256}, not the {record['sha256']} recorded when it was written")
        known = described(record, str(path))
        return Weights(model=network, name=name, state=read_state_dict(path), sha256=sha256, path=path, **known)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not used: %s", path, error)
        return None


def _fetch(network: str, name: str, folder: Path, progress: Progress | None) -> Weights:
    """Downloads, checks, converts and keeps weights; the last needs torch."""
    url, transforms, categories, own_copy = _published(network, name)
    sha256_prefix = _sha256_prefix(url)
    with temporary_file(folder, ".pth") as temporary:
        try:
            checkpoint, source_sha256 = own_copy, file_sha256(own_copy) if own_copy.is_file() else ""
            if not source_sha256.startswith(sha256_prefix):
                checkpoint, source_sha256 = temporary, download(url, temporary, sha256_prefix, progress)
            logger.info("converting %s", checkpoint)
            state = read_state_dict(checkpoint)
            verify(state, describe(network, num_classes=len(categories)).tensor_table(), network)
        except (DownloadError, CheckpointError) as error:
            raise UnobtainableError(str(error)) from error
    classes = imagenet_classes()
    weights = Weights(
        model=network,
        name=name,
        state=state,
        source=url,
        source_sha256=source_sha256,
        transforms=transforms.to_dict(),
        categories=categories,
        wnids=[wnid for _, wnid, _ in classes] if categories == [label for _, _, label in classes] else None,
    )
    path, content = folder / f"{network}-{name}.safetensors", safetensors_bytes(weights)
    record = {"version": _ENTRY_VERSION, "sha256": hashlib.sha256(content).hexdigest(), **weights.metadata()}
    write_file(path, content)
    write_file(path.with_suffix(".json"), json.dumps(record, ensure_ascii=False, indent=1).encode())
    found = _read_entry(folder, network, name)
    if found is None:
        raise OSError(f"{path} cannot be read back as it was written")
    return found


def _published(network: str, name: str) -> tuple[str, Transforms, list[str], Path]:
    """Asks torchvision for the weights' URL, transforms and categories, and where torch would keep its own copy."""
    try:
        import torch
        import torchvision
    except (ImportError, OSError, RuntimeError) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in ("torch", "torchvision")
        reason = "torch and torchvision are not installed" if absent else f"torchvision cannot be imported ({error})"
        raise UnobtainableError(f"they are not in the cache folder, and {reason}") from error
    entry = torchvision.models.get_model_weights(network)[name]
    preset = entry.transforms()
    transforms = Transforms(
        resize=preset.resize_size[0],
        crop=preset.crop_size[0],
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
    )
    own_copy = Path(torch.hub.get_dir()).expanduser() / "checkpoints" / entry.url.rpartition("/")[2]
    return entry.url, transforms, list(entry.meta["categories"]), own_copy


def _sha256_prefix(url: str) -> str:
    """Returns the part of a file's sha256 that torchvision puts into the file's name."""
    match = re.search(r"-([0-9a-f]{8,64})\.pth$", url)
    if match is None:
        raise UnobtainableError(f"the name of {url} has no part of its sha256, so that it cannot be checked")
    return match[1]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the system gives it up with its owner, however that ends."""
    try:
        import filelock
    except ImportError as error:
        raise UnobtainableError("they are not in the cache folder, and the torch extra is not installed") from error
    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("waiting for another process that fetches the same weights (%s)", path)
            lock.acquire(timeout=_LOCK_SECONDS)
    except (filelock.Timeout, NotImplementedError) as error:
        logger.warning("%s cannot be locked (%s); going on without", path, error)
    try:
        yield
    finally:
        lock.release()
