"""From images to predictions: decoded ahead on threads, batched, run, and answered in order.

The calling thread takes sources from the inputs, hands them to a pool that decodes, resizes and crops, and puts what
comes back, in order, into batches. A batch is launched; the answers of the one before are collected only then, so that
the GPU has work while the host decodes the next batch and reads the results of the last one. What is held at any time
are two batches and the images that the pool is working on, whatever the number of inputs.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, cast

import numpy as np

from .batching import activation_bytes, default_batch_size
from .cuda_errors import lost_context_explained
from .engines.transfers import SLOTS, Download, Transfers, make_transfers
from .images import Transforms, expand
from .plan import Runner
from .prediction import NotFiniteError, Prediction, Timings, class_names, top_classes
from .preparation import Item, count_images, default_workers, prepare_ahead, prepare_item

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "record")
CHANNEL_ORDERS = ("rgb", "bgr")


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """What the pipeline needs to know of a model.

    Args:
        running: returns what runs the network; raises RuntimeError once the model is closed.
        transforms: from an image to the network's input.
        categories, wnids: the classes' names and WordNet ids by index, None where unknown.
    """

    running: Callable[[], Runner]
    transforms: Transforms
    categories: Sequence[str] | None = None
    wnids: Sequence[str] | None = None


class Arguments(TypedDict, total=False):
    """The keywords of `Options`, for the type checker."""

    topk: int
    batch_size: int | None
    progress: bool
    on_error: str
    features: bool
    exif: bool
    channel_order: str
    workers: int | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to predict; `cupy_resnet.Model.predict` explains each.

    Raises:
        ValueError: a number below one, or a word that is none of the allowed.
    """

    topk: int = 5
    batch_size: int | None = None
    progress: bool = False
    on_error: str = "raise"
    features: bool = False
    exif: bool = True
    channel_order: str = "rgb"
    workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("topk", "batch_size", "workers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, allowed in (("on_error", ON_ERROR), ("channel_order", CHANNEL_ORDERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}")


@dataclass(slots=True)
class Batch:
    """Items in order, and the answers for those with pixels, which are on their way; None if there are none."""

    items: list[Item]
    download: Download | None = None


