"""conv2d_wgmma_b2b: a convolution and the 1×1 behind it in one kernel. STAND-IN for the module of this name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .device import Device
from .precision import PRECISIONS
from .problem import Conv2dPair, Conv2dProblem
from .variant import Filter, Support

if TYPE_CHECKING:
    import cupy

name = "conv2d_wgmma_b2b"


@dataclass(frozen=True)
class BackToBackConfig:
    """conv2d_wgmma_b2b.cu.

    Args:
        precision: name of the arithmetic.
        tile_m: pixels per tile.
        tile_n: filters of the first convolution.
    """

    precision: str
    tile_m: int
    tile_n: int

    threads = 384
    shared_memory = 0

    def defines(self) -> dict[str, int | str]:
        return {"ELEMENT": PRECISIONS[self.precision].element, "TILE_M": self.tile_m, "TILE_N": self.tile_n}

    def __str__(self) -> str:
        return f"{self.tile_m} pixels, {self.tile_n} filters between"


@dataclass(frozen=True)
class BackToBackOperands:
    """The arrays of two convolutions in a row; `y` may be the residual."""

    x: "cupy.ndarray"
    filters: tuple[Filter, Filter]
    biases: tuple["cupy.ndarray | None", "cupy.ndarray | None"]
    residual: "cupy.ndarray"
    y: "cupy.ndarray"
    relus: tuple[bool, bool]


def back_to_back_problem(first: Conv2dProblem, K: int) -> Conv2dProblem:
    """Returns the second's problem."""
    return Conv2dPair(first, K).second


def supports_back_to_back(first: Conv2dProblem, second: Conv2dProblem, device: Device) -> Support:
    """Whether the kernel computes the two, and if not, the reason."""
    if first.precision not in ("fp16", "bf16"):
        return False, f"computes in fp16 or bf16, not in {first.precision}"
    if device.compute_capability != (9, 0):
        return False, f"needs compute capability 9.0, {device.name} has {device.number}"
    if first.K not in (64, 128, 256) or first.C % 64 or second.K % 64 or first.groups != 1:
        return False, f"needs 64, 128 or 256 filters between and multiples of 64 channels, not {first}; {second}"
    if (first.R, first.S) != (3, 3) or first.dilation_h != 1 or first.dilation_w != 1:
        return False, f"needs a 3×3 filter, not {first.R}×{first.S}"
    return True, ""


def back_to_back_candidates(first: Conv2dProblem, second: Conv2dProblem, device: Device) -> Sequence[BackToBackConfig]:
    """The configurations that solve the two on `device`."""
    return [BackToBackConfig(first.precision, tile_m, first.K) for tile_m in (128, 64)]


def launch_back_to_back(
    first: Conv2dProblem, second: Conv2dProblem, operands: BackToBackOperands, config: BackToBackConfig
) -> None:
    """Enqueues the kernel on the current stream of the current device."""
    raise NotImplementedError
