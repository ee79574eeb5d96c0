"""`load` and the `Model` it returns: a network with its weights on one engine."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from ._names import unknown_name
from .arrays import exchanged, kind_of, to_nhwc
from .binding import DEFAULT_EPS, bind
from .checkpoints import infer_sizes, read_state_dict, verify
from .engines.base import Ops, Pair, pair
from .engines.selection import make_engine
from .errors import CheckpointError
from .explanation import Explanation, explain
from .networks import Network, describe, matching_models

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", "fp32")


def load(
    model: str,
    weights: str | Path | Mapping[str, Any] | None = None,
    *,
    engine: str = "auto",
    kernel: str = "auto",
    precision: str = "auto",
    fuse: bool = True,
    strict: bool = False,
    num_classes: int | None = None,
    in_channels: int | None = None,
    batch_norm_eps: float | Mapping[str, float] = DEFAULT_EPS,
    device: int | None = None,
) -> "Model":
    """Loads a network with its weights.

    Args:
        model: one of `cupy_resnet.list_models`, as ``"resnet18"``.
        weights: a ``.safetensors``, ``.npz``, ``.pth`` or ``.pt`` file, or a mapping from torchvision's keys to
            arrays; wrappers' prefixes and containers are undone, see `cupy_resnet.checkpoints.read_state_dict`.
        engine: ``"cuda"``, ``"numpy"``, or ``"auto"``: CUDA where a GPU can be used, else NumPy.
        kernel: the convolution kernel to use wherever it applies, or ``"auto"`` for the fastest; `Model.explain`
            lists where it does not apply.
        precision: ``"fp32"``, or ``"auto"``, which is the same.
        fuse: whether BatchNorm is folded into the convolutions, and residual and ReLU are computed with them.
        strict: whether a convolution that `kernel` does not support is an error.
        num_classes: by default what the classifier in `weights` has.
        in_channels: by default what the first filter in `weights` has.
        batch_norm_eps: one value, or a mapping from BatchNorm names such as ``"layer1.0.bn1"``, 1e-5 for the rest.
        device: index of the GPU, by default CuPy's current one.

    Raises:
        CheckpointError: the weights cannot be read or do not fit; the message lists how.
        EngineUnavailableError: the CUDA engine was asked for and cannot run here.
        FileNotFoundError: there is no such file.
        ValueError: an unknown model, engine, kernel or precision, or no weights.
        TypeError: `weights` is neither a path nor a mapping.
    """
    describe(model, num_classes=num_classes, in_channels=in_channels)
    if precision not in PRECISIONS:
        raise ValueError(unknown_name("precision", precision, PRECISIONS))
    if weights is None:
        raise ValueError(
            f"{model} needs weights: pass a .safetensors, .npz or .pth file or a state dict; in the source tree "
            f"'python weights/convert_torchvision.py {model}' makes a file from torchvision's weights"
        )
    ops = make_engine(engine, kernel=kernel, strict=strict, device=device)
    state = read_state_dict(weights)
    found_classes, found_channels = infer_sizes(state)
    network = describe(model, num_classes=num_classes or found_classes, in_channels=in_channels or found_channels)
    try:
        verify(state, network.tensor_table(), model)
    except CheckpointError as error:
        others = [name for name in matching_models({key: a.shape for key, a in state.items()}) if name != model]
        if others:
            raise CheckpointError(f"{error}\nIts tensors are those of {' or '.join(others)}.") from error
        raise
    bound = bind(network, state, ops, fuse=fuse, batch_norm_eps=batch_norm_eps)
    logger.info("%s: %d tensors on the %s engine", model, len(state), ops.name)
    return Model(bound, ops, kernel=kernel, strict=strict, fuse=fuse)


class Model:
    """A network with its weights on one engine. Made by `load`.

    A forward pass changes nothing in the model: several threads may call one at once.

    Args:
        network: bound to `ops`.
        ops: the engine.
        kernel, strict, fuse: as in `load`.
    """

    def __init__(
        self, network: Network, ops: Ops, *, kernel: str = "auto", strict: bool = False, fuse: bool = True
    ) -> None:
        self.name = network.name
        self.num_classes = network.num_classes
        self.in_channels = network.in_channels
        self.num_features = network.num_features
        self.checkpoint_names = network.checkpoint_names
        self.default_size = network.default_size
        self.engine = ops.name
        self.precision = "fp32"
        self.kernel = kernel
        self.strict = strict
        self.fuse = fuse
        self._bound: tuple[Network, Ops] | None = (network, ops)

    def __call__(self, x: Any) -> Any:
        """Returns the logits (N, num_classes), float32, of a batch of normalised images.

        Args:
            x: (N, in_channels, H, W), N ≥ 0, floating point, from NumPy, CuPy or torch, on the CPU or the GPU.

        Returns:
            The same kind of array as `x`, on the same device.

        Raises:
            TypeError: not such an array, or integers.
            ValueError: a shape that the network cannot run; a GPU array on another device than the model.
        """
        network, ops = self._running(x)
        with exchanged(x, ops) as (array, restore):
            logits, _ = network(ops, to_nhwc(ops, array))
            return restore(logits)

    def features(self, x: Any) -> Any:
        """Returns the pooled features (N, num_features) in front of the classifier; otherwise as calling the model."""
        return self.logits_and_features(x)[1]

    def logits_and_features(self, x: Any) -> tuple[Any, Any]:
        """Returns logits (N, num_classes) and pooled features (N, num_features) from one pass."""
        network, ops = self._running(x)
        with exchanged(x, ops) as (array, restore):
            logits, features = network(ops, to_nhwc(ops, array))
            return restore(logits), restore(features)

    def checkpoints(self, x: Any, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Returns intermediate results of one pass, in the order they are computed.

        Args:
            x: as for calling the model.
            names: which of `checkpoint_names`; all of them by default.

        Returns:
            Name to float32 NumPy array: (N, C, H, W) for activations, (N, C) for ``gap`` and ``logits``.

        Raises:
            ValueError: a name that is not a checkpoint of this network.
        """
        network, ops = self._running(x)
        wanted = set(self.checkpoint_names if names is None else names)
        for name in wanted.difference(self.checkpoint_names):
            raise ValueError(unknown_name(f"checkpoint of {self.name}", name, self.checkpoint_names))
        captured: dict[str, np.ndarray] = {}

        def capture(name: str, value: Any) -> None:
            if name in wanted:
                captured[name] = ops.to_numpy(ops.nhwc_to_nchw(value) if value.ndim == 4 else value)

        with exchanged(x, ops) as (array, _):
            network(ops, to_nhwc(ops, array), capture)
        return captured

    def explain(self, shape: tuple[int, int, int, int] | None = None, *, engine: str | None = None) -> Explanation:
        """Tells which kernel computes each operation, and why; nothing is run.

        Args:
            shape: (N, C, H, W) of the input, by default one image of the network's own size.
            engine: ``"cuda"`` or ``"numpy"``, by default the model's own. Kernels can be explained without a GPU:
                they are then chosen as for an H100.
        """
        network, ops = self._alive()
        device = None
        if ops.name == "cuda":
            from .engines.cuda_engine import CudaEngine, describe_device

            device = describe_device(cast(CudaEngine, ops).device)
        return explain(
            network,
            shape or (1, self.in_channels, self.default_size, self.default_size),
            engine=engine or self.engine,
            device=device,
            kernel=self.kernel,
            strict=self.strict,
            fuse=self.fuse,
        )

    def warmup(self, batch_size: int = 1, size: Pair | None = None) -> None:
        """Runs one batch of zeros, so that kernels are compiled and memory is there before the first real call.

        Args:
            batch_size: N.
            size: height and width in pixels, by default the network's own.
        """
        height, width = pair(size or self.default_size)
        self(np.zeros((batch_size, self.in_channels, height, width), np.float32))

    def close(self) -> None:
        """Frees the weights and what the engine holds; the model cannot be called afterwards. May be repeated."""
        if self._bound is None:
            return
        ops = self._bound[1]
        self._bound = None  # the last reference to the weights
        release = getattr(ops, "close", None)
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._bound else ", closed"
        return (
            f"Model({self.name!r}, num_classes={self.num_classes}, in_channels={self.in_channels}, "
            f"engine={self.engine!r}, kernel={self.kernel!r}, precision={self.precision!r}, fuse={self.fuse}{state})"
        )

    def _alive(self) -> tuple[Network, Ops]:
        if self._bound is None:
            raise RuntimeError(f"this {self.name} model is closed; load it again")
        return self._bound

    def _running(self, x: Any) -> tuple[Network, Ops]:
        network, ops = self._alive()
        kind_of(x)
        network.check_input(tuple(x.shape))
        return network, ops
