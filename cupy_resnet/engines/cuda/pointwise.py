"""The CUDA engine's operations that treat every element alike, or every channel."""

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import checks
from . import forms
from .arrays import CudaArrays

if TYPE_CHECKING:
    import cupy


class Pointwise(CudaArrays):
    """`batch_norm2d`, `relu`, `add`, `add_relu`, `pad_channels`."""

    def batch_norm2d(
        self, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *, eps: float = 1e-5
    ) -> "cupy.ndarray":
        op = "batch_norm2d"
        parameters = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        checks.batch_norm2d(x, **parameters)
        with x.device:
            x = self._activation(op, "x", x)
            vectors = [self._float32(op, name, vector, x) for name, vector in parameters.items()]
            y = self._output(op, x.shape)
            if y.size:
                C = x.shape[3]
                form = forms.channelwise(self.arithmetic.element, C)
                sizes = (np.int64(y.size), np.int32(C), np.float32(eps))
                self._elementwise(op, form, y.size // int(form["VECTOR"]), x, *vectors, y, *sizes)
            return y

    def relu(self, x: Any) -> "cupy.ndarray":
        return self._pointwise("relu", x)

    def add(self, x: Any, y: Any) -> "cupy.ndarray":
        return self._pointwise("add", x, y)

    def add_relu(self, x: Any, y: Any) -> "cupy.ndarray":
        return self._pointwise("add_relu", x, y)

    def _pointwise(self, op: str, *inputs: Any) -> "cupy.ndarray":
        """Launches a kernel over tensors of one shape, 16 bytes per thread."""
        first = inputs[0]
        for other in inputs[1:]:
            checks.same_shape(op, first, other)
        with first.device:
            arrays = [self._activation(op, name, a, first) for name, a in zip("xy", inputs, strict=False)]
            out = self._output(op, first.shape)
            if out.size:
                form = forms.pointwise(self.arithmetic.element)
                self._elementwise(op, form, -(-out.nbytes // forms.CHUNK), *arrays, out, np.int64(out.size))
            return out

    def pad_channels(self, x: Any, before: int, after: int, *, stride: int = 1) -> "cupy.ndarray":
        shape = checks.pad_channels(x, before, after, stride)
        _, H, W, C = x.shape
        with x.device:
            x = self._activation("pad_channels", "x", x)
            y = self._output("pad_channels", shape)
            if y.size:
                form, elements = forms.pad_channels(self.arithmetic.element, C, before, after)
                units = y.size // elements
                sizes = (H, W, C // elements, shape[3] // elements, before // elements, stride)
                self._elementwise("pad_channels", form, units, x, y, np.int64(units), *map(np.int32, sizes))
            return y
