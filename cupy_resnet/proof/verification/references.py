"""What a model is verified against: torch, or this package's NumPy engine in float64."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ..._names import unknown_name
from ...binding import DEFAULT_EPS, bind
from ...checkpoints import infer_sizes
from ...engines.numpy_engine import NumpyEngine
from ...networks import Network, describe
from ...weights_store import Weights
from .recording import Recording

REFERENCES = ("torch", "numpy")


class Reference(Protocol):
    """Another implementation of one network with the same weights."""

    name: str
    """In words, for people."""

    def checkpoints(self, x: np.ndarray) -> Mapping[str, np.ndarray]:
        """Returns what `Recording.values` describes, for float32 (N, C, H, W)."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Returns (N, num_classes)."""


def make_reference(kind: str, weights: Weights, *, device: str = "cpu") -> Reference:
    """Builds a reference from weights, as `cupy_resnet.weights_store.resolve` finds them.

    Args:
        kind: ``"torch"``: torchvision's own network where it has one, else the network's description run by torch's
            functions (`torch_reference`); in float32, with TF32 off. ``"numpy"``: the NumPy engine in float64, nothing
            folded or fused.
        weights: of the network.
        device: where torch computes, ``"cpu"`` or ``"cuda"``.

    Raises:
        ImportError: torch or torchvision is not installed; the message says how to get it.
        ValueError: another kind.
    """
    if kind not in REFERENCES:
        raise ValueError(unknown_name("reference", kind, REFERENCES))
    classes, channels = infer_sizes(weights.state)
    network = describe(weights.model, num_classes=classes, in_channels=channels)
    if kind == "numpy":
        return NumpyReference(network, weights.state, weights.batch_norm_eps)
    from .torch_reference import torch_reference

    return torch_reference(network, weights.state, weights.batch_norm_eps, device=device)


def record_reference(reference: Reference, weights: Weights, x: np.ndarray, *, input_from: str = "") -> Recording:
    """Runs a reference and keeps what it computes at its checkpoints; arguments as for `recording.record`."""
    return Recording(
        values=reference.checkpoints(x),
        input=x,
        input_from=input_from,
        model=weights.model,
        computed_by=reference.name,
        weights=weights.name,
        weights_sha256=weights.sha256,
    )


class NumpyReference:
    """A network on the NumPy engine in float64, each operation of its own: BatchNorm is not folded.

    Args:
        network: a description.
        state: its state dict.
        batch_norm_eps: as in `cupy_resnet.binding.bind`; None for torch's default.
    """

    name = "NumPy engine, float64, not fused"

    def __init__(
        self,
        network: Network,
        state: Mapping[str, np.ndarray],
        batch_norm_eps: float | Mapping[str, float] | None = None,
    ) -> None:
        self._ops = NumpyEngine("float64")
        eps = DEFAULT_EPS if batch_norm_eps is None else batch_norm_eps
        self._network = bind(network, state, self._ops, fuse=False, batch_norm_eps=eps)

    def checkpoints(self, x: np.ndarray) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}

        def keep(name: str, value: Any) -> None:
            values[name] = self._ops.nhwc_to_nchw(value) if value.ndim == 4 else value

        self._network(self._ops, x.transpose(0, 2, 3, 1), keep)
        return values

    def logits(self, x: np.ndarray) -> np.ndarray:
        logits: np.ndarray = self._network(self._ops, x.transpose(0, 2, 3, 1))[0]
        return logits
