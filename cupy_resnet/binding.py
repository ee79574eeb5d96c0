"""Puts weights into a network's description: the engine's arrays from a checkpoint, or shapes alone.

The only place that knows both a checkpoint's layout (OIHW, separate BatchNorm) and an engine's (KRSC, folded).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .checkpoints import fold_batch_norm, oihw_to_krsc
from .engines.base import Ops
from .engines.shape_engine import ShapeArray
from .errors import CheckpointError
from .networks import BatchNorm2d, Conv2d, Linear, Network
from .networks.network import Layer

DEFAULT_EPS = 1e-5
"""torch's and torchvision's BatchNorm eps."""


def bind(
    network: Network,
    state: Mapping[str, np.ndarray],
    ops: Ops,
    *,
    fuse: bool = True,
    batch_norm_eps: float | Mapping[str, float] = DEFAULT_EPS,
) -> Network:
    """Returns `network` with the weights of `state` as arrays of the engine `ops`.

    Args:
        network: a description.
        state: a verified state dict: key to NumPy array, filters as OIHW.
        ops: the engine.
        fuse: whether to fold BatchNorm into filter and bias (in float64), so that a convolution, its residual and
            its ReLU are one call. Where two convolutions are added up the bias of both is that of the first.
        batch_norm_eps: one value for all layers, or a mapping from BatchNorm names (``"layer1.0.bn1"``) to values,
            1e-5 for those it does not name.

    Raises:
        CheckpointError: a folded value overflows the engine's dtype; the message names the layer.
        ValueError: `batch_norm_eps` names no layer of the network, or is negative.
    """
    eps = _eps_by_name(network, batch_norm_eps)
    dtype = np.dtype(getattr(ops, "dtype", np.float32))
    half = ops.precision == "fp16"
    limit = np.finfo(np.float16 if half else dtype)  # bfloat16's range is float32's

    def cast(array: np.ndarray) -> np.ndarray:
        # Values beyond the dtype become Inf here and are reported by name, not as NumPy's warning.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype=dtype)

    biases: dict[str, np.ndarray] = {}
    """Folded ones, in float64."""

    def bind_layer(layer: Layer) -> Layer:
        if isinstance(layer, Linear):
            return replace(
                layer,
                weight=ops.asarray(cast(state[f"{layer.name}.weight"])),
                bias=ops.asarray(cast(state[f"{layer.name}.bias"])),
            )
        weight = state[f"{layer.name}.weight"]
        bn = layer.batch_norm
        if bn is None:
            return replace(layer, weight=ops.filter(oihw_to_krsc(cast(weight))))
        vectors = {field: state[f"{bn.name}.{field}"] for field in ("weight", "bias", "running_mean", "running_var")}
        if not fuse:
            arrays = {field: ops.asarray(cast(vector)) for field, vector in vectors.items()}
            return replace(
                layer,
                weight=ops.filter(oihw_to_krsc(cast(weight))),
                batch_norm=replace(bn, eps=eps[bn.name], **arrays),
            )
        folded, bias = fold_batch_norm(
            weight,
            None,
            vectors["weight"],
            vectors["bias"],
            vectors["running_mean"],
            vectors["running_var"],
            eps[bn.name],
        )
        biases[layer.name] = bias
        bias = cast(bias)
        if not (np.abs(folded).max(initial=0) <= limit.max and np.isfinite(bias).all()):
            raise CheckpointError(
                f"{layer.name}: folding {bn.name} into it gives values beyond {limit.dtype}; the smallest running "
                f"variance is {vectors['running_var'].min():.3g} with eps {eps[bn.name]:.3g}"
            )
        # From float64 to what the engine stores in one rounding.
        return replace(layer, weight=ops.filter(oihw_to_krsc(folded)), bias=ops.asarray(bias), batch_norm=None)

    def join(last: Conv2d, downsample: Conv2d) -> tuple[Conv2d, Conv2d]:
        if last.name not in biases or downsample.name not in biases:
            return last, downsample
        bias = ops.asarray(cast(biases[last.name] + biases[downsample.name]))
        return replace(last, bias=bias), replace(downsample, bias=None)

    return network.map_layers(bind_layer).with_joint_biases(join)


def bind_shapes(network: Network, *, fuse: bool = True) -> Network:
    """Returns `network` with named shapes in place of weights, for `ShapeEngine`."""

    def vector(name: str, length: int) -> ShapeArray:
        return ShapeArray((length,), layer=name)

    def bind_layer(layer: Layer) -> Layer:
        if isinstance(layer, Linear):
            weight = ShapeArray((layer.out_features, layer.in_features), layer=layer.name)
            return replace(layer, weight=weight, bias=vector(layer.name, layer.out_features))
        weight = ShapeArray(layer.krsc_shape, layer=layer.name)
        bn = layer.batch_norm
        if bn is None or fuse:
            return replace(layer, weight=weight, bias=vector(layer.name, layer.out_channels), batch_norm=None)
        fields = ("weight", "bias", "running_mean", "running_var")
        arrays: dict[str, Any] = {field: vector(bn.name, bn.num_features) for field in fields}
        return replace(layer, weight=weight, batch_norm=replace(bn, **arrays))

    def join(last: Conv2d, downsample: Conv2d) -> tuple[Conv2d, Conv2d]:
        return (last, replace(downsample, bias=None)) if last.batch_norm is None else (last, downsample)

    return network.map_layers(bind_layer).with_joint_biases(join)


def _eps_by_name(network: Network, batch_norm_eps: float | Mapping[str, float]) -> dict[str, float]:
    norms: list[BatchNorm2d] = [
        layer.batch_norm for layer in network.layers() if isinstance(layer, Conv2d) and layer.batch_norm is not None
    ]
    given = batch_norm_eps if isinstance(batch_norm_eps, Mapping) else {norm.name: batch_norm_eps for norm in norms}
    unknown = given.keys() - {norm.name for norm in norms}
    if unknown:
        raise ValueError(
            f"batch_norm_eps: {network.name} has no BatchNorm named {', '.join(sorted(unknown))}; "
            f"its names are like {', '.join(norm.name for norm in norms[:3])}"
        )
    for name, value in given.items():
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"batch_norm_eps: {name} must be finite and not negative, got {value}")
    return {norm.name: float(given.get(norm.name, norm.eps)) for norm in norms}
