"""`Prediction`: what becomes of one image."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


class NotFiniteError(ValueError):
    """A network gave logits that are not finite numbers; the message names where in the network that begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds one image took; None for what it did not come to.

    Attributes:
        decode: reading (from a URL: downloading) and decoding, on one thread of the pool.
        preprocess: resizing and cropping, on the same thread.
        inference: the image's share of its batch, from the pixels' upload to the logits' arrival; in the first batch
            that includes compiling kernels.
    """

    decode: float | None = None
    preprocess: float | None = None
    inference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Prediction:
    """What a model says of one image: the `k` likeliest classes, the likeliest first.

    Attributes:
        index: the image's place among all images of the call, from 0.
        path: path or URL as given, or as found in a folder; None for images that have none.
        labels: names of the classes, k of them; ``"class 3"`` where a model knows no names.
        class_indices: the classes' rows in the classifier. Two classes can share a name (ImageNet has two cranes).
        wnids: the classes' WordNet ids; None where a model knows none.
        probabilities: of the softmax over all classes.
        logits: float32 (num_classes,); None if there is an error.
        features: float32 (num_features,), what the classifier saw; None unless asked for.
        error: None, or why there is no answer; then labels, class indices and probabilities are empty.
        timings: seconds spent on this image.
    """

    index: int
    path: str | None = None
    labels: tuple[str, ...] = ()
    class_indices: tuple[int, ...] = ()
    wnids: tuple[str, ...] | None = None
    probabilities: tuple[float, ...] = ()
    logits: np.ndarray | None = None
    features: np.ndarray | None = None
    error: str | None = None
    timings: Timings = field(default_factory=Timings)

    @property
    def label(self) -> str | None:
        """The likeliest class's name; None if there is an error."""
        return self.labels[0] if self.labels else None

    @property
    def class_index(self) -> int | None:
        """The likeliest class's row in the classifier; None if there is an error."""
        return self.class_indices[0] if self.class_indices else None

    @property
    def wnid(self) -> str | None:
        """The likeliest class's WordNet id; None if there is an error or none is known."""
        return self.wnids[0] if self.wnids else None

    @property
    def probability(self) -> float | None:
        """The likeliest class's probability; None if there is an error."""
        return self.probabilities[0] if self.probabilities else None

    def to_dict(self, *, logits: bool = False) -> dict[str, Any]:
        """Returns everything as values that JSON can hold, always under the same keys.

        Args:
            logits: whether to include the logits of all classes, which are many, under ``"logits"``.
        """
        values: dict[str, Any] = {
            "index": self.index,
            "path": self.path,
            "label": self.label,
            "probability": self.probability,
            "labels": list(self.labels),
            "probabilities": list(self.probabilities),
            "class_indices": list(self.class_indices),
            "wnids": None if self.wnids is None else list(self.wnids),
            "features": None if self.features is None else self.features.tolist(),
            "error": self.error,
            "timings": asdict(self.timings),
        }
        if logits:
            values["logits"] = None if self.logits is None else self.logits.tolist()
        return values

    def __repr__(self) -> str:
        name = f"image {self.index}" if self.path is None else repr(self.path)
        if self.error is not None:
            return f"Prediction({name}, error={self.error!r})"
        ranking = zip(self.labels, self.probabilities, strict=True)
        return f"Prediction({name}: {', '.join(f'{label} {p:.1%}' for label, p in ranking)})"


def top_classes(logits: np.ndarray, k: int) -> np.ndarray:
    """Returns the indices of the `k` largest of (num_classes,) finite logits, largest first; of equals, the lower."""
    threshold = np.partition(logits, -k)[-k]
    candidates = np.flatnonzero(logits >= threshold)
    order: np.ndarray = np.argsort(-logits[candidates], kind="stable")[:k]
    return candidates[order]


def class_names(indices: Sequence[int], categories: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of classes, ``"class 3"`` where there are none."""
    return tuple(f"class {index}" if categories is None else categories[index] for index in indices)
