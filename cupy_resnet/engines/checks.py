"""Argument checks that every engine makes before it computes: errors name the operation and the shapes.

Works on shapes alone, so that the NumPy engine, the CUDA engine and the shape-only engine refuse the same things in
the same words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..conv2d.problem import Conv2dProblem
from .base import Pair, pair

Shape = tuple[int, ...]


def conv2d_problem(
    x_shape: Shape,
    weight_shape: Shape,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    residual_shape: Shape | None = None,
    bias_shape: Shape | None = None,
    dtype: str = "float32",
) -> Conv2dProblem:
    """Describes a convolution from the shapes of its tensors.

    Args:
        x_shape: (N, H, W, C).
        weight_shape: (K, R, S, C/groups).
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``.
        residual_shape: (N, P, Q, K) or None.
        bias_shape: (K,) or None.
        dtype: of input, filter and output.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    rank("conv2d", "x", x_shape, "(N, H, W, C)")
    rank("conv2d", "weight", weight_shape, "(K, R, S, C/groups)")
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
        dtype=dtype,
    )
    if bias_shape is not None and bias_shape != (K,):
        raise ValueError(f"conv2d: bias has shape {bias_shape}, but weight {weight_shape} needs ({K},)")
    if residual_shape is not None and residual_shape != problem.output_shape:
        raise ValueError(
            f"conv2d: residual has shape {residual_shape}, but the output of x {x_shape} and weight {weight_shape} "
            f"has {problem.output_shape}"
        )
    return problem


class Pool2d(NamedTuple):
    """A pooling window and the output size it gives."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    P: int
    Q: int


def pool2d(
    x_shape: Shape, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, *, op: str = "max_pool2d"
) -> Pool2d:
    """Resolves a pooling window on an (N, H, W, C) input, as torch does in floor mode.

    Raises:
        ValueError: padding beyond half the window (torch's rule), a window larger than the padded input, or sizes
            below one.
    """
    rank(op, "x", x_shape, "(N, H, W, C)")
    _, H, W, _ = x_shape
    kernel, steps, pads = pair(kernel_size), pair(kernel_size if stride is None else stride), pair(padding)
    if min(H, W, *kernel, *steps) < 1:
        raise ValueError(f"{op}: x {x_shape}, kernel_size {kernel} and stride {steps} must all be at least 1")
    if any(p < 0 or 2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise ValueError(f"{op}: padding {pads} must lie between 0 and half of kernel_size {kernel}")
    P, Q = ((size + 2 * p - k) // s + 1 for size, k, s, p in zip((H, W), kernel, steps, pads, strict=True))
    if P < 1 or Q < 1:
        raise ValueError(f"{op}: kernel_size {kernel} is larger than x {x_shape} padded by {pads}")
    return Pool2d(kernel, steps, pads, P, Q)


def rank(op: str, name: str, shape: Shape, axes: str) -> None:
    """Raises ValueError unless `shape` has as many axes as `axes`, a text like ``"(N, H, W, C)"``, names."""
    if len(shape) != len([axis for axis in axes.strip("()").split(",") if axis.strip()]):
        raise ValueError(f"{op}: {name} must be {axes}, got shape {shape}")


def vectors(op: str, length: int, **shapes: Shape | None) -> None:
    """Raises ValueError unless every given shape is ``(length,)``; None is skipped."""
    for name, shape in shapes.items():
        if shape is not None and shape != (length,):
            raise ValueError(f"{op}: {name} has shape {shape}, expected ({length},)")


def same_shape(op: str, x_shape: Shape, y_shape: Shape) -> None:
    """Raises ValueError unless both shapes are equal: elementwise operations do not broadcast."""
    if x_shape != y_shape:
        raise ValueError(f"{op}: x has shape {x_shape} and y {y_shape}; they must be equal")


def linear(x_shape: Shape, weight_shape: Shape, bias_shape: Shape | None = None) -> tuple[int, int, int]:
    """Returns (N, C, K) of ``x (N, C) · weight (K, C) transposed + bias (K,)``, or raises ValueError."""
    rank("linear", "x", x_shape, "(N, C)")
    rank("linear", "weight", weight_shape, "(K, C)")
    if x_shape[1] != weight_shape[1]:
        raise ValueError(f"linear: x {x_shape} and weight {weight_shape} differ in their last axis")
    vectors("linear", weight_shape[0], bias=bias_shape)
    return x_shape[0], x_shape[1], weight_shape[0]


def global_avg_pool2d(x_shape: Shape) -> None:
    """Raises ValueError unless x is (N, H, W, C) with at least one pixel."""
    rank("global_avg_pool2d", "x", x_shape, "(N, H, W, C)")
    if min(x_shape[1:3]) < 1:
        raise ValueError(f"global_avg_pool2d: x {x_shape} has no pixels to average")


def pad_channels(x_shape: Shape, before: int, after: int, stride: int) -> Shape:
    """Returns the output's shape of ``pad_channels`` on an (N, H, W, C) input, or raises ValueError."""
    rank("pad_channels", "x", x_shape, "(N, H, W, C)")
    if before < 0 or after < 0 or stride < 1:
        raise ValueError(
            f"pad_channels: before={before} and after={after} must not be negative, stride={stride} at least 1"
        )
    N, H, W, C = x_shape
    return N, -(-H // stride), -(-W // stride), before + C + after


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
