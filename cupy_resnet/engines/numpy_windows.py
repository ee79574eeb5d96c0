"""How the NumPy engine cuts images into the windows of a convolution or a pool."""

from collections.abc import Iterator

import numpy as np

from ..conv2d.problem import Conv2dProblem
from .checks import Pool2d

COLUMN_BYTES = 16 * 2**20
"""The most memory that im2col's columns may take, unless one output row needs more."""


def blocks(problem: Conv2dProblem, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Yields (images, output rows) whose columns fit in `COLUMN_BYTES`; the 1×1 case needs no columns."""
    row = problem.Q * problem.gemm_k * problem.groups * itemsize
    images = max(1, COLUMN_BYTES // (problem.P * row))
    rows = problem.P if images > 1 else min(problem.P, max(1, COLUMN_BYTES // row))
    if problem.is_pointwise and problem.groups == 1:
        images, rows = max(1, problem.N), problem.P
    for n in range(0, problem.N, images):
        for p in range(0, problem.P, rows):
            yield slice(n, min(n + images, problem.N)), slice(p, min(p + rows, problem.P))


def im2col(x: np.ndarray, problem: Conv2dProblem, rows: slice) -> np.ndarray:
    """Gathers the columns of some output rows: (n, H, W, C) to (groups, n, rows, Q, R, S, C/groups)."""
    n, groups = x.shape[0], problem.groups
    if problem.is_pointwise and groups == 1:
        return x
    shape = (groups, n, rows.stop - rows.start, problem.Q, problem.R, problem.S, problem.group_channels)
    columns = (np.zeros if problem.pad_h or problem.pad_w else np.empty)(shape, x.dtype)
    for r in range(problem.R):
        ps, hs = _span(rows, problem.H, r * problem.dilation_h - problem.pad_h, problem.stride_h)
        for s in range(problem.S):
            qs, ws = _span(slice(0, problem.Q), problem.W, s * problem.dilation_w - problem.pad_w, problem.stride_w)
            tap = x[:, hs, ws]
            columns[:, :, ps, qs, r, s] = np.moveaxis(tap.reshape(*tap.shape[:3], groups, problem.group_channels), 3, 0)
    return columns


def _span(outputs: slice, size: int, offset: int, stride: int) -> tuple[slice, slice]:
    """For output i of `outputs`, the input is ``i·stride + offset``; returns where it lies inside [0, size).

    The first slice is relative to ``outputs.start``, the second indexes the input.
    """
    first = max(outputs.start, -(offset // stride))
    stop = max(first, min(outputs.stop, (size - 1 - offset) // stride + 1))
    start = first * stride + offset
    return (
        slice(first - outputs.start, stop - outputs.start),
        slice(start, start + (stop - first - 1) * stride + 1 if stop > first else start, stride),
    )


def pad(x: np.ndarray, padding: tuple[int, int], value: float) -> np.ndarray:
    """Surrounds the images of (N, H, W, C) with `value`."""
    if padding == (0, 0):
        return x
    widths = ((0, 0), (padding[0], padding[0]), (padding[1], padding[1]), (0, 0))
    return np.pad(x, widths, constant_values=value)


def taps(x: np.ndarray, pool: Pool2d) -> Iterator[np.ndarray]:
    """Yields, for each position in the window, the (N, P, Q, C) view of a padded input that it meets."""
    (step_h, step_w), (R, S) = pool.stride, pool.kernel
    for r in range(R):
        for s in range(S):
            yield x[:, r : r + (pool.P - 1) * step_h + 1 : step_h, s : s + (pool.Q - 1) * step_w + 1 : step_w]
