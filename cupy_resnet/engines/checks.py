"""Argument checks that every engine makes before it computes: errors name the operation and the shapes.

Works on shapes alone, so that the NumPy engine, the CUDA engine and the shape-only engine refuse the same things in
the same words. An argument called an array is whatever has a `shape`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..conv2d.problem import Conv2dPair, Conv2dProblem
from .base import Pair, pair

Shape = tuple[int, ...]

PIXEL_DTYPES = ("uint8", "float16", "float32", "uint16", "int16")
"""What pixels may be; uint16 and int16 hold the bits of bfloat16."""


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    residual: Any = None,
    shortcut: Any = None,
    precision: str = "fp32",
) -> Conv2dProblem:
    """Describes the convolution of some arrays; arguments and errors as for `conv2d_problem`."""
    x0, weight0, stride0 = (None, None, 1) if shortcut is None else shortcut
    return conv2d_problem(
        tuple(x.shape),
        tuple(weight.shape),
        stride=pair(stride),
        padding=pair(padding),
        dilation=pair(dilation),
        groups=groups,
        residual_shape=_shape(residual),
        shortcut_shape=_shape(x0),
        shortcut_weight_shape=_shape(weight0),
        shortcut_stride=stride0,
        bias_shape=_shape(bias),
        precision=precision,
    )


@lru_cache(maxsize=4096)
def conv2d_problem(
    x_shape: Shape,
    weight_shape: Shape,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    residual_shape: Shape | None = None,
    shortcut_shape: Shape | None = None,
    shortcut_weight_shape: Shape | None = None,
    shortcut_stride: int = 1,
    bias_shape: Shape | None = None,
    precision: str = "fp32",
) -> Conv2dProblem:
    """Describes a convolution from the shapes of its tensors.

    Args:
        x_shape: (N, H, W, C).
        weight_shape: (K, R, S, C/groups).
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``.
        residual_shape: (N, P, Q, K) or None.
        shortcut_shape, shortcut_weight_shape: (N, H0, W0, C0) and (K, 1, 1, C0), or both None.
        shortcut_stride: the shortcut's.
        bias_shape: (K,) or None.
        precision: the engine's.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    rank("conv2d", "x", x_shape, "(N, H, W, C)")
    rank("conv2d", "weight", weight_shape, "(K, R, S, C/groups)")
    if shortcut_shape is not None:
        rank("conv2d", "the shortcut's input", shortcut_shape, "(N, H, W, C)")
    N, H, W, C = x_shape
    K, R, S, group_channels = weight_shape
    if group_channels * groups != C:
        raise ValueError(
            f"conv2d: x {x_shape} has C={C} channels, but weight {weight_shape} with groups={groups} needs "
            f"{group_channels * groups}"
        )
    (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w) = pair(stride), pair(padding), pair(dilation)
    problem = Conv2dProblem(
        N=N,
        H=H,
        W=W,
        C=C,
        K=K,
        R=R,
        S=S,
        stride_h=stride_h,
        stride_w=stride_w,
        pad_h=pad_h,
        pad_w=pad_w,
        dilation_h=dilation_h,
        dilation_w=dilation_w,
        groups=groups,
        precision=precision,
        shortcut_channels=0 if shortcut_shape is None else shortcut_shape[-1],
        shortcut_stride=shortcut_stride,
    )
    if shortcut_shape is not None:
        if residual_shape is not None:
            raise ValueError("conv2d: there is a residual or a shortcut, not both")
        _check_shortcut(problem, shortcut_shape, shortcut_weight_shape)
    if bias_shape is not None and bias_shape != (K,):
        raise ValueError(f"conv2d: bias has shape {bias_shape}, but weight {weight_shape} needs ({K},)")
    if residual_shape is not None and residual_shape != problem.output_shape:
        raise ValueError(
            f"conv2d: residual has shape {residual_shape}, but the output of x {x_shape} and weight {weight_shape} "
            f"has {problem.output_shape}"
        )
    return problem


def _check_shortcut(problem: Conv2dProblem, shape: Shape, weight_shape: Shape | None) -> None:
    if weight_shape != problem.shortcut_filter_shape:
        raise ValueError(
            f"conv2d: the shortcut's weight has shape {weight_shape}, but its input {shape} and the output "
            f"{problem.output_shape} need {problem.shortcut_filter_shape}"
        )
    if not problem.has_shortcut_of(shape):
        raise ValueError(
            f"conv2d: the shortcut's input {shape} with stride {problem.shortcut_stride} does not fit the output "
            f"{problem.output_shape}"
        )


