"""`Model`, what `cupy_resnet.load` returns: a network with its weights on one engine."""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, overload

import numpy as np

from ._names import unknown_name
from .arrays import check_out, exchanged, kind_of
from .engines.base import Ops, Pair, pair
from .explanation import Explanation, explain
from .images import Transforms
from .networks import Network
from .pipeline import Arguments, Classifier, Options, predictions
from .plan import Runner
from .prediction import Prediction
from .weights_store import Weights

if TYPE_CHECKING:
    from .tuning import Tuner


class Model:
    """A network with its weights on one engine. Made by `cupy_resnet.load`.

    A forward pass changes nothing in the model: several threads may call one at once.

    Args:
        network: bound to `ops`.
        ops: the engine.
        weights: what `network` was bound to.
        kernel, strict, fuse, plan: as in `load`.
        precision: the arithmetic, ``"auto"`` resolved.
        tuner: what times kernels at the first call of a shape.

    Attributes:
        name: the network's.
        transforms: how `predict` prepares images.
        categories, wnids: the classes' names and WordNet ids by index; None where unknown.
        weights_name: what the weights are called, as ``"IMAGENET1K_V1"`` or a file's name.
        weights_source: where they were first obtained: a URL, a file's name, or words.
        sha256: of the file they were read from, in hexadecimal; empty if it was none.
    """

    def __init__(
        self,
        network: Network,
        ops: Ops,
        *,
        weights: Weights,
        kernel: str = "auto",
        strict: bool = False,
        fuse: bool = True,
        precision: str = "fp32",
        plan: bool = True,
        tuner: "Tuner | None" = None,
    ) -> None:
        self.name = network.name
        self.num_classes = network.num_classes
        self.in_channels = network.in_channels
        self.num_features = network.num_features
        self.checkpoint_names = network.checkpoint_names
        self.default_size = network.default_size
        self.engine = ops.name
        self.precision = precision
        self.transforms = Transforms.from_dict(weights.transforms)
        self.categories = weights.categories
        self.wnids = weights.wnids
        self.weights_name = weights.name
        self.weights_source = weights.source
        self.sha256 = weights.sha256
        self.kernel = kernel
        self.strict = strict
        self.fuse = fuse
        self._runner: Runner | None = Runner(network, ops, plans=plan, tuner=tuner)

    @overload
    def predict(
        self, inputs: Any, *, stream: Literal[False] = False, **options: Unpack[Arguments]
    ) -> list[Prediction]: ...
    @overload
    def predict(self, inputs: Any, *, stream: Literal[True], **options: Unpack[Arguments]) -> Iterator[Prediction]: ...
    @overload
    def predict(
        self, inputs: Any, *, stream: bool, **options: Unpack[Arguments]
    ) -> list[Prediction] | Iterator[Prediction]: ...
    def predict(
        self,
        inputs: Any,
        *,
        topk: int = 5,
        batch_size: int | None = None,
        stream: bool = False,
        progress: bool = False,
        on_error: str = "raise",
        features: bool = False,
        exif: bool = True,
        channel_order: str = "rgb",
        workers: int | None = None,
    ) -> list[Prediction] | Iterator[Prediction]:
        """Classifies images, each on its own: a result depends on neither the batch nor the order.

        Threads decode, resize and crop the next images while the engine runs a batch. With ``stream=True`` memory is
        bounded whatever the number of images: two batches, and `2 · workers` images on the threads.

        Args:
            inputs: a path, folder, pattern, URL, bytes, file object, PIL image, array, tensor, or a list or generator
                of those; see `cupy_resnet.images.expand`. A single image gives a list of one prediction, too.
            topk: how many classes a prediction names; all of them where the network has fewer.
            batch_size: images to run at once; by default what `cupy_resnet.batching.default_batch_size` gives for the
                memory that is free. A batch that does not fit is halved, with one warning.
            stream: return an iterator, which works as it is asked and may be closed early, instead of a list.
            progress: show a bar on stderr, with the number of images where it is known (paths and folders).
            on_error: ``"raise"``: the first bad image is an error, after the predictions before it; ``"record"``: its
                prediction says why, and the others go on.
            features: whether predictions carry the features in front of the classifier, from the same pass.
            exif: bring files upright by their EXIF orientation; False leaves them as stored, as torchvision does.
            channel_order: ``"rgb"``, or ``"bgr"`` for arrays with blue first, as OpenCV has them.
            workers: number of decoding threads, by default one per processor, 32 at most.

        Returns:
            One `Prediction` per image, in order.

        Raises:
            ImageError: an input is no image; the message names it and the reason.
            NotFiniteError: logits are not finite; the message names the layers where that begins.
            MemoryError: there is no room for a single image; the message says how much it needs.
            RuntimeError: the model is closed.
            ValueError: an argument out of its range, or a network whose input is not RGB.
        """
        self._alive()
        if self.in_channels != 3:
            raise ValueError(f"predict takes photographs, but this {self.name} has {self.in_channels} input channels")
        options = Options(
            topk=topk,
            batch_size=batch_size,
            progress=progress,
            on_error=on_error,
            features=features,
            exif=exif,
            channel_order=channel_order,
            workers=workers,
        )
        classifier = Classifier(
            running=self._alive, transforms=self.transforms, categories=self.categories, wnids=self.wnids
        )
        results = predictions(classifier, inputs, options)
        return results if stream else list(results)

    def __call__(self, x: Any, *, out: Any = None) -> Any:
        """Returns the logits (N, num_classes), float32, of a batch of normalised images.

        Args:
            x: (N, in_channels, H, W), N ≥ 0, floating point, from NumPy, CuPy or torch, on the CPU or the GPU. On the
                GPU, float16, bfloat16 and float32 of any strides are read as they are.
            out: where to put the logits: an array of the kind and on the device of `x`, C-contiguous; by default a new
                one, which no later call touches.

        Returns:
            The same kind of array as `x`, on the same device; `out` where it is given.

        Raises:
            TypeError: not such an array, or integers; `out` of another kind or dtype.
            ValueError: a shape that the network cannot run; a GPU array on another device than the model; `out` of
                another shape.
        """
        if self._runner is not None:
            repeated = self._runner.replay(x, out)
            if repeated is not None:
                return repeated
        runner = self._checked(x)
        if out is None:
            with exchanged(x, runner.ops) as exchange:
                return exchange.back(runner(_nhwc(exchange.array), features=False, given=x)[0])
        check_out(out, x, (x.shape[0], self.num_classes))
        with exchanged(x, runner.ops) as exchange:
            target = None if exchange.view is None else exchange.view(out)
            exchange.deliver(runner(_nhwc(exchange.array), features=False, out=target, given=x)[0], out)
            return out

    def features(self, x: Any) -> Any:
        """Returns the pooled features (N, num_features) in front of the classifier; otherwise as calling the model."""
        return self.logits_and_features(x)[1]

    def logits_and_features(self, x: Any) -> tuple[Any, Any]:
        """Returns logits (N, num_classes) and pooled features (N, num_features) from one pass."""
        runner = self._checked(x)
        with exchanged(x, runner.ops) as exchange:
            logits, features = runner(_nhwc(exchange.array))
            return exchange.back(logits), exchange.back(features)

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
        runner = self._checked(x)
        network, ops = runner.network, runner.ops
        wanted = set(self.checkpoint_names if names is None else names)
        for name in wanted.difference(self.checkpoint_names):
            raise ValueError(unknown_name(f"checkpoint of {self.name}", name, self.checkpoint_names))
        captured: dict[str, np.ndarray] = {}

        def capture(name: str, value: Any) -> None:
            if name in wanted:
                captured[name] = ops.to_numpy(ops.nhwc_to_nchw(value) if value.ndim == 4 else value)

        with exchanged(x, ops) as exchange:
            network(ops, _nhwc(exchange.array), capture)
        return captured

    def explain(self, shape: tuple[int, int, int, int] | None = None, *, engine: str | None = None) -> Explanation:
        """Tells which kernel computes each operation, and why; nothing is run.

        Args:
            shape: (N, C, H, W) of the input, by default one image of the network's own size.
            engine: ``"cuda"`` or ``"numpy"``, by default the model's own. Kernels can be explained without a GPU:
                they are then chosen as for an H100, in what that would compute in by default.
        """
        runner = self._alive()
        network, ops = runner.network, runner.ops
        device, precision = None, "auto"
        if ops.name == "cuda":
            from .engines.cuda_engine import CudaEngine, describe_device

            device, precision = describe_device(cast(CudaEngine, ops).device), self.precision
        return explain(
            network,
            shape or (1, self.in_channels, self.default_size, self.default_size),
            engine=engine or self.engine,
            device=device,
            kernel=self.kernel,
            strict=self.strict,
            fuse=self.fuse,
            precision=precision,
        )

    def warmup(self, batch_size: int = 1, size: Pair | None = None) -> None:
        """Runs batches of zeros, so that kernels are compiled and memory is there before the first real call.

        Args:
            batch_size: N.
            size: height and width in pixels, by default the network's own.
        """
        height, width = pair(size or self.default_size)
        self(np.zeros((batch_size, self.in_channels, height, width), np.float32))
        if self.in_channels == 3:  # what `predict` needs beside that; it resizes
            self.predict(np.zeros((batch_size, 8, 8, 3), np.uint8), batch_size=max(1, batch_size), on_error="record")

    def close(self) -> None:
        """Frees the weights and what the engine holds; the model cannot be called afterwards. May be repeated."""
        if self._runner is None:
            return
        ops = self._runner.ops
        self._runner.drop()
        self._runner = None  # the last reference to the weights
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
        state = "" if self._runner else ", closed"
        return (
            f"Model({self.name!r}, num_classes={self.num_classes}, in_channels={self.in_channels}, "
            f"engine={self.engine!r}, kernel={self.kernel!r}, precision={self.precision!r}, fuse={self.fuse}{state})"
        )

    @property
    def network(self) -> Network:
        """The network as it is bound to `ops`. Raises RuntimeError once the model is closed."""
        return self._alive().network

    @property
    def ops(self) -> Ops:
        """The engine that runs it. Raises RuntimeError once the model is closed."""
        return self._alive().ops

    def _alive(self) -> Runner:
        if self._runner is None:
            raise RuntimeError(f"this {self.name} model is closed; load it again")
        return self._runner

    def _checked(self, x: Any) -> Runner:
        runner = self._alive()
        kind_of(x)
        runner.network.check_input(tuple(x.shape))
        return runner


def _nhwc(x: Any) -> Any:
    """(N, C, H, W) as a view (N, H, W, C)."""
    return x.transpose(0, 2, 3, 1)
