"""Layers as records, and the functions that decide whether a convolution and what follows it run fused.

A layer first describes itself: its torchvision parameter key and its sizes, with no weights. *Binding* (see
`cupy_resnet.binding`) returns the same record with an engine's arrays in it. Records are frozen: a bound network can
be run from several threads at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engines.base import Array, Ops


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchNorm2d:
    """Inference BatchNorm: four vectors of `num_features` values.

    Args:
        name: parameter key prefix, as ``"layer1.0.bn1"``.
        num_features: channels.
        eps: added to the variance.
        weight, bias, running_mean, running_var: (num_features,) arrays once bound.
    """

    name: str
    num_features: int
    eps: float = 1e-5
    weight: "Array" = None
    bias: "Array" = None
    running_mean: "Array" = None
    running_var: "Array" = None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (checkpoint key, shape)."""
        for field in ("weight", "bias", "running_mean", "running_var"):
            yield f"{self.name}.{field}", (self.num_features,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Conv2d:
    """A square convolution and the BatchNorm that follows it.

    Args:
        name: parameter key prefix, as ``"layer1.0.conv1"``.
        in_channels, out_channels, kernel_size, stride, padding, groups: as in ``torch.nn.Conv2d``.
        batch_norm: what follows; None once it is folded into `weight` and `bias`.
        weight: an engine's KRSC filter (out_channels, kernel_size, kernel_size, in_channels/groups) once bound.
        bias: (out_channels,) once BatchNorm is folded, else None.
    """

    name: str
    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    batch_norm: BatchNorm2d | None = None
    weight: Any = None
    bias: "Array" = None

    @property
    def oihw_shape(self) -> tuple[int, int, int, int]:
        """The filter's shape in a checkpoint."""
        return self.out_channels, self.in_channels // self.groups, self.kernel_size, self.kernel_size

    @property
    def krsc_shape(self) -> tuple[int, int, int, int]:
        """The filter's shape in an engine."""
        K, C, R, S = self.oihw_shape
        return K, R, S, C

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (checkpoint key, OIHW shape), the BatchNorm's tensors after the filter."""
        yield f"{self.name}.weight", self.oihw_shape
        if self.batch_norm is not None:
            yield from self.batch_norm.tensors()


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """The classifier: ``x · weightᵀ + bias``.

    Args:
        name: parameter key prefix, ``"fc"`` or ``"linear"``.
        in_features, out_features: columns and rows of `weight`.
        weight: (out_features, in_features) once bound.
        bias: (out_features,) once bound.
    """

    name: str
    in_features: int
    out_features: int
    weight: "Array" = None
    bias: "Array" = None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (checkpoint key, shape)."""
        yield f"{self.name}.weight", (self.out_features, self.in_features)
        yield f"{self.name}.bias", (self.out_features,)


def conv_bn(
    ops: "Ops",
    x: "Array",
    conv: Conv2d,
    *,
    residual: "Array | None" = None,
    relu: bool = False,
    overwrite_residual: bool = False,
) -> "Array":
    """Convolution, BatchNorm, residual and ReLU: ``relu(bn(conv(x)) + residual)``.

    With BatchNorm folded (``conv.batch_norm is None``) this is one call whose epilogue does everything; otherwise
    each step is an operation of its own, as an eager framework runs it.

    Args:
        ops: the engine.
        x: (N, H, W, C).
        conv: a bound layer.
        residual: (N, P, Q, K) or None.
        relu: whether to end with ReLU.
        overwrite_residual: whether the result may take the memory of `residual`.

    Returns:
        (N, P, Q, K).
    """
    bn = conv.batch_norm
    if bn is None:
        return ops.conv2d(
            x,
            conv.weight,
            conv.bias,
            stride=conv.stride,
            padding=conv.padding,
            groups=conv.groups,
            residual=residual,
            relu=relu,
            overwrite_residual=overwrite_residual,
        )
    y = ops.conv2d(x, conv.weight, stride=conv.stride, padding=conv.padding, groups=conv.groups)
    y = ops.batch_norm2d(y, bn.weight, bn.bias, bn.running_mean, bn.running_var, eps=bn.eps)
    if residual is not None:
        y = ops.add(y, residual)
    return ops.relu(y) if relu else y


def end_of_block(
    ops: "Ops",
    y: "Array",
    last: Conv2d,
    x: "Array",
    downsample: Conv2d | None,
    *,
    overwrite: bool,
) -> "Array":
    """A block's last convolution and what it adds to it: ``relu(bn(last(y)) + shortcut)``.

    Args:
        ops: the engine.
        y: (N, H, W, C) as `last` gets it.
        last: a bound layer.
        x: the block's input, the shortcut or what `downsample` makes it of.
        downsample: a bound layer or None.
        overwrite: whether the result may take the memory of `x`.
    """
    if downsample is None:
        return conv_bn(ops, y, last, residual=x, relu=True, overwrite_residual=overwrite)
    if not _joint(last, downsample):
        # Only now: a shortcut is large, and the first convolution's input may not be needed any more.
        identity = conv_bn(ops, x, downsample)
        return conv_bn(ops, y, last, residual=identity, relu=True, overwrite_residual=True)
    return ops.conv2d(
        y,
        last.weight,
        last.bias,
        stride=last.stride,
        padding=last.padding,
        groups=last.groups,
        shortcut=(x, downsample.weight, downsample.stride),
        relu=True,
    )


def end_of_bottleneck(
    ops: "Ops",
    y: "Array",
    middle: Conv2d,
    last: Conv2d,
    x: "Array",
    downsample: Conv2d | None,
    *,
    overwrite: bool,
    following: Conv2d | None = None,
) -> tuple["Array", "Array | None"]:
    """A bottleneck's last two convolutions and what it adds: ``relu(bn(last(relu(bn(middle(y))))) + shortcut)``.

    Args:
        ops: the engine.
        y: (N, H, W, C) as `middle` gets it.
        middle, last: bound layers.
        x, downsample, overwrite: as for `end_of_block`.
        following: the bound 1×1 layer that gets the result first, with a ReLU behind it, or None.

    Returns:
        The block's output, and that of `following` if it was computed along, else None.
    """
    folded = all(conv is None or conv.batch_norm is None for conv in (middle, following))
    if not folded or not _joint(last, downsample):
        y = conv_bn(ops, y, middle, relu=True)
        return end_of_block(ops, y, last, x, downsample, overwrite=overwrite), None
    return ops.conv2d_back_to_back(
        y,
        (middle.weight, last.weight),
        (middle.bias, last.bias),
        stride=middle.stride,
        padding=middle.padding,
        groups=middle.groups,
        residual=x if downsample is None else None,
        shortcut=None if downsample is None else (x, downsample.weight, downsample.stride),
        relu=True,
        overwrite_residual=overwrite,
        following=None if following is None else (following.weight, following.bias),
    )


def _joint(last: Conv2d, downsample: Conv2d | None) -> bool:
    """Whether `last` and the shortcut may be one operation: what is behind them is at most one bias, that of `last`."""
    if downsample is not None and (downsample.batch_norm is not None or downsample.bias is not None):
        return False
    return last.batch_norm is None
