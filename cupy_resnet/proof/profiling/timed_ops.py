"""An engine that times each of its operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ...engines.base import Array, Ops, stem_by_parts
from ..clock import Clock

OPERATIONS = frozenset(
    name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")
) - {"asarray", "upload", "to_numpy", "filter", "fuses_back_to_back"}  # fmt: skip
"""The names in `Ops` of what a forward pass is made of."""


@dataclass(frozen=True)
class Timing:
    """One operation of one pass.

    Args:
        op: name in `Ops`, as `explain` tells it.
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

    def pixels(self, x: Array, *normalization: Any, **options: Any) -> Array:
        """Times the kernel that converts pixels; where they can be used as they are, there is nothing to time."""
        turned = x.transpose(0, 3, 1, 2).flags.c_contiguous and not x.flags.c_contiguous
        name = "nchw_to_nhwc" if turned else "normalize"
        y = self._timed(name, self._ops.pixels, x, *normalization, **options)
        if y is x:
            self.timings.pop()
        return y

    def stem(
        self,
        x: Array,
        weight: Any,
        bias: Array,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Times the one kernel where the engine has it for this stem, else the operations that take its place."""
        engine = cast(Any, self._ops)
        if self.name == "cuda" and engine.stem_kernel(x.shape, weight.weight.shape)[0]:
            return self._timed("stem", engine.stem, x, weight, bias, mean, std, out=out)
        return stem_by_parts(cast(Ops, self), x, weight, bias, mean, std, out)

    def _timed(self, name: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result, seconds = self._clock.alone(partial(operation, *arguments, **options))
        self.timings.append(Timing(name, tuple(result.shape), seconds))
        return result
