"""Inputs to pixels on threads, ahead of whoever needs them, in order and in bounded memory."""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .images import ImageError, Source, Transforms, decode, expand, prepare

MOST_WORKERS = 32
"""Threads at most, unless a caller says otherwise: beyond, Python's lock leaves them little to do."""


@dataclass(slots=True, kw_only=True)
class Item:
    """An image on its way: decoded and cropped, or with the reason why not.

    Args:
        index, path, name: of its source.
        pixels: uint8 (crop, crop, 3), None if there is an error.
        error: why there are no pixels.
        decode, preprocess: seconds spent, None for what it did not come to.
    """

    index: int
    path: str | None
    name: str
    pixels: np.ndarray | None = None
    error: ImageError | None = None
    decode: float | None = None
    preprocess: float | None = None


def prepare_item(source: Source, *, transforms: Transforms, exif: bool, channel_order: str) -> Item:
    """Decodes, resizes and crops one image; an image that cannot be had gives an item with an error."""
    item = Item(index=source.index, path=source.path, name=source.name)
    begin = time.perf_counter()
    try:
        image = decode(source, exif=exif, channel_order=channel_order)
    except ImageError as error:
        item.error = error
        item.decode = time.perf_counter() - begin
        return item
    decoded = time.perf_counter()
    item.pixels = prepare(image, transforms)
    item.decode, item.preprocess = decoded - begin, time.perf_counter() - decoded
    return item


def prepare_ahead(
    sources: Iterator[Source], work: Callable[[Source], Item], workers: int
) -> Generator[Item, None, None]:
    """Yields ``work(source)`` for each source, in order, while threads work on the next `2 · workers` of them.

    Sources are taken on the calling thread and never further ahead than that, since each may hold a whole image. If
    taking one raises, the items before it are yielded first. Closing the generator ends the threads: what they are
    working on is finished, what they have not begun is dropped.

    Args:
        sources: taken one by one.
        work: called on the threads.
        workers: number of threads.
    """
    ahead: deque[Future[Item]] = deque()
    failure: Exception | None = None
    exhausted = False
    pool = ThreadPoolExecutor(workers, thread_name_prefix="cupy_resnet-decode")
    try:
        while True:
            while not exhausted and len(ahead) < 2 * workers:
                try:
                    source = next(sources)
                except StopIteration:
                    exhausted = True
                except Exception as error:
                    exhausted, failure = True, error
                else:
                    ahead.append(pool.submit(work, source))
                    del source  # the image it holds belongs to the thread now
            if not ahead:
                break
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if failure is not None:
        raise failure


def default_workers() -> int:
    """Returns the number of processors that this process may use, `MOST_WORKERS` at most."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, available)


def count_images(inputs: Any) -> int | None:
    """Returns the number of images where it can be had without consuming the inputs, which is for paths only."""
    values = inputs if isinstance(inputs, list | tuple) else [inputs]
    if all(isinstance(value, str | os.PathLike) for value in values):
        return sum(1 for _ in expand(inputs))
    return None
