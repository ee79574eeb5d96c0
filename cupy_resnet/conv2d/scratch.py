"""Counters that blocks of a split-K kernel meet at, zero between launches: the kernel leaves them as it found them.

Kernels that may run at the same time must not share them. Launches on one stream never do, so each stream has its own;
a captured graph, which may be replayed on any stream, brings its own with `scratch`.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cupy

COUNTERS = 16384
"""Tiles that a split-K launch may have at most."""

_of_stream: dict[tuple[int, int], "cupy.ndarray"] = {}
_override = threading.local()


def counters() -> "cupy.ndarray":
    """Returns (COUNTERS,) int32 on the current device, for launches on the current stream."""
    own: Any = getattr(_override, "counters", None)
    if own is not None:
        return own
    import cupy

    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    found = _of_stream.get(key)
    if found is None:
        found = _of_stream.setdefault(key, new_counters())
    return found


def new_counters() -> "cupy.ndarray":
    """Returns fresh counters on the current device, set to zero in order with its current stream."""
    import cupy

    return cupy.zeros(COUNTERS, cupy.int32)


@contextlib.contextmanager
def scratch(own: "cupy.ndarray") -> Iterator[None]:
    """Makes this thread's launches use counters of their own."""
    before = getattr(_override, "counters", None)
    _override.counters = own
    try:
        yield
    finally:
        _override.counters = before
