"""The reference engine: every operation in NumPy, and the default where there is no GPU.

Convolutions are im2col and a BLAS matrix product, a block of the batch at a time so that the columns stay in a
bounded piece of memory. Written to be read next to the kernels: what a kernel computes, this says in a few lines.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np

from . import checks
from .base import (
    NONE_FUSED,
    Following,
    Fusions,
    Ops,
    Pair,
    Shortcut,
    back_to_back_by_parts,
    shortcut_by_parts,
    stem_by_parts,
)
from .bfloat16 import from_bfloat16
from .numpy_windows import blocks, im2col, pad, taps

Method = TypeVar("Method", bound=Callable[..., Any])


def _quiet(method: Method) -> Method:
    """Silences NumPy's warnings about Inf and NaN: they propagate, as in torch, and are no news.

    A new `numpy.errstate` per call, since one shared by a decorated function is not safe between threads in NumPy 1.
    """

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return method(*args, **kwargs)

    return cast(Method, wrapper)


class NumpyEngine:
    """Implements `base.Ops` on NumPy arrays.

    Args:
        dtype: ``"float32"``, or ``"float64"`` to serve as the reference that others are measured against.

    Raises:
        ValueError: another dtype.
    """

    name = "numpy"
    precision = "fp32"

    def __init__(self, dtype: Literal["float32", "float64"] = "float32") -> None:
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise ValueError(f"NumpyEngine: dtype must be float32 or float64, got {dtype}")
        self.dtype = np.dtype(dtype)

    def __repr__(self) -> str:
        return f"NumpyEngine(dtype={self.dtype.name!r})"

    def asarray(self, x: Any) -> np.ndarray:
        """Returns `x` in the engine's dtype, C-contiguous; no copy where it already is."""
        return np.ascontiguousarray(x, dtype=self.dtype)

    def upload(self, x: np.ndarray) -> np.ndarray:
        """Returns `x`."""
        return x

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        """Returns `x`."""
        return x

    def filter(self, weight: Any) -> np.ndarray:
        """Returns a (K, R, S, C/groups) filter in the engine's dtype: BLAS needs no packed form."""
        array = self.asarray(weight)
        checks.rank("filter", "weight", array.shape, "(K, R, S, C/groups)")
        return array

    def pixels(
        self,
        x: np.ndarray,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """(N, H, W, C) pixels of any strides, scaled and normalised as `base.Ops` says; `x` itself if that is it."""
        checks.rank("pixels", "x", x.shape, "(N, H, W, C)")
        return self._scale("pixels", x, mean, std, out)

    def nchw_to_nhwc(
        self, x: np.ndarray, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> np.ndarray:
        """(N, C, H, W) pixels to (N, H, W, C), scaled and normalised as `base.Ops` says."""
        checks.rank("nchw_to_nhwc", "x", x.shape, "(N, C, H, W)")
        return self._scale("nchw_to_nhwc", x.transpose(0, 2, 3, 1), mean, std)

    def nhwc_to_nchw(self, x: np.ndarray) -> np.ndarray:
        """(N, H, W, C) to (N, C, H, W)."""
        self._check("nhwc_to_nchw", x=x)
        checks.rank("nhwc_to_nchw", "x", x.shape, "(N, H, W, C)")
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))

    def normalize(self, x: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
        """(N, H, W, C) pixels to normalised NHWC."""
        checks.rank("normalize", "x", x.shape, "(N, H, W, C)")
        return self._scale("normalize", x, mean, std)

    def fusions(self) -> Fusions:
        """None: everything is done by parts."""
        return NONE_FUSED

    @_quiet
    def conv2d(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: np.ndarray | None = None,
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
    ) -> np.ndarray:
        """``relu(conv(x, weight) + bias + residual)``: (N, H, W, C), (K, R, S, C/groups) to (N, P, Q, K)."""
        self._check("conv2d", x=x, weight=weight, bias=bias, residual=residual)
        geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        problem = checks.conv2d(x, weight, bias, residual=residual, shortcut=shortcut, **geometry)
        if shortcut is not None:
            return shortcut_by_parts(self, x, weight, bias, shortcut, relu=relu, **geometry)
        # (groups, gemm_k, gemm_n): a view, BLAS reads the transpose as it is.
        matrix = weight.reshape(groups, problem.gemm_n, problem.gemm_k).transpose(0, 2, 1)
        y = np.empty(problem.output_shape, self.dtype)
        for images, rows in blocks(problem, self.dtype.itemsize):
            columns = im2col(x[images], problem, rows)
            block = y[images, rows]
            # The output's channels lie group by group, so each group's product is written through a strided view.
            out = block.reshape(-1, groups, problem.gemm_n).transpose(1, 0, 2)
            np.matmul(columns.reshape(groups, -1, problem.gemm_k), matrix, out=out)
            if bias is not None:
                block += bias
            if residual is not None:
                block += residual[images, rows]
            if relu:
                np.maximum(block, 0, out=block)
        return y

    def conv2d_back_to_back(
        self,
        x: np.ndarray,
        weights: tuple[np.ndarray, np.ndarray],
        biases: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: np.ndarray | None = None,
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
        following: Following | None = None,
    ) -> tuple[np.ndarray, None]:
        """(N, H, W, C), (K, R, S, C/groups), (K of the second, 1, 1, K) to (N, P, Q, K of the second), by parts."""
        geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        added: dict[str, Any] = {"residual": residual, "shortcut": shortcut}
        checks.conv2d_back_to_back(x, weights, biases, following=following, **added, **geometry)
        added |= {"relu": relu, "overwrite_residual": overwrite_residual}
        return back_to_back_by_parts(cast(Ops, self), x, weights, biases, geometry, **added)

    def stem(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Pixels (N, H, W, C) to the pooled map, step by step."""
        checks.stem(x, weight, bias)
        return stem_by_parts(self, x, weight, bias, mean, std, out)

    @_quiet
    def batch_norm2d(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        running_mean: np.ndarray,
        running_var: np.ndarray,
        *,
        eps: float = 1e-5,
    ) -> np.ndarray:
        """``(x − mean) / sqrt(var + eps) · weight + bias`` over the last axis of (N, H, W, C)."""
        self._check("batch_norm2d", x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
        checks.batch_norm2d(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
        scale = (weight / np.sqrt(running_var.astype(np.float64) + eps)).astype(self.dtype)
        y = x - running_mean
        y *= scale
        y += bias
        return y

    def relu(self, x: np.ndarray) -> np.ndarray:
        """``max(x, 0)``; `numpy.maximum` keeps a NaN."""
        self._check("relu", x=x)
        return np.maximum(x, 0)

    @_quiet
    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """``x + y`` for equal shapes."""
        self._check("add", x=x, y=y)
        checks.same_shape("add", x, y)
        return x + y

    @_quiet
    def add_relu(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """``relu(x + y)`` for equal shapes."""
        self._check("add_relu", x=x, y=y)
        checks.same_shape("add_relu", x, y)
        z = x + y
        return np.maximum(z, 0, out=z)

    def max_pool2d(
        self,
        x: np.ndarray,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """(N, H, W, C) to (N, P, Q, C): the window's maximum, NaN if it holds one; padding never wins."""
        self._check("max_pool2d", x=x)
        pool = checks.pool2d("max_pool2d", x.shape, kernel_size, stride, padding)
        y = self._output("max_pool2d", pool.output_shape, out)
        y.fill(-np.inf)
        for tap in taps(pad(x, pool.padding, -np.inf), pool):
            np.maximum(y, tap, out=y)
        return y

    @_quiet
    def avg_pool2d(
        self,
        x: np.ndarray,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        count_include_pad: bool = True,
    ) -> np.ndarray:
        """(N, H, W, C) to (N, P, Q, C): the window's mean, padding counted as zeros or not at all."""
        self._check("avg_pool2d", x=x)
        pool = checks.pool2d("avg_pool2d", x.shape, kernel_size, stride, padding)
        y = np.zeros(pool.output_shape, self.dtype)
        for tap in taps(pad(x, pool.padding, 0), pool):
            y += tap
        if count_include_pad:
            y /= pool.kernel[0] * pool.kernel[1]
        else:
            inside = pad(np.ones((1, *x.shape[1:3], 1), self.dtype), pool.padding, 0)
            y /= sum(taps(inside, pool))
        return y

    @_quiet
    def global_avg_pool2d(self, x: np.ndarray) -> np.ndarray:
        """(N, H, W, C) to (N, C), summed in float64."""
        self._check("global_avg_pool2d", x=x)
        checks.global_avg_pool2d(x)
        return x.mean(axis=(1, 2), dtype=np.float64).astype(self.dtype)

    @_quiet
    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """(N, C), (K, C) to (N, K): ``x · weightᵀ + bias``."""
        self._check("linear", x=x, weight=weight, bias=bias)
        checks.linear(x, weight, bias)
        y = x @ weight.T
        if bias is not None:
            y += bias
        return y

    @_quiet
    def softmax(self, x: np.ndarray) -> np.ndarray:
        """Softmax over the last axis of (N, K)."""
        self._check("softmax", x=x)
        checks.softmax(x)
        y = np.exp(x - x.max(axis=1, keepdims=True))
        y /= y.sum(axis=1, keepdims=True)
        return y

    def pad_channels(self, x: np.ndarray, before: int, after: int, *, stride: int = 1) -> np.ndarray:
        """(N, H, W, C) to (N, ceil(H/stride), ceil(W/stride), before + C + after), zeros around C."""
        self._check("pad_channels", x=x)
        y = np.zeros(checks.pad_channels(x, before, after, stride), self.dtype)
        y[..., before : before + x.shape[3]] = x[:, ::stride, ::stride]
        return y

    def _check(self, op: str, **arrays: np.ndarray | None) -> None:
        for name, array in arrays.items():
            if array is None:
                continue
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{op}: {name} must be a NumPy array, got {type(array).__name__}")
            if array.dtype != self.dtype:
                raise TypeError(
                    f"{op}: {name} is {array.dtype}, but this engine computes in {self.dtype}; bring it in with asarray"
                )

    def _output(self, op: str, shape: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
        if out is None:
            return np.empty(shape, self.dtype)
        checks.out(op, out, shape, self.dtype)
        return out

    @_quiet
    def _scale(
        self,
        op: str,
        x: np.ndarray,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """(N, H, W, C) pixels to the engine's dtype."""
        normalization = checks.normalization(op, x.shape[-1], mean, std)
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{op}: x must be a NumPy array, got {type(x).__name__}")
        if x.dtype != self.dtype:
            checks.pixel_dtype(op, x.dtype)
        if x.dtype in (np.uint16, np.int16):
            x = from_bfloat16(x)
        if x.dtype == self.dtype and normalization is None and out is None:
            return np.ascontiguousarray(x)
        y = self._output(op, x.shape, out)
        y[...] = x
        if x.dtype == np.uint8:
            y /= self.dtype.type(255)
        if normalization is not None:
            y -= normalization[0]
            y /= normalization[1]
        return y
