"""The CUDA engine's arrays: how they come and go, and what a kernel may rely on."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import jit
from ...conv2d.precision import Precision
from ...conv2d.tf32_parts import nearest_tf32
from ...conv2d.variants import Filter
from .. import checks
from ..bfloat16 import from_bfloat16, to_bfloat16
from .forms import Form

if TYPE_CHECKING:
    import cupy

FLOAT32 = np.dtype(np.float32)

THREADS = 256
MAX_BLOCKS = 1 << 20
"""Blocks of a grid-stride kernel at most."""


class CudaArrays:
    """What the operations of the CUDA engine share. `CudaEngine` sets the attributes."""

    _cupy: Any
    device: int
    precision: str
    arithmetic: Precision

    def asarray(self, x: Any) -> "cupy.ndarray":
        cupy = self._cupy
        if isinstance(x, cupy.ndarray):
            with x.device:
                return self._ready(x.astype(cupy.float32, copy=False))
        return self._weights(np.ascontiguousarray(x, dtype=np.float32))

    def upload(self, x: np.ndarray) -> "cupy.ndarray":
        # What is a permutation of contiguous memory, as channels last, is copied as it lies and stays that permutation.
        order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
        with self._cupy.cuda.Device(self.device):
            memory = self._cupy.asarray(np.ascontiguousarray(x.transpose(order)))
            return memory.transpose(*(order.index(axis) for axis in range(x.ndim)))

    def to_numpy(self, x: "cupy.ndarray") -> np.ndarray:
        with x.device:
            array = self._cupy.asnumpy(x)
        return from_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)

    def filter(self, weight: np.ndarray) -> Filter:
        checks.rank("filter", "weight", weight.shape, "(K, R, S, C/groups)")
        if self.precision == "bf16":
            return Filter(self._weights(to_bfloat16(weight)))
        with np.errstate(over="ignore"):  # Inf is what a value beyond the type becomes; binding reports it by name
            weight = np.ascontiguousarray(weight, self.arithmetic.storage)
        if self.precision == "tf32":
            # Kernels round to TF32 anyway. Bits that are zero cost less energy on their way from L2, and where a card
            # meets the limit of its power, energy is time.
            weight = nearest_tf32(weight)
        return Filter(self._weights(weight))

    def _weights(self, array: np.ndarray) -> "cupy.ndarray":
        """Copies an array to the engine's GPU and waits for it."""
        cupy = self._cupy
        with cupy.cuda.Device(self.device):
            copied = cupy.asarray(array)
            # Weights are used from whatever stream a later caller has, which nothing orders after this copy.
            cupy.cuda.get_current_stream().synchronize()
            return copied

    def _ready(self, x: "cupy.ndarray") -> "cupy.ndarray":
        """Returns `x` as the kernels need it: C-contiguous, its first element 16-byte aligned; a copy if need be."""
        if x.flags.c_contiguous and x.data.ptr % 16 == 0:
            return x
        return self._cupy.array(x, order="C", copy=True)

    def _checked(self, op: str, name: str, x: Any, dtype: np.dtype, like: "cupy.ndarray | None") -> "cupy.ndarray":
        """Checks that `x` is a CuPy array of a dtype on the device of `like`, and makes it ready for a kernel."""
        if not isinstance(x, self._cupy.ndarray):
            raise TypeError(f"{op}: {name} must be a cupy.ndarray, got {type(x).__name__}; use the engine's asarray()")
        if x.dtype != dtype:
            if dtype == FLOAT32:
                raise TypeError(f"{op}: {name} must be float32, got {x.dtype}")
            raise TypeError(
                f"{op}: {name} must be {dtype}, as activations in {self.precision} are, got {x.dtype}; "
                "the engine's pixels() converts"
            )
        if like is not None and x.device != like.device:
            raise ValueError(f"{op}: {name} is on GPU {x.device.id}, the input on GPU {like.device.id}")
        return self._ready(x)

    def _activation(self, op: str, name: str, x: Any, like: "cupy.ndarray | None" = None) -> "cupy.ndarray":
        return self._checked(op, name, x, self.arithmetic.storage, like)

    def _float32(self, op: str, name: str, x: Any, like: "cupy.ndarray | None" = None) -> "cupy.ndarray":
        return self._checked(op, name, x, FLOAT32, like)

    def _output(self, op: str, shape: tuple[int, ...], out: "cupy.ndarray | None" = None) -> "cupy.ndarray":
        """Returns memory for activations on the current device: `out` if it is given and fits."""
        if out is None:
            return self._cupy.empty(shape, self.arithmetic.storage)
        checks.out(op, out, shape, self.arithmetic.storage)
        return out

    @staticmethod
    def _elementwise(op: str, form: Form, threads: int, *arguments: Any) -> None:
        """Launches a grid-stride kernel for which so many threads would be one round."""
        blocks = max(1, min(-(-threads // THREADS), MAX_BLOCKS))
        jit.launch(jit.get_function(op, defines=form), (blocks,), (THREADS,), arguments)