def conv2d_back_to_back(
    x: Any,
    weights: tuple[Any, Any],
    biases: tuple[Any, Any] = (None, None),
    *,
    residual: Any = None,
    shortcut: Any = None,
    following: tuple[Any, Any] | None = None,
    precision: str = "fp32",
    **geometry: Any,
) -> Conv2dPair:
    """Describes convolutions in a row by their arrays; of weights, biases and inputs only the shapes are looked at.

    Raises:
        ValueError: as `conv2d_problem` for each, or a second filter that is not 1×1, or not one of a residual and a
            shortcut.
    """
    first = conv2d(x, weights[0], biases[0], precision=precision, **geometry)
    if tuple(weights[1].shape[1:3]) != (1, 1):
        raise ValueError(f"conv2d_back_to_back: the second filter {tuple(weights[1].shape)} must be 1×1 (K, 1, 1, C)")
    if (residual is None) == (shortcut is None):
        raise ValueError("conv2d_back_to_back: the second convolution has either a residual or a shortcut")
    x0, weight0, stride0 = (None, None, 1) if shortcut is None else shortcut
    second = conv2d_problem(
        first.output_shape,
        tuple(weights[1].shape),
        residual_shape=_shape(residual),
        shortcut_shape=_shape(x0),
        shortcut_weight_shape=_shape(weight0),
        shortcut_stride=stride0,
        bias_shape=_shape(biases[1]),
        precision=precision,
    )
    third_channels = 0
    if following is not None:
        weight, bias = following
        third_channels = conv2d_problem(
            second.output_shape, tuple(weight.shape), bias_shape=_shape(bias), precision=precision
        ).K
        if tuple(weight.shape[1:3]) != (1, 1):
            raise ValueError(f"conv2d_back_to_back: the third filter {tuple(weight.shape)} must be 1×1 (K, 1, 1, C)")
    return Conv2dPair(first, second.K, second.shortcut_channels, second.shortcut_stride, third_channels)


def stem(x: Any, weight: Any, bias: Any) -> Shape:
    """Returns the output's shape of ``stem`` on (N, H, W, C) with a filter (K, 7, 7, C), or raises ValueError."""
    problem = conv2d(x, weight, bias, stride=2, padding=3)
    if (problem.R, problem.S) != (7, 7):
        raise ValueError(f"stem: weight {tuple(weight.shape)} must be a 7×7 filter (K, 7, 7, C)")
    return pool2d("stem", problem.output_shape, 3, 2, 1).output_shape


