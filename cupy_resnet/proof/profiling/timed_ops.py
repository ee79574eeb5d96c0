"""An engine that times each of its operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ...engines import checks
from ...engines.base import Array, Ops, back_to_back_by_parts, shortcut_by_parts, stem_by_parts
from ..clock import Clock

OPERATIONS = frozenset(
    name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")
) - {"asarray", "upload", "to_numpy", "filter", "fusions"}  # fmt: skip
"""The names in `Ops` of what a forward pass is made of."""

GEOMETRY = frozenset({"stride", "padding", "dilation", "groups"})
"""The names of a convolution's options that say where its window goes."""


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

    def conv2d(self, x: Array, weight: Any, bias: Array | None = None, **options: Any) -> Array:
        """Times the one kernel, or where a shortcut takes another, both."""
        shortcut = options.get("shortcut")
        if shortcut is not None:
            problem = checks.conv2d(x, _array(weight), bias, **self._described(options))
            if not self._ops.fusions().shortcut(problem):
                # There is no residual beside a shortcut, or it would have been refused.
                others = {name: options[name] for name in options.keys() & (GEOMETRY | {"relu"})}
                return shortcut_by_parts(cast(Ops, self), x, weight, bias, shortcut, **others)
        return self._timed("conv2d", self._ops.conv2d, x, weight, bias, **options)

    def conv2d_back_to_back(
        self,
        x: Array,
        weights: tuple[Any, Any],
        biases: tuple[Array | None, Array | None] = (None, None),
        **options: Any,
    ) -> tuple[Array, Array | None]:
        """Times the one kernel, or where the engine has none, those that take its place."""
        arrays = _array(weights[0]), _array(weights[1])
        asked = checks.conv2d_back_to_back(x, arrays, biases, **self._described(options))
        if any(map(self._ops.fusions().back_to_back, (asked, asked.without_following()))):
            return self._timed("conv2d_back_to_back", self._ops.conv2d_back_to_back, x, weights, biases, **options)
        geometry = {name: options.pop(name) for name in GEOMETRY & options.keys()}
        options.pop("following", None)
        return back_to_back_by_parts(cast(Ops, self), x, weights, biases, geometry, **options)

    def _described(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns options of a convolution as `checks` takes them."""
        described = {name: value for name, value in options.items() if name not in ("relu", "overwrite_residual")}
        if described.get("shortcut") is not None:
            x0, weight0, stride0 = described["shortcut"]
            described["shortcut"] = x0, _array(weight0), stride0
        if described.get("following") is not None:
            weight, bias = described["following"]
            described["following"] = _array(weight), bias
        return described | {"precision": self._ops.precision}

    def _timed(self, name: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result, seconds = self._clock.alone(partial(operation, *arguments, **options))
        y = result[0] if isinstance(result, tuple) else result
        self.timings.append(Timing(name, tuple(y.shape), seconds))
        return result


def _array(weight: Any) -> Array:
    """The KRSC array of what an engine's `filter` returned."""
    return getattr(weight, "weight", weight)
