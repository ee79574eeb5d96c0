"""conv2d_wgmma_b2b: a convolution and the 1×1 convolution behind it, with a residual, in one launch.

It ends a ResNet's bottleneck: the map between the two, and what it costs to store and to read it, is spared. The 1×1
convolution that begins the next bottleneck may be computed as well: the map between them is stored, but not read. The
launch computes what the convolutions compute one after the other, each sum in the same order up to the tensor cores'
own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import jit
from . import configs, tensor_maps
from .configs import BackToBackConfig
from .device import Device
from .params import conv2d_params
from .problem import Conv2dProblem
from .tensor_core_variants import Wgmma, multiprocessors
from .variant import NULL, Filter, Support, blocks

if TYPE_CHECKING:
    import cupy

__all__ = [
    "BackToBackConfig",
    "BackToBackOperands",
    "Next",
    "back_to_back_candidates",
    "back_to_back_problem",
    "configurations",
    "launch_back_to_back",
    "name",
    "supports_back_to_back",
]

name = "conv2d_wgmma_b2b"
PRECISION_NAMES = ("fp16", "bf16")

_FIRST = Wgmma()
"""The kernel that would compute the first convolution on its own takes its pixels the same way."""


class Next(NamedTuple):
    """The arrays of a third convolution, 1×1, of what the second one computes; as those of `BackToBackOperands`.

    Args:
        filter: KRSC.
        bias: (K,) float32, or None.
        z: NPQK; none of the others' arrays.
        relu: whether a ReLU ends it.
    """

    filter: Filter
    bias: "cupy.ndarray | None"
    z: "cupy.ndarray"
    relu: bool


class BackToBackOperands(NamedTuple):
    """The arrays of both convolutions on one device, C-contiguous, 16-byte aligned, of the precision's storage dtype.

    Args:
        x: the first one's input, NHWC.
        filters: of the first and the second, KRSC.
        biases: (K,) float32 each, or None.
        residual: NPQK, of the second one's output; it is added before the last ReLU.
        y: NPQK; may be the residual.
        relus: whether a ReLU ends the first, and the second.
        next: those of the third, where there is one.
    """

    x: "cupy.ndarray"
    filters: tuple[Filter, Filter]
    biases: "tuple[cupy.ndarray | None, cupy.ndarray | None]"
    residual: "cupy.ndarray"
    y: "cupy.ndarray"
    relus: tuple[bool, bool]
    next: Next | None = None


def back_to_back_problem(first: Conv2dProblem, K: int) -> Conv2dProblem:
    """Returns the 1×1 convolution to `K` channels of what `first` computes.

    Raises:
        ValueError: K is no number of channels.
    """
    return Conv2dProblem(N=first.N, H=first.P, W=first.Q, C=first.K, K=K, R=1, S=1, precision=first.precision)


def configurations() -> Sequence[BackToBackConfig]:
    """Returns every configuration that the kernel can be compiled in."""
    return configs.BACK_TO_BACK


def supports_back_to_back(
    first: Conv2dProblem, second: Conv2dProblem, device: Device, *, third: Conv2dProblem | None = None
) -> Support:
    """Whether the kernel computes `second` behind `first`, and `third` behind that, on `device`, and if not, why."""
    if first.precision not in PRECISION_NAMES:
        return False, f"computes in {' or '.join(PRECISION_NAMES)}, not in {first.precision}"
    supported, why_not = _FIRST.supports(first, device)
    if not supported:
        return False, why_not
    if second != back_to_back_problem(first, second.K):
        return False, "needs a second convolution of 1×1, stride 1, padding 0, groups 1 behind the first"
    exceeded = second.limit_exceeded()
    if exceeded is not None:
        return False, exceeded
    mid_channels = sorted({config.mid_channels for config in configs.BACK_TO_BACK})
    if first.K not in mid_channels or second.K % BackToBackConfig.COLUMNS:
        *smaller, largest = mid_channels
        return False, (
            f"needs {', '.join(map(str, smaller))} or {largest} channels between the two and a multiple of "
            f"{BackToBackConfig.COLUMNS} behind them, not {first.K} and {second.K}"
        )
    return (True, "") if third is None else _supports_third(first, second, third)


def _supports_third(first: Conv2dProblem, second: Conv2dProblem, third: Conv2dProblem) -> Support:
    if third != back_to_back_problem(second, third.K):
        return False, "needs a third convolution of 1×1, stride 1, padding 0, groups 1 behind the second"
    known = sorted({config.next_channels for config in configs.BACK_TO_BACK if config.mid_channels == first.K} - {0})
    if third.K not in known:
        filters = f"behind {first.K} channels with {' or '.join(map(str, known))} filters, not with {third.K}"
        return (
            False,
            f"computes a third convolution {filters if known else f'behind 64 or 128 channels, not behind {first.K}'}",
        )
    return True, ""


def back_to_back_candidates(
    first: Conv2dProblem, second: Conv2dProblem, device: Device, *, third: Conv2dProblem | None = None
) -> Sequence[BackToBackConfig]:
    """Returns the configurations that compute all of them on `device`; none where the kernel does not support them."""
    if not supports_back_to_back(first, second, device, third=third)[0]:
        return ()
    wanted = first.precision, first.K, third.K if third else 0
    return [c for c in configs.BACK_TO_BACK if (c.precision, c.mid_channels, c.next_channels) == wanted]


def launch_back_to_back(
    first: Conv2dProblem,
    second: Conv2dProblem,
    operands: BackToBackOperands,
    config: BackToBackConfig,
    *,
    third: Conv2dProblem | None = None,
) -> None:
    """Enqueues the kernel on the current stream of the current device.

    Args:
        first, second, third: what `supports_back_to_back`; N·P·Q must not be 0.
        operands: their arrays, `next` among them where there is a third convolution.
        config: one of `back_to_back_candidates`.

    Raises:
        ValueError: only one of `third` and its operands is given.
    """
    if (third is None) != (operands.next is None):
        raise ValueError("a third convolution needs both its problem and its operands")
    kernel = jit.get_function(name, defines=config.defines())
    first_filter, second_filter = (filter.weight for filter in operands.filters)
    next_maps, next_bias, next_relu = (tensor_maps.NONE, tensor_maps.NONE), None, False
    if third and operands.next:
        next_filter, next_bias, z, next_relu = operands.next
        next_maps = (
            tensor_maps.matrix_map(third, next_filter.weight, third.gemm_k, config.mid_channels),
            tensor_maps.matrix_map(third, z, third.K, config.tile_m // config.consumers),
        )
    arguments = (
        tensor_maps.im2col_map(first, operands.x, config.tile_m),
        tensor_maps.matrix_map(first, first_filter, first.gemm_k, config.mid_channels),
        tensor_maps.matrix_map(second, second_filter, second.gemm_k, config.SLICE),
        tensor_maps.matrix_map(second, operands.residual, second.K, config.tile_m),
        tensor_maps.matrix_map(second, operands.y, second.K, config.tile_m // config.consumers),
        *next_maps,
        *(NULL if bias is None else bias for bias in (*operands.biases, next_bias)),
        conv2d_params(first, operands.relus[0]),
        conv2d_params(second, operands.relus[1]),
        np.int32(next_relu),
    )
    grid = (min(blocks(first.gemm_m, config.tile_m), multiprocessors()),)
    jit.launch(kernel, grid, (config.threads,), arguments, shared=config.shared_memory, waits=True)
