"""Filters on their way to L2 before the layers that need them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ... import jit
from .arrays import THREADS

if TYPE_CHECKING:
    import cupy

LINE = 128
"""Bytes that come at once."""

BLOCKS = 16
"""Few, since the network's kernels run at the same time; enough for the memory's whole rate."""


class Prefetch:
    """Brings arrays to the L2 cache of their device, in the given order.

    Args:
        arrays: on the current device, C-contiguous, at addresses that are multiples of 128 bytes, as CuPy allocates
            them. They must stay alive.
    """

    def __init__(self, arrays: Sequence["cupy.ndarray"]) -> None:
        import cupy

        self.nbytes = sum(int(array.nbytes) for array in arrays)
        self._arrays = tuple(arrays)
        self._starts = cupy.asarray(np.array([array.data.ptr for array in arrays], np.uint64))
        self._lines = cupy.asarray(np.array([array.nbytes // LINE for array in arrays], np.int32))
        self._kernel = jit.get_function("prefetch")

    def __call__(self) -> None:
        """Enqueues it on the current stream."""
        jit.launch(self._kernel, (BLOCKS,), (THREADS,), (self._starts, self._lines, np.int32(len(self._arrays))))
