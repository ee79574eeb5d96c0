"""The CUDA engine's operations that reduce: pooling and softmax."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import jit
from .. import checks
from ..base import Pair
from . import forms
from .arrays import MAX_BLOCKS, THREADS, CudaArrays

if TYPE_CHECKING:
    import cupy

POOL2D_FIELDS = (
    "N", "H", "W", "C", "P", "Q", "R", "S", "stride_h", "stride_w", "pad_h", "pad_w", "count_include_pad",
)  # fmt: skip
POOL2D_DTYPE = np.dtype([(name, np.int32) for name in POOL2D_FIELDS])
"""Mirror of ``Pool2dParams`` in kernels_cu/include/pool2d.cuh."""


class Pooling(CudaArrays):
    """`max_pool2d`, `avg_pool2d`, `global_avg_pool2d`, `softmax`."""

    def max_pool2d(
        self,
        x: Any,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        out: "cupy.ndarray | None" = None,
    ) -> "cupy.ndarray":
        pool = checks.pool2d("max_pool2d", x.shape, kernel_size, stride, padding)
        return self._pool("max_pool2d", x, pool, False, out)

    def avg_pool2d(
        self,
        x: Any,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        count_include_pad: bool = True,
    ) -> "cupy.ndarray":
        pool = checks.pool2d("avg_pool2d", x.shape, kernel_size, stride, padding)
        return self._pool("avg_pool2d", x, pool, count_include_pad)

    def _pool(self, op: str, x: Any, pool: checks.Pool2d, count_include_pad: bool, out: Any = None) -> "cupy.ndarray":
        with x.device:
            x = self._activation(op, "x", x)
            y = self._output(op, pool.output_shape, out)
            if y.size:
                sizes = (*x.shape, pool.P, pool.Q, *pool.kernel, *pool.stride, *pool.padding, count_include_pad)
                form = forms.channelwise(self.arithmetic.element, x.shape[3])
                params = np.array([sizes], POOL2D_DTYPE)
                self._elementwise(op, form, y.size // int(form["VECTOR"]), x, y, params)
            return y

    def global_avg_pool2d(self, x: Any) -> "cupy.ndarray":
        N, H, W, C = checks.global_avg_pool2d(x)
        with x.device:
            x = self._activation("global_avg_pool2d", "x", x)
            y = self._cupy.empty((N, C), np.float32)
            if y.size:
                form = forms.channelwise(self.arithmetic.element, C)
                vector = int(form["VECTOR"])
                columns = 32 if vector == 1 else 8
                grid = (-(-C // (columns * vector)), min(N, 65535))
                kernel = jit.get_function("global_avg_pool2d", defines=form)
                arguments = (x, y, np.int32(N), np.int32(H * W), np.int32(C))
                jit.launch(kernel, grid, (columns, 8), arguments, waits=True)
            return y

    def softmax(self, x: Any) -> "cupy.ndarray":
        N, K = checks.softmax(x)
        with x.device:
            x = self._float32("softmax", "x", x)
            y = self._cupy.empty((N, K), np.float32)
            if y.size:
                jit.get_function("softmax")((min(N, MAX_BLOCKS),), (THREADS,), (x, y, np.int64(N), np.int32(K)))
            return y