class Pool2d(NamedTuple):
    """A pooling window and the shape (N, P, Q, C) of what it gives."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    output_shape: tuple[int, int, int, int]

    @property
    def P(self) -> int:  # noqa: N802
        """Output height."""
        return self.output_shape[1]

    @property
    def Q(self) -> int:  # noqa: N802
        """Output width."""
        return self.output_shape[2]


def pool2d(op: str, x_shape: Shape, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Pool2d:
    """Resolves a pooling window on an (N, H, W, C) input, as torch does in floor mode.

    Raises:
        ValueError: padding beyond half the window (torch's rule), a window larger than the padded input, or sizes
            below one.
    """
    rank(op, "x", x_shape, "(N, H, W, C)")
    N, H, W, C = x_shape
    kernel, steps, pads = pair(kernel_size), pair(kernel_size if stride is None else stride), pair(padding)
    if min(H, W, *kernel, *steps) < 1:
        raise ValueError(f"{op}: x {x_shape}, kernel_size {kernel} and stride {steps} must all be at least 1")
    if any(p < 0 or 2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise ValueError(f"{op}: padding {pads} must lie between 0 and half of kernel_size {kernel}")
    P, Q = ((size + 2 * p - k) // s + 1 for size, k, s, p in zip((H, W), kernel, steps, pads, strict=True))
    if P < 1 or Q < 1:
        raise ValueError(f"{op}: kernel_size {kernel} is larger than x {x_shape} padded by {pads}")
    return Pool2d(kernel, steps, pads, (N, P, Q, C))


def rank(op: str, name: str, shape: Shape, axes: str) -> None:
    """Raises ValueError unless `shape` has as many axes as `axes`, a text like ``"(N, H, W, C)"``, names."""
    if len(shape) != len([axis for axis in axes.strip("()").split(",") if axis.strip()]):
        raise ValueError(f"{op}: {name} must be {axes}, got shape {shape}")


def vectors(op: str, length: int, **shapes: Shape | None) -> None:
    """Raises ValueError unless every given shape is ``(length,)``; None is skipped."""
    for name, shape in shapes.items():
        if shape is not None and shape != (length,):
            raise ValueError(f"{op}: {name} has shape {shape}, expected ({length},)")


def batch_norm2d(x: Any, **parameters: Any) -> None:
    """Raises ValueError unless x is (N, H, W, C) and each of the parameters an array (C,)."""
    rank("batch_norm2d", "x", x.shape, "(N, H, W, C)")
    vectors("batch_norm2d", x.shape[3], **{name: tuple(array.shape) for name, array in parameters.items()})


def same_shape(op: str, x: Any, y: Any) -> None:
    """Raises ValueError unless both arrays have one shape: elementwise operations do not broadcast."""
    if x.shape != y.shape:
        raise ValueError(f"{op}: x has shape {x.shape} and y {y.shape}; they must be equal")


def linear(x: Any, weight: Any, bias: Any = None) -> tuple[int, int, int]:
    """Returns (N, C, K) of ``x (N, C) · weight (K, C) transposed + bias (K,)``, or raises ValueError."""
    rank("linear", "x", x.shape, "(N, C)")
    rank("linear", "weight", weight.shape, "(K, C)")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x {x.shape} and weight {weight.shape} differ in their last axis")
    if x.shape[1] < 1:
        raise ValueError(f"linear: x {x.shape} has no features")
    vectors("linear", weight.shape[0], bias=_shape(bias))
    return x.shape[0], x.shape[1], weight.shape[0]


def softmax(x: Any) -> tuple[int, int]:
    """Returns (N, K) of softmax's input, or raises ValueError."""
    rank("softmax", "x", x.shape, "(N, K)")
    if x.shape[1] < 1:
        raise ValueError(f"softmax: x {x.shape} has no classes")
    return x.shape


def global_avg_pool2d(x: Any) -> tuple[int, int, int, int]:
    """Returns (N, H, W, C) of an input with at least one pixel, or raises ValueError."""
    rank("global_avg_pool2d", "x", x.shape, "(N, H, W, C)")
    if min(x.shape[1:3]) < 1:
        raise ValueError(f"global_avg_pool2d: x {x.shape} has no pixels to average")
    return x.shape


def pad_channels(x: Any, before: int, after: int, stride: int) -> Shape:
    """Returns the output's shape of ``pad_channels`` on an (N, H, W, C) input, or raises ValueError."""
    rank("pad_channels", "x", x.shape, "(N, H, W, C)")
    if before < 0 or after < 0 or stride < 1:
        raise ValueError(
            f"pad_channels: before={before} and after={after} must not be negative, stride={stride} at least 1"
        )
    N, H, W, C = x.shape
    return N, -(-H // stride), -(-W // stride), before + C + after


def pixel_dtype(op: str, dtype: Any) -> None:
    """Raises TypeError unless `dtype`, in native byte order, is one of `PIXEL_DTYPES`."""
    if str(dtype) not in PIXEL_DTYPES:
        raise TypeError(f"{op}: x must be uint8, float16, float32, or bfloat16 as uint16 or int16, got {dtype}")


def normalization(
    op: str, C: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns float32 (mean, std) vectors of C values, or None when neither is given.

    Raises:
        ValueError: one without the other, a wrong count, or a std of zero.
    """
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError(f"{op}: mean and std are given together or not at all, got mean={mean}, std={std}")
    mean_vector, std_vector = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    vectors(op, C, mean=mean_vector.shape, std=std_vector.shape)
    if not std_vector.all():
        raise ValueError(f"{op}: std must not be zero, got {tuple(std)}")
    return mean_vector, std_vector


def out(op: str, array: Any, shape: Shape, dtype: Any) -> None:
    """Raises ValueError unless a result of this shape and dtype can be put into `array`."""
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{op}: out must be a C-contiguous {dtype} array of shape {shape}, got {array.dtype} of shape {array.shape}"
        )


def _shape(array: Any) -> Shape | None:
    return None if array is None else tuple(array.shape)
