"""The same network with ever more operations computed in one kernel, put together from what engines offer publicly.

Layers are bound with BatchNorm folded or not, and a wrapper around the engine's operations forwards everything, but
joins an addition with the ReLU behind it, or takes them out of a convolution that would compute them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ...binding import bind, bind_shapes
from ...engines.base import Ops, back_to_back_by_parts, shortcut_by_parts
from ...engines.shape_engine import OpRecord, ShapeArray, ShapeEngine
from ...networks import Conv2d, Network
from ...networks.network import Layer


class _Forwarding:
    """The operations of an engine, unless a subclass has its own."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class AddReluFused(_Forwarding):
    """Computes an addition together with the ReLU behind it; every addition of the networks has one."""

    def add(self, x: Any, y: Any) -> "_Sum":
        return _Sum(x, y)

    def relu(self, x: Any) -> Any:
        return self._ops.add_relu(x.x, x.y) if isinstance(x, _Sum) else self._ops.relu(x)


@dataclass(frozen=True)
class _Sum:
    """An addition that waits for its ReLU."""

    x: Any
    y: Any


class AddReluApart(AddReluFused):
    """Takes residual and ReLU out of a convolution with a residual, into one kernel of their own.

    So every convolution is by itself: what is added may be another one's output.
    """

    def conv2d(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        *,
        residual: Any = None,
        shortcut: Any = None,
        relu: bool = False,
        overwrite_residual: bool = False,
        **geometry: Any,
    ) -> Any:
        if shortcut is not None:
            return shortcut_by_parts(cast(Ops, self), x, weight, bias, shortcut, relu=relu, **geometry)
        if residual is None:
            return self._ops.conv2d(x, weight, bias, relu=relu, **geometry)
        y = self._ops.conv2d(x, weight, bias, **geometry)
        return self._ops.add_relu(y, residual) if relu else self._ops.add(y, residual)

    def conv2d_back_to_back(
        self,
        x: Any,
        weights: Any,
        biases: Any = (None, None),
        *,
        residual: Any = None,
        shortcut: Any = None,
        relu: bool = False,
        overwrite_residual: bool = False,
        following: Any = None,
        **geometry: Any,
    ) -> tuple[Any, None]:
        of_second = {"residual": residual, "shortcut": shortcut, "relu": relu}
        return back_to_back_by_parts(cast(Ops, self), x, weights, biases, geometry, **of_second)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Args:
        name: what it is called.
        folded: returns the names of the convolutions that have their BatchNorm folded in.
        wrapper: around the engine's operations.
        torch: the way torch has to do the same, ``"eager"`` or ``"folded"``; None where it has no module for it.
    """

    name: str
    folded: Callable[[Network], set[str]]
    wrapper: Callable[[Any], Any]
    torch: str | None = None


def _none(network: Network) -> set[str]:
    return set()


def _followed_by_relu(network: Network) -> set[str]:
    """With BatchNorm and ReLU right behind: all but a block's last convolution and its shortcut's."""
    names = {network.stem.name}
    for _, block in network.blocks:
        names |= set([conv.name for conv in block.convolutions() if ".downsample." not in conv.name][:-1])
    return names


def _every(network: Network) -> set[str]:
    return {layer.name for layer in network.layers() if isinstance(layer, Conv2d)}


STAGES = (
    Stage(name="standard", folded=_none, wrapper=lambda ops: ops, torch="eager"),
    Stage(name="+ add-ReLU", folded=_none, wrapper=AddReluFused),
    Stage(name="+ conv-BN-ReLU", folded=_followed_by_relu, wrapper=AddReluApart),
    Stage(name="+ conv-BN", folded=_every, wrapper=AddReluApart, torch="folded"),
    Stage(name="+ conv-add-ReLU", folded=_every, wrapper=lambda ops: ops),
)
"""From every operation in a kernel of its own (``fuse=False``) to what `cupy_resnet.load` fuses in fp32."""


def bind_stage(stage: Stage, network: Network, state: Mapping[str, np.ndarray], ops: Any) -> Network:
    """Returns a network with the weights of `state`, to be called with ``stage.wrapper(ops)``.

    Args:
        stage: of `STAGES`.
        network: a description.
        state: its state dict.
        ops: the engine.
    """
    return _joined(stage, network, bind(network, state, ops, fuse=False), bind(network, state, ops, fuse=True))


def stage_records(stage: Stage, network: Network, shape: tuple[int, int, int, int]) -> list[OpRecord]:
    """Returns the operations of a pass, with their FLOPs and least bytes, from shapes alone.

    Args:
        stage: of `STAGES`.
        network: a description.
        shape: (N, H, W, C) of the input.
    """
    ops = ShapeEngine()
    bound = _joined(stage, network, bind_shapes(network, fuse=False), bind_shapes(network, fuse=True))
    bound(stage.wrapper(ops), ShapeArray(shape))
    return ops.records


def _joined(stage: Stage, network: Network, unfused: Network, fused: Network) -> Network:
    names = stage.folded(network)
    layers: dict[str, Any] = {layer.name: layer for layer in fused.layers()}

    def chosen(layer: Layer) -> Layer:
        return layers[layer.name] if layer.name in names else layer

    return unfused.map_layers(chosen)
