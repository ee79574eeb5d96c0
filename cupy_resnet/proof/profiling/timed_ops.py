"""An engine that times each of its operations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...engines.base import Ops
from ..clock import Clock

OPERATIONS = frozenset(
    name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")
) - {"asarray", "to_numpy", "filter"}  # fmt: skip
"""The names in `Ops` of what a forward pass is made of."""


@dataclass(frozen=True)
class Timing:
    """One operation of one pass.

    Args:
        op: name in `Ops`.
        shape: of its result.
        seconds: it took, alone on the device.
    """

    op: str
    shape: tuple[int, ...]
    seconds: float


class TimedOps:
    """Implements `Ops` by another engine, and times every operation by itself.

    Each operation waits until the device is idle: nothing overlaps, neither launches nor kernels.

    Args:
        ops: the engine that computes.
        clock: that times it.

    Attributes:
        timings: one per operation so far.
    """

    def __init__(self, ops: Ops, clock: Clock) -> None:
        self.name = ops.name
        self.timings: list[Timing] = []
        self._ops = ops
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        return partial(self._timed, name, attribute) if name in OPERATIONS else attribute

    def _timed(self, name: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result, seconds = self._clock.alone(partial(operation, *arguments, **options))
        self.timings.append(Timing(name, tuple(result.shape), seconds))
        return result
