"""`Weights`: a state dict with what is known about it, and that knowledge as a file's metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints import infer_sizes
from ..errors import CheckpointError
from ..images.transforms import Transforms

METADATA: dict[str, type | tuple[type, ...]] = {
    "transforms": dict,
    "categories": list,
    "wnids": list,
    "batch_norm_eps": (float, int, dict),
    "training": dict,
}
"""Optional entries of a file's metadata, and their types; beside ``model``, ``source`` and ``source_sha256``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """A state dict and what is known about it.

    Args:
        model: the network's name, as ``"resnet20"``.
        name: what these weights are called: ``"IMAGENET1K_V1"``, ``"resnet20-cifar10"``, a file's name.
        state: torchvision's keys to NumPy arrays, filters as OIHW, dtypes as stored.
        source: where they were first obtained: a URL, a file's name, or words.
        source_sha256: of the file at `source`, in hexadecimal; empty if it was none.
        sha256: of the file they were read from now, in hexadecimal; empty for a mapping.
        path: that file; None for a mapping.
        transforms: what turns a photograph into the network's input, as `Transforms.to_dict` gives it.
        categories: the classes' names by index; None where nobody said.
        wnids: the classes' WordNet ids by index; None where there are none.
        batch_norm_eps: one value, or BatchNorm names to values; None means torch's 1e-5.
        training: a record of how they were trained, if there is one.
    """

    model: str
    name: str
    state: Mapping[str, np.ndarray] = field(repr=False)
    source: str
    source_sha256: str = ""
    sha256: str = ""
    path: Path | None = None
    transforms: dict[str, Any]
    categories: list[str] | None = field(default=None, repr=False)
    wnids: list[str] | None = field(default=None, repr=False)
    batch_norm_eps: float | dict[str, float] | None = None
    training: dict[str, Any] | None = field(default=None, repr=False)

    def label(self, index: int) -> str:
        """Returns the name of a class, ``"class 3"`` where there are no names."""
        return f"class {index}" if self.categories is None else self.categories[index]

    def metadata(self) -> dict[str, Any]:
        """Returns what a file keeps beside the tensors; `described` is the way back."""
        known = {key: getattr(self, key) for key in METADATA}
        return {
            "model": self.model,
            "source": self.source,
            "source_sha256": self.source_sha256,
            **{key: value for key, value in known.items() if value is not None},
        }


def described(metadata: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the arguments of `Weights` that a file's metadata holds.

    Args:
        metadata: as `Weights.metadata` wrote it; unknown entries are ignored.
        place: the file, for messages.

    Raises:
        CheckpointError: an entry has the wrong type, or transforms are incomplete.
    """
    found = {key: metadata[key] for key in METADATA if metadata.get(key) is not None}
    for key, value in found.items():
        good = isinstance(value, METADATA[key])
        if key in ("categories", "wnids"):
            good = good and all(isinstance(name, str) for name in value)
        if not good:
            raise CheckpointError(f"{place}: cannot use {key} of its metadata: {repr(value)[:80]}")
    if "transforms" in found:
        try:
            found["transforms"] = Transforms.from_dict(found["transforms"]).to_dict()
        except ValueError as error:
            raise CheckpointError(f"{place}: its metadata's transforms cannot be used: {error}") from error
    return found | {key: str(metadata[key]) for key in ("source", "source_sha256") if key in metadata}


def check_counts(weights: Weights, place: str) -> None:
    """Raises CheckpointError unless there are as many names and WordNet ids as the classifier has classes."""
    num_classes, _ = infer_sizes(weights.state)
    for key, names in (("categories", weights.categories), ("WordNet ids", weights.wnids)):
        if names is not None and num_classes is not None and len(names) != num_classes:
            raise CheckpointError(f"{len(names)} {key} for {place}, whose classifier has {num_classes} classes")
