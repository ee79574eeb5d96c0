"""conv2d_wgmma_b2b: a convolution and the 1×1 convolution behind it, with a residual or a shortcut, in one launch.

It ends a ResNet's bottleneck: the map between the two, and what it costs to store and to read it, is spared. The launch
computes what the two convolutions compute one after the other, each sum in the same order up to the tensor cores' own.
It may go on with a third, the beginning of the next bottleneck, for which the output need not be read again.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import jit
from . import configs, tensor_maps
from .configs import BackToBackConfig
from .device import Device
from .params import conv2d_params
from .problem import Conv2dPair
from .tensor_core_variants import Wgmma, multiprocessors
from .variant import NULL, Filter, Shortcut, Support, blocks

if TYPE_CHECKING:
    import cupy

__all__ = [
    "BackToBackConfig",
    "BackToBackOperands",
    "Following",
    "back_to_back_candidates",
    "configurations",
    "launch_back_to_back",
    "name",
    "supports_back_to_back",
]

name = "conv2d_wgmma_b2b"
PRECISION_NAMES = ("fp16", "bf16", "tf32")

_FIRST = Wgmma()
"""The kernel that would compute the first convolution on its own takes its pixels the same way."""


class Following(NamedTuple):
    """The arrays of the 1×1 convolution that comes after the two.

    Args:
        filter: KRSC.
        bias: (K,) float32, or None.
        relu: whether a ReLU ends it.
        z: NPQK, its output; none of the others' arrays.
    """

    filter: Filter
    bias: "cupy.ndarray | None"
    relu: bool
    z: "cupy.ndarray"


class BackToBackOperands(NamedTuple):
    """The arrays of both convolutions on one device, C-contiguous, 16-byte aligned, of the precision's storage dtype.

    Args:
        x: the first one's input, NHWC.
        filters: of the first and the second, KRSC.
        biases: (K,) float32 each, or None.
        residual: NPQK, of the second one's output; it is added before the ReLU. None where there is a shortcut.
        y: NPQK; may be the residual.
        relus: whether a ReLU ends the first, and the second.
        shortcut: of the second, if the pair has one.
        following: if the pair has one.
        backwards: begin with the last tile: no bit of the results depends on it.
    """

    x: "cupy.ndarray"
    filters: tuple[Filter, Filter]
    biases: "tuple[cupy.ndarray | None, cupy.ndarray | None]"
    residual: "cupy.ndarray | None"
    y: "cupy.ndarray"
    relus: tuple[bool, bool]
    shortcut: Shortcut | None = None
    following: Following | None = None
    backwards: bool = False


def configurations() -> Sequence[BackToBackConfig]:
    """Returns every configuration that the kernel can be compiled in."""
    return configs.BACK_TO_BACK


def supports_back_to_back(pair: Conv2dPair, device: Device) -> Support:
    """Whether the kernel computes all convolutions of `pair` on `device`, and if not, why."""
    first, second = pair.first, pair.second
    if first.precision not in PRECISION_NAMES:
        return False, f"computes in {_alternatives(PRECISION_NAMES)}, not in {first.precision}"
    supported, why_not = _FIRST.supports(first, device)
    if not supported:
        return False, why_not
    for part in pair.parts[1:]:
        exceeded = part.limit_exceeded()
        if exceeded is not None:
            return False, exceeded
    forms = [config for config in configs.BACK_TO_BACK if config.precision == first.precision]
    mid_channels = sorted({config.mid_channels for config in forms})
    wanted = 2 * max(config.columns for config in forms)
    if first.K not in mid_channels or second.K % wanted:
        return False, (
            f"needs {_alternatives(mid_channels)} channels between the two and a multiple of {wanted} behind them, not "
            f"{first.K} and {second.K}"
        )
    if pair.shortcut_channels:
        supported, why_not = _supports_shortcut(pair, device, forms)
        if not supported:
            return False, why_not
    forms = [config for config in forms if config.shortcut_channels == pair.shortcut_channels]
    going_on = {(config.mid_channels, config.next_channels) for config in forms if config.next_channels}
    if pair.following and (first.K, pair.following) not in going_on:
        known = sorted(filters for channels, filters in going_on if channels == first.K)
        if not known:
            behind = _alternatives(sorted({channels for channels, _ in going_on}))
            return False, f"goes on with a third convolution behind {behind} channels, not behind {first.K}"
        return False, (
            f"goes on with {_alternatives(known)} filters behind {first.K} channels, not with {pair.following}"
        )
    return True, ""


def _supports_shortcut(pair: Conv2dPair, device: Device, forms: Sequence[BackToBackConfig]) -> Support:
    known = sorted({(config.shortcut_channels, config.mid_channels) for config in forms if config.shortcut_channels})
    if (pair.shortcut_channels, pair.first.K) not in known:
        listed = " or ".join(f"{channels} channels behind {behind}" for channels, behind in known)
        return False, f"adds a shortcut of {listed}, not one of {pair.shortcut_channels} behind {pair.first.K}"
    adding = [config for config in forms if config.shortcut_channels == pair.shortcut_channels]
    if not pair.following and all(config.next_channels for config in adding):
        return False, "adds a shortcut where a third convolution follows, not without"
    return _FIRST.supports(pair.second, device)


def _alternatives(values: Sequence[object]) -> str:
    """As text."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def back_to_back_candidates(pair: Conv2dPair, device: Device) -> Sequence[BackToBackConfig]:
    """Returns the configurations that compute `pair` on `device`; none where the kernel does not support it."""
    if not supports_back_to_back(pair, device)[0]:
        return ()
    wanted = pair.precision, pair.first.K, pair.following, pair.shortcut_channels
    return [
        config
        for config in configs.BACK_TO_BACK
        if (config.precision, config.mid_channels, config.next_channels, config.shortcut_channels) == wanted
        and pair.K % (2 * config.columns * config.cluster_size) == 0
    ]


