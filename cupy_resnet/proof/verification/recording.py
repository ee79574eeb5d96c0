"""`Recording`: one pass of a network, with what it computed at every checkpoint; and how to make one of a model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engines.base import Array, Ops
from ...model import Model
from ...networks import Network

Stage = Callable[[Ops, Array], Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """What a network made of an input.

    Attributes:
        values: checkpoint to array, in the order they are computed: (N, C, H, W) for ``stem`` and blocks, (N, C) for
            ``gap`` and ``logits``. A mapping that may read files when it is asked.
        input: float32 (N, C, H, W), normalised.
        input_from: in words, where it comes from; empty if unknown.
        model: the network's name; None if unknown.
        computed_by: in words, what computed the values.
        precision: of the computation, as in `cupy_resnet.load`.
        weights: the weights' name; empty if unknown.
        weights_sha256: of the file they were read from; empty if unknown.
    """

    values: Mapping[str, np.ndarray]
    input: np.ndarray
    input_from: str = ""
    model: str | None = None
    computed_by: str
    precision: str = "fp32"
    weights: str = ""
    weights_sha256: str = ""


def record(model: Model, x: np.ndarray, *, input_from: str = "") -> Recording:
    """Runs a model and keeps what it computes at its checkpoints.

    Args:
        model: the model.
        x: float32 (N, C, H, W), N ≥ 1, normalised.
        input_from: in words, where `x` comes from.

    Raises:
        ValueError: a shape that the network cannot run, or no image.
    """
    if x.ndim == 4 and not len(x):
        raise ValueError(f"there is nothing to verify in an input of shape {x.shape}; pass at least one image")
    return recording_of(model, model.checkpoints(x), x, input_from)


def recording_of(model: Model, values: Mapping[str, np.ndarray], x: np.ndarray, input_from: str) -> Recording:
    """Returns what `model` computed from `x` with what is known about the model."""
    return Recording(
        values=values,
        input=x,
        input_from=input_from,
        model=model.name,
        computed_by=describe(model),
        precision=model.precision,
        weights=model.weights_name,
        weights_sha256=model.sha256,
    )


def describe(model: Model) -> str:
    """Returns in words what computes a model's results."""
    kernel = "" if model.engine == "numpy" else f", kernel {model.kernel}"
    return f"{model.engine} engine{kernel}, {model.precision}, {'fused' if model.fuse else 'not fused'}"


def stages(network: Network) -> Iterator[tuple[str, Stage]]:
    """Yields (checkpoint, function) in order; each function computes its checkpoint from the one before.

    One after the other they are the network, see `Network.__call__`: the first takes pixels, as a call of the network
    does, the blocks activations.

    Args:
        network: bound.
    """
    yield "stem", lambda ops, x: network.finish_stem(ops, network.front(ops, x))
    yield from network.blocks
    yield "gap", lambda ops, x: ops.global_avg_pool2d(x)
    yield "logits", lambda ops, x: ops.linear(x, network.head.weight, network.head.bias)


def run_steps(model: Model, x: np.ndarray, reference: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Runs each part of a model from the reference's own values in front of it, so that errors do not add up.

    Args:
        model: the model.
        x: (N, C, H, W), what the stem gets.
        reference: checkpoint to array, as `Recording.values`. A part whose input is not there is left out.

    Yields:
        A checkpoint's name and the model's array, laid out as `Recording.values`.
    """
    network, ops = model.network, model.ops  # what a model runs is nobody's business but that of this room
    before: np.ndarray | None = x
    for name, stage in stages(network):
        if before is not None:
            y: Any = stage(ops, _to_engine(ops, before, activations=name != "stem"))
            yield name, ops.to_numpy(ops.nhwc_to_nchw(y) if y.ndim == 4 else y)
        before = reference.get(name)


def _to_engine(ops: Ops, x: np.ndarray, *, activations: bool) -> Array:
    """(N, C, H, W) as pixels (N, H, W, C), or as activations in what the engine stores; (N, C) as it is."""
    if x.ndim != 4:
        return ops.asarray(x)
    pixels = ops.upload(np.asarray(x, np.float32)).transpose(0, 2, 3, 1)
    return ops.pixels(pixels) if activations else pixels
