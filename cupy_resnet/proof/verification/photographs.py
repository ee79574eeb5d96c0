"""Photographs on both sides: the same pixels to a model and its reference, and where their answers differ."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ...images import Transforms, expand, normalize
from ...model import Model
from ...prediction import class_names, top_classes
from ...preparation import Item, default_workers, prepare_ahead, prepare_item
from .labels import Labels
from .metrics import compare
from .recording import describe
from .references import Reference
from .tolerances import Tolerance, depths, tolerance_for

MOST_LISTED = 1000
"""Photographs that a report names at most, of each kind; all are counted."""


@dataclass(frozen=True, kw_only=True)
class PhotoDifference:
    """A photograph that the two sides do not agree on.

    Attributes:
        path: its file; None if it has none.
        ours, reference: the likeliest class; None if a side's logits are not finite.
        ours_name, reference_name: their names.
        ours_margin, reference_margin: how far the likeliest class's logit lies above the second's; None likewise, or
            if there is one class only. A difference with small margins on both sides is a tie, not a mistake.
        label, label_name: the true class and its name; None if unknown.
        top1_agrees, top5_agrees: whether the likeliest class, and the set of the five likeliest, are the same.
        max_abs: the largest difference of two logits.
        share: of the tolerance for logits, the share used; above 1 it is exceeded. None if it is infinite.
    """

    path: str | None
    ours: int | None
    reference: int | None
    ours_name: str | None
    reference_name: str | None
    ours_margin: float | None
    reference_margin: float | None
    label: int | None
    label_name: str | None
    top1_agrees: bool
    top5_agrees: bool
    max_abs: float
    share: float | None


@dataclass(frozen=True, kw_only=True)
class PhotoReport:
    """What two implementations said of many photographs. Counts are exact, lists hold `MOST_LISTED` at most.

    Attributes:
        ours, reference: in words, what computed the two sides.
        tolerance: of one operation.
        photographs: how many were found.
        unreadable: of these, how many could not be read.
        errors: (path, reason) of those.
        compared: how many both sides answered.
        top1_agree, top5_agree: how many have the same likeliest class, and the same set of the five likeliest.
        over_tolerance: how many have logits further apart than the tolerance.
        largest_share: the largest share of the tolerance that one uses; infinite if NaNs differ.
        differing: those with another likeliest class, then those with the same but logits over tolerance.
        labelled: of those compared, how many have a label.
        ours_top1, ours_top5, reference_top1, reference_top5: of these, how many each side gets right, and has among its
            five likeliest.
    """

    ours: str
    reference: str
    tolerance: Tolerance
    photographs: int = 0
    unreadable: int = 0
    errors: tuple[tuple[str | None, str], ...] = ()
    compared: int = 0
    top1_agree: int = 0
    top5_agree: int = 0
    over_tolerance: int = 0
    largest_share: float = 0.0
    differing: tuple[PhotoDifference, ...] = ()
    labelled: int = 0
    ours_top1: int = 0
    ours_top5: int = 0
    reference_top1: int = 0
    reference_top5: int = 0

    @property
    def passed(self) -> bool:
        """Whether all logits are within tolerance; answers may differ where two classes are closer than that."""
        return self.compared > 0 and not self.over_tolerance

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold; an infinite share becomes None."""
        share = self.largest_share if math.isfinite(self.largest_share) else None
        return asdict(self) | {"largest_share": share, "passed": self.passed}