def launch_back_to_back(pair: Conv2dPair, operands: BackToBackOperands, config: BackToBackConfig) -> None:
    """Enqueues the kernel on the current stream of the current device.

    Args:
        pair: what `supports_back_to_back` is true of; N·P·Q must not be 0.
        operands: their arrays.
        config: one of `back_to_back_candidates`.
    """
    first, second, third = pair.first, pair.second, pair.third
    kernel = jit.get_function(name, defines=config.defines())
    first_filter, second_filter = (in_order(filter, pair.precision) for filter in operands.filters)
    if operands.shortcut is None:
        added_maps = (
            tensor_maps.matrix_map(second, operands.residual, second.K, config.tile_m, factor=False),
            tensor_maps.NONE,
        )
    else:
        shortcut = second.shortcut_alone(operands.shortcut.x.shape)
        added_maps = (
            tensor_maps.im2col_map(shortcut, operands.shortcut.x, config.tile_m),
            tensor_maps.matrix_map(
                shortcut, in_order(operands.shortcut.filter, pair.precision), shortcut.C, config.columns
            ),
        )
    next_maps, next_bias, next_relu = (tensor_maps.NONE, tensor_maps.NONE), None, False
    if third is not None:
        assert operands.following is not None, "what follows has operands"
        next_filter, next_bias, next_relu, z = operands.following
        next_maps = (
            tensor_maps.matrix_map(third, in_order(next_filter, pair.precision), third.gemm_k, config.mid_channels),
            tensor_maps.matrix_map(third, z, third.K, config.tile_m // config.consumers, factor=False),
        )
    arguments = (
        tensor_maps.im2col_map(first, operands.x, config.tile_m),
        tensor_maps.matrix_map(first, first_filter, first.gemm_k, config.block_channels),
        tensor_maps.matrix_map(second, second_filter, second.gemm_k, config.columns),
        *added_maps,
        tensor_maps.matrix_map(second, operands.y, second.K, config.tile_m // config.consumers, factor=False),
        *next_maps,
        *(NULL if bias is None else bias for bias in (*operands.biases, next_bias)),
        conv2d_params(first, operands.relus[0], operands.backwards),
        conv2d_params(second, operands.relus[1]),
        np.int32(next_relu),
    )
    grid = (min(blocks(first.gemm_m, config.tile_m), multiprocessors() // config.cluster_size), 1, config.cluster_size)
    jit.launch(kernel, grid, (config.threads,), arguments, shared=config.shared_memory, waits=True)


def in_order(filter: Filter, precision: str) -> "cupy.ndarray":
    """Returns KRSC filters as the kernel takes them: in TF32 `interleaved`, made once per filter."""
    return filter.derived(name, interleaved) if precision == "tf32" else filter.weight


def interleaved(weight: "cupy.ndarray") -> "cupy.ndarray":
    """Returns (K, ...) filters with those of every 8 in the order 0 4 1 5 2 6 3 7, C-contiguous; NumPy arrays, too."""
    K, *rest = weight.shape
    return weight.reshape(K // 8, 2, 4, *rest).swapaxes(1, 2).reshape(K, *rest)
