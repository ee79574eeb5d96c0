"""A network as a list of layers that anybody can run: what a manifest says about the architecture."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..networks import Conv2d, Linear, Network
from ..networks.network import Layer

INPUT = "image"
"""Name of the network's input, as a layer's output is named."""


def layers(network: Network) -> list[dict[str, Any]]:
    """Lists a network's layers in the order they run.

    Args:
        network: a description.

    Returns:
        One entry per layer: ``kind``, ``inputs`` and ``output`` (names; the first input is ``"image"``, the last
        output the logits), the keys of its tensors and its attributes. ``weights/README.md`` has the table.
    """

    def by_key(layer: Layer) -> Layer:
        if isinstance(layer, Linear):
            return replace(layer, weight=f"{layer.name}.weight", bias=f"{layer.name}.bias")
        norm = layer.batch_norm
        if norm is not None:
            keys: dict[str, Any] = {key.rpartition(".")[2]: key for key, _ in norm.tensors()}
            norm = replace(norm, **keys)
        return replace(layer, weight=f"{layer.name}.weight", batch_norm=norm)

    convolutions = {f"{layer.name}.weight": layer for layer in network.layers() if isinstance(layer, Conv2d)}
    recorder: Any = _Recorder(convolutions)  # has the operations that networks use, on names in place of arrays
    network.map_layers(by_key)(recorder, INPUT)
    return recorder.layers


def with_batch_norm_eps(network: Network, batch_norm_eps: float | Mapping[str, float] | None) -> Network:
    """Returns the description with these eps in its BatchNorms; those that are not named, or None, stay.

    Raises:
        ValueError: a name that is no BatchNorm's.
    """
    if batch_norm_eps is None:
        return network
    one = None if isinstance(batch_norm_eps, Mapping) else float(batch_norm_eps)
    by_name = batch_norm_eps if isinstance(batch_norm_eps, Mapping) else {}
    left = set(by_name)

    def set_eps(layer: Layer) -> Layer:
        norm = None if isinstance(layer, Linear) else layer.batch_norm
        if isinstance(layer, Linear) or norm is None:
            return layer
        left.discard(norm.name)
        eps = by_name.get(norm.name, norm.eps) if one is None else one
        return replace(layer, batch_norm=replace(norm, eps=eps))

    changed = network.map_layers(set_eps)
    if left:
        raise ValueError(f"batch_norm_eps: {network.name} has no BatchNorm named {', '.join(sorted(left))}")
    return changed


class _Recorder:
    """Stands in for an engine: arrays are names, weights are keys, and an operation is an entry of `layers`."""

    def __init__(self, convolutions: Mapping[str, Conv2d]) -> None:
        self.layers: list[dict[str, Any]] = []
        self._convolutions = convolutions

    def _add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        output = output or f"{kind}_{1 + sum(layer['kind'] == kind for layer in self.layers)}"
        self.layers.append({"kind": kind, "inputs": list(inputs), "output": output, **attributes})
        return output

    def pixels(self, x: str, **options: Any) -> str:
        return x  # the manifest's input is what the first layer takes

    def conv2d(self, x: str, weight: str, *, stride: int, padding: int, groups: int) -> str:
        conv = self._convolutions[weight]
        return self._add(
            "conv2d",
            x,
            output=conv.name,
            weight=weight,
            in_channels=conv.in_channels,
            out_channels=conv.out_channels,
            kernel_size=conv.kernel_size,
            stride=stride,
            padding=padding,
            dilation=1,
            groups=groups,
        )

    def batch_norm2d(self, x: str, weight: str, bias: str, running_mean: str, running_var: str, *, eps: float) -> str:
        return self._add(
            "batch_norm2d",
            x,
            output=weight.removesuffix(".weight"),
            weight=weight,
            bias=bias,
            running_mean=running_mean,
            running_var=running_var,
            eps=eps,
        )

    def relu(self, x: str) -> str:
        return self._add("relu", x)

    def add(self, x: str, y: str) -> str:
        return self._add("add", x, y)

    def max_pool2d(self, x: str, kernel_size: int, stride: int, padding: int) -> str:
        return self._add("max_pool2d", x, kernel_size=kernel_size, stride=stride, padding=padding)

    def pad_channels(self, x: str, before: int, after: int, *, stride: int) -> str:
        return self._add("pad_channels", x, before=before, after=after, stride=stride)

    def global_avg_pool2d(self, x: str) -> str:
        return self._add("global_avg_pool2d", x)

    def linear(self, x: str, weight: str, bias: str) -> str:
        return self._add("linear", x, output=weight.removesuffix(".weight"), weight=weight, bias=bias)