def predictions(classifier: Classifier, inputs: Any, options: Options) -> Iterator[Prediction]:
    """Yields one prediction per image, in order. Nothing happens before the first is asked for.

    Closing the iterator, or an exception, ends the pool's threads and frees the engine's memory before it returns.

    Args:
        classifier: the model.
        inputs: whatever `cupy_resnet.images.expand` takes.
        options: how.

    Raises:
        ImageError: with ``on_error="raise"``, the first input that is no image; what comes before it is yielded first.
        NotFiniteError: likewise, the first image whose logits are not finite.
        MemoryError: the engine has no room for a single image.
        RuntimeError: the model is closed.
        Exception: whatever iterating over the inputs raises.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(lost_context_explained())
        advance: Callable[[], None] = lambda: None  # noqa: E731
        if options.progress:
            from .progress import image_progress

            advance = stack.enter_context(image_progress(count_images(inputs)))
        pipeline = _Pipeline(classifier, inputs, options)
        stack.callback(pipeline.close)
        for prediction in pipeline.run():
            advance()
            yield prediction


class _Pipeline:
    """The state of one call of `predictions`."""

    def __init__(self, classifier: Classifier, inputs: Any, options: Options) -> None:
        runner = classifier.running()
        network, ops = runner.network, runner.ops
        self._classifier = classifier
        self._options = options
        self._topk = min(options.topk, network.num_classes)
        self._transfers: Transfers = make_transfers(ops)
        self._batch_size = options.batch_size
        work = partial(
            prepare_item, transforms=classifier.transforms, exif=options.exif, channel_order=options.channel_order
        )
        self._items = prepare_ahead(expand(inputs), work, options.workers or default_workers())
        self._launched: deque[Batch] = deque()
        self._failure: Exception | None = None
        self._warned = False

    def close(self) -> None:
        """Ends the threads, then waits for the engine and drops the memory."""
        try:
            self._items.close()
        finally:
            self._launched.clear()
            self._transfers.release()

    def run(self) -> Iterator[Prediction]:
        for items in self._batches():
            yield from self._run(items)
        yield from self._collect(leave=0)
        if self._failure is not None:
            raise self._failure

    def _batches(self) -> Iterator[list[Item]]:
        """Yields items by the batch; ends at the first failure, which it keeps until all before it is answered."""
        items: list[Item] = []
        try:
            for item in self._items:
                if item.error is not None and self._options.on_error == "raise":
                    raise item.error
                items.append(item)
                if self._batch_size is None:
                    self._batch_size = self._default_batch_size()
                if len(items) >= self._batch_size:
                    yield items
                    items = []
        except Exception as error:
            self._failure = error
        if items:
            yield items

    def _default_batch_size(self) -> int:
        runner = self._classifier.running()
        network, ops = runner.network, runner.ops
        free = self._transfers.free_bytes()
        size = default_batch_size(network, self._classifier.transforms.crop, ops.name, free, ops.precision)
        logger.info("%s: batches of %d images", network.name, size)
        return size

    def _run(self, items: list[Item]) -> Iterator[Prediction]:
        """Launches a batch, in parts if the engine has no room for it at once, and collects the one before."""
        waiting = deque([items])
        while waiting:
            part = waiting.popleft()
            shortage = None
            try:
                self._launched.append(self._launch(part))
            except MemoryError as error:
                shortage = str(error)  # not the error itself: its traceback would keep the batch's activations alive
            if shortage is None:
                yield from self._collect(leave=SLOTS - 1)
            else:
                yield from self._collect(leave=0)
                self._transfers.release(trim=True)
                waiting.extendleft(reversed(self._halved(part, shortage)))

    def _launch(self, items: list[Item]) -> Batch:
        runner = self._classifier.running()
        pixels = [item.pixels for item in items if item.pixels is not None]
        if not pixels:
            return Batch(items)
        transforms = self._classifier.transforms
        x = self._transfers.upload(pixels)
        logits, features = runner(x, mean=transforms.mean, std=transforms.std, features=self._options.features)
        results = [logits, runner.ops.softmax(logits), *([] if features is None else [features])]
        return Batch(items, self._transfers.download(*results))

    def _halved(self, items: list[Item], shortage: str) -> list[list[Item]]:
        """Returns a batch that did not fit in two parts, and makes later batches no larger than those."""
        runner = self._classifier.running()
        network, ops = runner.network, runner.ops
        images = sum(item.pixels is not None for item in items)
        place = "GPU memory" if ops.name == "cuda" else "memory"
        if images == 1:
            crop = self._classifier.transforms.crop
            free = self._transfers.free_bytes()
            there = "" if free is None else f", and {_mebibytes(free)} are free"
            raise MemoryError(
                f"{network.name}: there is not enough {place} for a single image of {crop} × {crop} pixels: beside the "
                f"weights it needs about {_mebibytes(activation_bytes(network, crop, ops.precision))}{there}; "
                f"close other models and programs that use it ({shortage})"
            )
        middle = (len(items) + 1) // 2
        self._batch_size = max(1, min(self._batch_size or middle, middle))
        log = logger.info if self._warned else logger.warning
        log("not enough %s for %d images at once; going on with at most %d", place, images, self._batch_size)
        self._warned = True
        return [part for part in (items[:middle], items[middle:]) if part]

    def _collect(self, *, leave: int) -> Iterator[Prediction]:
        """Yields the predictions of the oldest batches, until only `leave` are on their way."""
        while len(self._launched) > leave:
            batch = self._launched.popleft()
            results: list[np.ndarray] = []
            share = None
            if batch.download is not None:
                results, seconds = batch.download.wait()
                share = seconds / len(results[0])
            rows = iter(zip(*results, strict=True))
            for item in batch.items:
                yield self._failed(item) if item.error is not None else self._answer(item, share, *next(rows))

    def _answer(
        self,
        item: Item,
        inference: float | None,
        logits: np.ndarray,
        probabilities: np.ndarray,
        features: np.ndarray | None = None,
    ) -> Prediction:
        timings = Timings(decode=item.decode, preprocess=item.preprocess, inference=inference)
        if not np.isfinite(logits).all():
            error = NotFiniteError(f"{item.name}: {self._where_not_finite(item, logits)}")
            if self._options.on_error == "raise":
                raise error
            return Prediction(index=item.index, path=item.path, error=str(error), timings=timings)
        indices = [int(index) for index in top_classes(logits, self._topk)]
        wnids = self._classifier.wnids
        return Prediction(
            index=item.index,
            path=item.path,
            labels=class_names(indices, self._classifier.categories),
            class_indices=tuple(indices),
            wnids=None if wnids is None else tuple(wnids[index] for index in indices),
            probabilities=tuple(float(probabilities[index]) for index in indices),
            # Copies: a row that is kept must not keep the whole batch.
            logits=logits.astype(np.float32),
            features=None if features is None else features.astype(np.float32),
            timings=timings,
        )

    @staticmethod
    def _failed(item: Item) -> Prediction:
        timings = Timings(decode=item.decode)
        return Prediction(index=item.index, path=item.path, error=str(item.error), timings=timings)

    def _where_not_finite(self, item: Item, logits: np.ndarray) -> str:
        """Runs one image again and returns the sentence that names the first result that is not finite."""
        runner = self._classifier.running()
        network, ops = runner.network, runner.ops
        transforms = self._classifier.transforms
        found: list[str] = []

        def look(name: str, value: Any) -> None:
            if not found and not np.isfinite(ops.to_numpy(value)).all():
                found.append(name)

        transfers = make_transfers(ops)  # its own: the others hold the batch that is on its way
        try:
            x = transfers.upload([cast(np.ndarray, item.pixels)])
            network(ops, x, look, mean=transforms.mean, std=transforms.std)
        finally:
            transfers.release()
        bad = int((~np.isfinite(logits)).sum())
        where = (
            f"the first values that are not appear in the output of {found[0]}" if found else "a second run was fine"
        )
        return (
            f"{bad} of {len(logits)} logits are not finite numbers; in {network.name} {where}. "
            "Check the weights, and batch_norm_eps where running variances are tiny"
        )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB ({count} bytes)"
