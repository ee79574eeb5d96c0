"""What a convolution kernel is to the rest: it says what it supports, how it can be specialised, and launches."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import configs
from .device import Device
from .problem import Conv2dProblem

if TYPE_CHECKING:
    import cupy

NULL = np.uintp(0)
"""A null pointer as a kernel argument."""

Support = tuple[bool, str]
"""Whether a problem is supported, and if not, why."""


@dataclass
class Filter:
    """A KRSC filter on the GPU, with the forms that variants have derived from it."""

    weight: "cupy.ndarray"
    packed: dict[Hashable, "cupy.ndarray"] = field(default_factory=dict)

    def derived(self, key: Hashable, make: Callable[["cupy.ndarray"], "cupy.ndarray"]) -> "cupy.ndarray":
        """Returns what `make` makes of the weight, once per key."""
        if key not in self.packed:
            import cupy

            made = make(self.weight)
            # Published only when it is there: another thread may use it on a stream that is not ordered after this one.
            cupy.cuda.get_current_stream().synchronize()
            self.packed[key] = made
        return self.packed[key]


@dataclass(frozen=True)
class Shortcut:
    """The second input of a convolution with a shortcut, NHWC, and its (K, 1, 1, C) filter; it has no bias of its own.

    The problem says its channels and stride, and which shapes `x` may have (`Conv2dProblem.has_shortcut_of`).
    """

    x: "cupy.ndarray"
    filter: Filter


@dataclass(frozen=True)
class Operands:
    """The arrays of one convolution, all on one device, C-contiguous, 16-byte aligned: x NHWC, y and residual NPQK.

    `shortcut` is there exactly if the problem has one. A kernel that computes it may do without a residual beside it.
    `backwards` asks a kernel whose blocks take tiles in turn to begin with the last; no bit of a result depends on it.
    """

    x: "cupy.ndarray"
    filter: Filter
    bias: "cupy.ndarray | None"
    residual: "cupy.ndarray | None"
    y: "cupy.ndarray"
    relu: bool
    shortcut: Shortcut | None = None
    backwards: bool = False

    def tail(self) -> tuple[Any, Any, Any]:
        """(bias, residual, y) as kernel arguments."""
        return (NULL if self.bias is None else self.bias, NULL if self.residual is None else self.residual, self.y)


class Variant:
    """A convolution kernel; this base solves every problem, in a single form."""

    name: str
    precisions: tuple[str, ...] = ("fp32",)
    sources: tuple[str, ...]
    """The .cu files it launches, without suffix."""
    adds_shortcut = False
    """Whether it computes problems with a shortcut."""
    derives_filter = False
    """Whether it multiplies with a form of the filter that is made once per filter, before its first launch."""

    def supports(self, problem: Conv2dProblem, device: Device) -> Support:
        """Whether this variant solves `problem` on `device`, and if not, the reason."""
        if problem.precision not in self.precisions:
            return False, f"computes in {' or '.join(self.precisions)}, not in {problem.precision}"
        if problem.shortcut_channels and not self.adds_shortcut:
            return False, "computes no second convolution as a shortcut"
        if device.compute_capability < (7, 0):
            return False, f"needs compute capability 7.0, {device.name} has {device.arch.removeprefix('sm_')}"
        exceeded = problem.limit_exceeded()
        return exceeded is None, exceeded or ""

    def configurations(self) -> Sequence[configs.Config]:
        """Every configuration it can be compiled in."""
        return (configs.NoConfig(),)

    def sources_of(self, config: configs.Config) -> tuple[str, ...]:
        """Those of `sources` that are compiled with the defines of `config`, and launched in it."""
        return self.sources

    def candidates(self, problem: Conv2dProblem, device: Device) -> Sequence[configs.Config]:
        """The configurations that solve `problem` on `device`."""
        return self.configurations()

    def launch(self, problem: Conv2dProblem, operands: Operands, config: Any) -> None:
        """Enqueues the kernel on the current stream of the current device; N·P·Q·K must not be 0."""
        raise NotImplementedError


def blocks(total: int, per_block: int) -> int:
    return -(-total // per_block)
