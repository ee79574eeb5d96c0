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


def fuses_back_to_back(ops: "Ops", x: "Array", first: Conv2d, second: Conv2d) -> bool:
    """Whether two convolutions in a row are one kernel on this engine: `conv_bn_back_to_back` is then for them.

    Args:
        ops: the engine.
        x: (N, H, W, C) as `first` gets it.
        first: a bound layer, with a ReLU behind it.
        second: likewise; a 1×1 convolution without stride or groups.
    """
    if first.batch_norm is not None or second.batch_norm is not None:
        return False
    return ops.fuses_back_to_back(
        x.shape,
        (first.krsc_shape, second.krsc_shape),
        stride=first.stride,
        padding=first.padding,
        groups=first.groups,
    )


def conv_bn_back_to_back(
    ops: "Ops",
    x: "Array",
    first: Conv2d,
    second: Conv2d,
    *,
    residual: "Array",
    relu: bool = False,
    overwrite_residual: bool = False,
) -> "Array":
    """Two convolutions with BatchNorm folded, in one call: ``relu(second(relu(first(x))) + residual)``.

    Args:
        ops, x, first, second: as for `fuses_back_to_back`.
        residual: (N, P, Q, K).
        relu, overwrite_residual: as for `conv_bn`, of the second.

    Returns:
        (N, P, Q, K).
    """
    return ops.conv2d_back_to_back(
        x,
        (first.weight, second.weight),
        (first.bias, second.bias),
        stride=first.stride,
        padding=first.padding,
        groups=first.groups,
        residual=residual,
        relu=relu,
        overwrite_residual=overwrite_residual,
    )
