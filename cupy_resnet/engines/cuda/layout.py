"""The CUDA engine's operations on layouts: from pixels to activations and back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import jit
from ...conv2d.variants import NULL
from .. import checks
from . import forms
from .arrays import MAX_BLOCKS, CudaArrays

if TYPE_CHECKING:
    import cupy


class Layouts(CudaArrays):
    """`pixels`, `nchw_to_nhwc`, `nhwc_to_nchw`, `normalize`."""

    _normalizations: dict[Any, tuple[Any, Any]]
    """(GPU, mean, std) → both on that GPU; kept as long as the engine, since a captured graph may read them."""

    def pixels(
        self,
        x: Any,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: "cupy.ndarray | None" = None,
    ) -> "cupy.ndarray":
        x = self._pixels("pixels", x, "(N, H, W, C)")
        with x.device:
            if x.dtype == self.arithmetic.storage and mean is None and std is None and x.flags.c_contiguous:
                return self._copied("pixels", x, out)
            nchw = x.transpose(0, 3, 1, 2)
            if nchw.flags.c_contiguous and not x.flags.c_contiguous:
                return self._transposed("pixels", nchw, mean, std, out)
            return self._normalized("pixels", x, mean, std, out)

    def nchw_to_nhwc(
        self, x: Any, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> "cupy.ndarray":
        x = self._pixels("nchw_to_nhwc", x, "(N, C, H, W)")
        with x.device:
            return self._transposed("nchw_to_nhwc", x, mean, std)

    def normalize(self, x: Any, mean: Sequence[float], std: Sequence[float]) -> "cupy.ndarray":
        x = self._pixels("normalize", x, "(N, H, W, C)")
        with x.device:
            return self._normalized("normalize", x, mean, std)

    def nhwc_to_nchw(self, x: Any) -> "cupy.ndarray":
        checks.rank("nhwc_to_nchw", "x", x.shape, "(N, H, W, C)")
        N, H, W, C = x.shape
        with x.device:
            x = self._activation("nhwc_to_nchw", "x", x)
            y = self._cupy.empty((N, C, H, W), np.float32)
            if y.size:
                form = forms.pointwise(self.arithmetic.element)
                self._transpose("nhwc_to_nchw", form, N, H * W, C, x, y)
            return y

    def _pixels(self, op: str, x: Any, axes: str) -> "cupy.ndarray":
        """Checks pixels and returns them, those of bfloat16 as uint16."""
        if not isinstance(x, self._cupy.ndarray):
            raise TypeError(f"{op}: x must be a cupy.ndarray, got {type(x).__name__}; use the engine's upload()")
        checks.rank(op, "x", x.shape, axes)
        checks.pixel_dtype(op, x.dtype)
        return x.view(np.uint16) if x.dtype == np.int16 else x

    def _normalization(self, op: str, C: int, mean: Sequence[float] | None, std: Sequence[float] | None) -> Any:
        """Returns mean and std on the current device, or (None, None)."""
        vectors = checks.normalization(op, C, mean, std)
        if vectors is None:
            return None, None
        cupy = self._cupy
        key = (cupy.cuda.runtime.getDevice(), *(vector.tobytes() for vector in vectors))
        found = self._normalizations.get(key)
        if found is None:
            copies = tuple(cupy.asarray(vector) for vector in vectors)
            cupy.cuda.get_current_stream().synchronize()  # other streams, which nothing orders after this, use them too
            found = self._normalizations.setdefault(key, copies)
        return found

    def _copied(self, op: str, x: Any, out: Any) -> Any:
        """Returns contiguous activations as they are, or copied to `out`."""
        if out is None:
            return self._ready(x)
        out = self._output(op, x.shape, out)
        if x.size:
            out.data.copy_from_device_async(x.data, x.nbytes, self._cupy.cuda.get_current_stream())
        return out

    def _normalized(
        self, op: str, x: Any, mean: Sequence[float] | None, std: Sequence[float] | None, out: Any = None
    ) -> Any:
        """(N, H, W, C) pixels to activations by kernel normalize."""
        C = x.shape[3]
        vectors = self._normalization(op, C, mean, std)
        x, y = self._ready(x), self._output(op, x.shape, out)
        if y.size:
            form = forms.pixels(self.arithmetic.element, x.dtype)
            size = (np.int64(y.size), np.int32(C))
            self._elementwise("normalize", form, y.size, x, y, *map(_pointer, vectors), *size)
        return y

    def _transposed(
        self, op: str, x: Any, mean: Sequence[float] | None, std: Sequence[float] | None, out: Any = None
    ) -> Any:
        """(N, C, H, W) pixels to (N, H, W, C) activations by kernel nchw_to_nhwc."""
        N, C, H, W = x.shape
        vectors = self._normalization(op, C, mean, std)
        x, y = self._ready(x), self._output(op, (N, H, W, C), out)
        if y.size:
            form = forms.pixels(self.arithmetic.element, x.dtype)
            self._transpose("nchw_to_nhwc", form, N, C, H * W, x, y, *map(_pointer, vectors))
        return y

    @staticmethod
    def _transpose(op: str, form: forms.Form, N: int, rows: int, columns: int, *arrays: Any) -> None:
        """Launches a layout kernel, which turns N matrices of rows × columns in tiles of 32 × 32."""
        grid = (min(N * -(-columns // 32), MAX_BLOCKS), min(-(-rows // 32), 65535))
        sizes = (np.int32(N), np.int32(rows), np.int32(columns))
        jit.launch(jit.get_function(op, defines=form), grid, (32, 8), (*arrays, *sizes))


def _pointer(array: Any) -> Any:
    return NULL if array is None else array
