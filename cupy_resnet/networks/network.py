"""What every network of the package is: a description that binds to an engine and runs there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from .layers import Conv2d, Linear, conv_bn

if TYPE_CHECKING:
    from ..engines.base import Array, Ops

Layer = TypeVar("Layer", Conv2d, Linear)
Checkpoint = Callable[[str, Any], None]
"""Called with a checkpoint's name and the engine's array: NHWC activations, or (N, C) for ``gap`` and ``logits``."""


BiasJoin = Callable[[Conv2d, Conv2d], tuple[Conv2d, Conv2d]]
"""Of two bound layers that are added up, makes one whose bias is that of both and one without."""


class LayerMap(Protocol):
    """A function from layer to layer of the same kind."""

    def __call__(self, layer: Layer) -> Layer: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A residual block: a dataclass whose fields are its convolutions, in torchvision's parameter order, or None."""

    def __call__(self, ops: "Ops", x: "Array", *, overwrite: bool = False) -> "Array":
        """(N, H, W, C) to (N, P, Q, K).

        Args:
            ops: the engine that the layers are bound to.
            x: (N, H, W, C).
            overwrite: whether the result may take the memory of `x`.
        """
        raise NotImplementedError

    def forward(
        self,
        ops: "Ops",
        x: "Array",
        *,
        overwrite: bool = False,
        begun: "Array | None" = None,
        following: "Block | None" = None,
    ) -> tuple["Array", "Array | None"]:
        """Runs the block within a network, where the end of one and the beginning of the next may be one kernel.

        Args:
            ops, x, overwrite: as for calling it.
            begun: what the block before has computed of this one.
            following: the block that comes next, if any.

        Returns:
            (N, P, Q, K), and what there is of the next block already: its `begun`.
        """
        return self(ops, x, overwrite=overwrite), None

    def with_joint_bias(self, join: BiasJoin) -> Self:
        """Returns the block with one bias where it adds up two convolutions, if it does."""
        return self

    def convolutions(self) -> Iterator[Conv2d]:
        """Yields the block's convolutions in torchvision's parameter order."""
        yield from self._named().values()

    def map_layers(self, function: LayerMap) -> Self:
        """Returns the same block with `function` applied to each convolution."""
        return replace(self, **{name: function(conv) for name, conv in self._named().items()})

    def _named(self) -> dict[str, Conv2d]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: conv for name, conv in values.items() if conv is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A residual network: stem, blocks, global average pool, classifier.

    Describing one is cheap: no weights are made. `map_layers` gives the same graph with other (for example bound)
    layers; calling a bound network runs it.

    Args:
        name: registry name, as ``"resnet18"``.
        stem: the first convolution.
        stem_max_pool: whether a 3×3 max-pool with stride 2 follows the stem (ImageNet networks).
        blocks: (name, block) in order; names are parameter key prefixes, as ``"layer1.0"``.
        head: the classifier.
        default_size: height and width of the images it was designed for, in pixels.
    """

    name: str
    stem: Conv2d
    stem_max_pool: bool
    blocks: tuple[tuple[str, Block], ...]
    head: Linear
    default_size: int

    def __call__(
        self,
        ops: "Ops",
        x: "Array",
        checkpoint: Checkpoint | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> tuple["Array", "Array"]:
        """Runs a bound network.

        Args:
            ops: the engine that the layers are bound to.
            x: (N, H, W, in_channels) pixels, of any strides and type that ``ops.pixels`` takes.
            checkpoint: called with each of `checkpoint_names` and its array, in order.
            mean, std: of each channel, to normalise `x` by; None where it is normalised already.

        Returns:
            Logits (N, num_classes) and pooled features (N, num_features), float32.
        """
        return self.body(ops, self.front(ops, x, mean=mean, std=std), checkpoint)

    @property
    def has_fused_stem(self) -> bool:
        """Whether `front` computes the whole stem, in one operation."""
        return self.stem_max_pool and self.stem.batch_norm is None and self.stem.kernel_size == 7

    def front(
        self,
        ops: "Ops",
        x: "Array",
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        out: "Array | None" = None,
    ) -> "Array":
        """Runs what reads the caller's pixels: the fused stem, or where there is none the conversion to activations.

        Args:
            ops, x, mean, std: as for calling the network.
            out: where to put the result, an array of the engine; a new one by default.
        """
        if self.has_fused_stem:
            return ops.stem(x, self.stem.weight, self.stem.bias, mean=mean, std=std, out=out)
        return ops.pixels(x, mean=mean, std=std, out=out)

    def finish_stem(self, ops: "Ops", x: "Array") -> "Array":
        """Turns what `front` returned into what the first block gets."""
        if self.has_fused_stem:
            return x
        x = conv_bn(ops, x, self.stem, relu=True)
        return ops.max_pool2d(x, 3, stride=2, padding=1) if self.stem_max_pool else x

    def body(self, ops: "Ops", x: "Array", checkpoint: Checkpoint | None = None) -> tuple["Array", "Array"]:
        """Runs the rest on what `front` returned, whose memory may be overwritten unless there are checkpoints."""
        x = self.finish_stem(ops, x)
        if checkpoint is not None:
            checkpoint("stem", x)
        begun = None
        for (name, block), (_, following) in zip(self.blocks, (*self.blocks[1:], ("", None)), strict=True):
            x, begun = block.forward(ops, x, overwrite=checkpoint is None, begun=begun, following=following)
            if checkpoint is not None:
                checkpoint(name, x)
        features = ops.global_avg_pool2d(x)
        logits = ops.linear(features, self.head.weight, self.head.bias)
        if checkpoint is not None:
            checkpoint("gap", features)
            checkpoint("logits", logits)
        return logits, features

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    @property
    def in_channels(self) -> int:
        return self.stem.in_channels

    @property
    def num_features(self) -> int:
        """Width of the pooled features."""
        return self.head.in_features

    @property
    def checkpoint_names(self) -> tuple[str, ...]:
        """``stem``, each block's name, ``gap``, ``logits``: in the order they are computed."""
        return ("stem", *(name for name, _ in self.blocks), "gap", "logits")

    def layers(self) -> Iterator[Conv2d | Linear]:
        """Yields every layer in torchvision's parameter order."""
        yield self.stem
        for _, block in self.blocks:
            yield from block.convolutions()
        yield self.head

    def map_layers(self, function: LayerMap) -> Self:
        """Returns the same graph with `function` applied to each layer."""
        return replace(
            self,
            stem=function(self.stem),
            blocks=tuple((name, block.map_layers(function)) for name, block in self.blocks),
            head=function(self.head),
        )

    def with_joint_biases(self, join: BiasJoin) -> Self:
        """Returns the same graph with one bias wherever a block adds up two convolutions."""
        return replace(self, blocks=tuple((name, block.with_joint_bias(join)) for name, block in self.blocks))

    def tensor_table(self) -> dict[str, tuple[int, ...]]:
        """Returns every tensor a checkpoint must hold: key to shape, filters as OIHW, in torchvision's order."""
        return {key: shape for layer in self.layers() for key, shape in layer.tensors()}

    def check_input(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless `shape` is an (N, C, H, W) that the network can run.

        Every strided layer is padded, so one pixel is enough; zero pixels are not.
        """
        expected = f"(N, {self.in_channels}, H, W)"
        if len(shape) == 3:
            raise ValueError(f"{self.name}: x has shape {shape}, expected {expected}; for one image pass x[None]")
        if len(shape) != 4:
            raise ValueError(f"{self.name}: x has shape {shape}, expected {expected}")
        if shape[1] != self.in_channels:
            hint = ""
            if shape[3] == self.in_channels:
                hint = "; this looks like (N, H, W, C): transpose it with (0, 3, 1, 2)"
            raise ValueError(f"{self.name}: x has shape {shape}, expected {expected}{hint}")
        if min(shape[2:]) < 1:
            raise ValueError(f"{self.name}: x has shape {shape}, but the smallest image is 1×1 pixel")