def compare_photographs(
    model: Model,
    reference: Reference,
    photos: Any,
    *,
    labels: Labels,
    root: str,
    batch_size: int,
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> PhotoReport:
    """Shows every photograph to both sides. Memory does not depend on how many there are.

    Args:
        model: what is verified; its transforms prepare the photographs, once for both sides.
        reference: of the same network and weights.
        photos: whatever `cupy_resnet.images.expand` takes, such as a folder. What cannot be read is recorded.
        labels: what the photographs show, as far as it is known.
        root: the folder that labels are relative to.
        batch_size: photographs at a time.
        workers: decoding threads, by default one per processor.
        advance: called after every photograph.
    """
    tally = _Tally(model)
    for items, x in _batches(photos, model.transforms, batch_size, workers):
        rows: Iterator[tuple[np.ndarray, np.ndarray]] = iter(())
        if len(x):
            rows = zip(model(x), reference.logits(x), strict=True)
        for item in items:
            if item.error is None:
                tally.add(item.path, *next(rows), labels.of(item.path, root))
            else:
                tally.add_unreadable(item.path, str(item.error).removeprefix(f"{item.path}: "))
            advance()
    return tally.report(describe(model), reference.name)


def first_photographs(model: Model, photos: Any, count: int) -> tuple[np.ndarray, list[str]]:
    """Returns the first photographs that can be read, as a model's input, and their names.

    Args:
        model: whose transforms prepare them.
        photos: as for `compare_photographs`.
        count: how many at most.

    Returns:
        float32 (N, 3, crop, crop), and N names.

    Raises:
        ValueError: none can be read; the message tells why the first cannot.
    """
    reason: str | None = None
    with closing(_batches(photos, model.transforms, count, None)) as batches:
        for items, x in batches:
            if len(x):
                return x, [item.name for item in items if item.error is None]
            reason = reason or str(next(item.error for item in items if item.error is not None))
    raise ValueError(f"no photograph can be read: {reason or 'there is none'}")


def _batches(
    photos: Any, transforms: Transforms, size: int, workers: int | None
) -> Generator[tuple[list[Item], np.ndarray], None, None]:
    """Yields items, `size` of them readable, and the readable ones as float32 (N, 3, crop, crop), normalised."""
    work = partial(prepare_item, transforms=transforms, exif=True, channel_order="rgb")
    with closing(prepare_ahead(expand(photos), work, workers or default_workers())) as prepared:
        items: list[Item] = []
        pixels: list[np.ndarray] = []
        for item in prepared:
            items.append(item)
            if item.pixels is not None:
                pixels.append(item.pixels)
                item.pixels = None
            if len(pixels) == size or len(items) == 8 * size:  # not more of a folder that has no photographs
                yield items, _input(pixels, transforms)
                items, pixels = [], []
        if items:
            yield items, _input(pixels, transforms)


def _input(pixels: list[np.ndarray], transforms: Transforms) -> np.ndarray:
    if not pixels:
        return np.empty((0, 3, transforms.crop, transforms.crop), np.float32)
    return np.ascontiguousarray(normalize(np.stack(pixels), transforms).transpose(0, 3, 1, 2))


class _Tally:
    """What a `PhotoReport` is made of, photograph by photograph."""

    def __init__(self, model: Model) -> None:
        self._tolerance = tolerance_for(model.precision)
        self._depth = depths(model.network)["logits"]
        self._categories = model.categories
        self._counts: Counter[str] = Counter()
        self._largest_share = 0.0
        self._errors: list[tuple[str | None, str]] = []
        self._disagreed: list[PhotoDifference] = []
        self._inaccurate: list[PhotoDifference] = []

    def report(self, ours: str, reference: str) -> PhotoReport:
        return PhotoReport(
            ours=ours,
            reference=reference,
            tolerance=self._tolerance,
            largest_share=self._largest_share,
            errors=tuple(self._errors),
            differing=(*self._disagreed, *self._inaccurate),
            **{name: int(count) for name, count in self._counts.items()},
        )

    def add_unreadable(self, path: str | None, reason: str) -> None:
        self._counts.update(photographs=1, unreadable=1)
        if len(self._errors) < MOST_LISTED:
            self._errors.append((path, reason))

    def add(self, path: str | None, ours: np.ndarray, reference: np.ndarray, label: int | None) -> None:
        comparison = compare("logits", ours[None], reference[None], self._tolerance, self._depth)
        a, b = _Answer(ours), _Answer(reference)
        top1_agrees = a.first is not None and a.first == b.first
        top5_agrees = a.first is not None and set(a.top) == set(b.top)
        self._largest_share = max(self._largest_share, comparison.share)
        self._counts.update(
            photographs=1,
            compared=1,
            top1_agree=top1_agrees,
            top5_agree=top5_agrees,
            over_tolerance=not comparison.passed,
        )
        if label is not None:
            self._counts.update(
                labelled=1,
                ours_top1=a.first == label,
                ours_top5=label in a.top,
                reference_top1=b.first == label,
                reference_top5=label in b.top,
            )
        listed = self._inaccurate if top1_agrees else self._disagreed
        if (top1_agrees and comparison.passed) or len(listed) >= MOST_LISTED:
            return
        listed.append(
            PhotoDifference(
                path=path,
                ours=a.first,
                reference=b.first,
                ours_name=self._name(a.first),
                reference_name=self._name(b.first),
                ours_margin=a.margin,
                reference_margin=b.margin,
                label=label,
                label_name=self._name(label),
                top1_agrees=top1_agrees,
                top5_agrees=top5_agrees,
                max_abs=comparison.max_abs,
                share=comparison.share if math.isfinite(comparison.share) else None,
            )
        )

    def _name(self, index: int | None) -> str | None:
        return None if index is None else class_names([index], self._categories)[0]


class _Answer:
    """The likeliest classes of (num_classes,) logits; none if they are not finite."""

    def __init__(self, logits: np.ndarray) -> None:
        finite = bool(np.isfinite(logits).all())
        self.top = [int(index) for index in top_classes(logits, min(5, len(logits)))] if finite else []
        self.first = self.top[0] if self.top else None
        two = len(self.top) > 1
        self.margin = float(logits[self.top[0]]) - float(logits[self.top[1]]) if two else None
