"""Which batch size that was tuned speaks for one that was not. Imports no CuPy: usable anywhere."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from .problem import Conv2dPair, Problem

T = TypeVar("T")

FEW = 8
"""Images up to which a pass waits for one thing after the other more than it computes."""

FACTOR_OF_FEW, FACTOR = 3.0, 1.5
"""A batch of up to so many times as many images, or so many times fewer, is near one of few images, or of more.

With few images what matters is how much happens at once, and that changes slowly; with more it is how evenly tiles fill
the multiprocessors. Captured passes in fp16 on an H200, by the nearest and by the cost model, µs: ResNet-50 with 2
images 256 and 317, with 4 316 and 365, with 6 348 and 403, with 48 1079 and 1174; ResNet-18 98 and 117, 122 and 128,
128 and 133, 368 and 368. But with 16 images, by those of 32, it was 218 and 200.
"""


@lru_cache(maxsize=4096)
def with_batch_size(problem: Problem, N: int) -> Problem:
    """Returns the same convolutions of `N` images."""
    if isinstance(problem, Conv2dPair):
        return replace(problem, first=replace(problem.first, N=N))
    return replace(problem, N=N)


def by_batch_size(keys: Iterable[tuple[Problem, T]]) -> dict[tuple[Problem, T], set[int]]:
    """Returns the batch sizes there are among keys that begin with a problem, by key with a problem of no images."""
    sizes: dict[tuple[Problem, T], set[int]] = {}
    for problem, rest in keys:
        sizes.setdefault((with_batch_size(problem, 0), rest), set()).add(problem.N)
    return sizes


def nearest(N: int, sizes: Collection[int]) -> int | None:
    """Returns the one of `sizes` that is nearest to `N` by ratio, of two that are as near the larger.

    None where all are further off than `FACTOR`, or `FACTOR_OF_FEW`. `N` itself does not count, nor do batches of no
    images.
    """
    ratios = {size: max(size, N) / min(size, N) for size in sizes if size != N and size and N}
    near = [size for size, ratio in ratios.items() if ratio <= (FACTOR_OF_FEW if N <= FEW else FACTOR)]
    return min(near, key=lambda size: (ratios[size], -size), default=None)
