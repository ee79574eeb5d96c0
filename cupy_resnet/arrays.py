"""Arrays from and to the caller: NumPy, CuPy or torch in, the same kind and device out.

torch and CuPy arrays are recognised without importing either library: where such an array exists, its library has
been imported already. torch and CuPy share GPU memory through DLPack, without a copy.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .cuda_errors import lost_context_explained
from .engines.base import Array, Ops

Restore = Callable[[Array], Any]


def kind_of(x: Any) -> str:
    """Returns ``"numpy"``, ``"cupy"`` or ``"torch"``.

    Raises:
        TypeError: anything else.
    """
    if isinstance(x, np.ndarray):
        return "numpy"
    for kind, array_type in (("cupy", "ndarray"), ("torch", "Tensor")):
        module = sys.modules.get(kind)
        if module is not None and isinstance(x, getattr(module, array_type)):
            return kind
    raise TypeError(
        f"x must be a NumPy array, CuPy array or torch tensor of shape (N, C, H, W), got {type(x).__name__}"
    )


@contextmanager
def exchanged(x: Any, ops: Ops) -> Iterator[tuple[Array, Restore]]:
    """Brings a caller's array within the engine's reach and results back to the caller's kind.

    Work inside the context is ordered after whatever produced `x` and before whatever uses the results: it runs on
    torch's current stream for a torch tensor on the GPU, else on CuPy's.

    Args:
        x: a float16, float32 or float64 array (torch: bfloat16 as well) of any strides and byte order.
        ops: the engine.

    Yields:
        A float32 array that ``ops.asarray`` accepts, and a function from an engine's array to the caller's kind on
        the caller's device.

    Raises:
        TypeError: no floating-point array, or a torch tensor that is sparse or on a device other than CPU and CUDA.
        ValueError: a GPU array on another device than the engine's.
    """
    kind = kind_of(x)
    with lost_context_explained(), (_torch if kind == "torch" else _numpy_or_cupy)(x, ops) as exchange:
        yield exchange


def to_nhwc(ops: Ops, x: Array) -> Array:
    """(N, C, H, W) of any strides to the engine's NHWC; memory that is NHWC already (channels last) is not permuted."""
    nhwc = x.transpose(0, 2, 3, 1)
    if nhwc.flags.c_contiguous:
        return ops.asarray(nhwc)
    return ops.nchw_to_nhwc(ops.asarray(x))


@contextmanager
def _numpy_or_cupy(x: Any, ops: Ops) -> Iterator[tuple[Array, Restore]]:
    _check_floating(x.dtype.kind == "f", x.dtype)
    x = x if x.dtype == np.float32 else x.astype(np.float32)
    if isinstance(x, np.ndarray):
        yield x, ops.to_numpy
    elif ops.name == "cuda":
        _check_device(x.device.id, ops)
        with x.device:
            yield x, lambda y: y
    else:
        cupy: Any = sys.modules["cupy"]
        with x.device:
            yield x.get(), cupy.asarray


@contextmanager
def _torch(x: Any, ops: Ops) -> Iterator[tuple[Array, Restore]]:
    torch: Any = sys.modules["torch"]
    _check_floating(x.is_floating_point(), x.dtype)
    if x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"x must be a dense torch tensor on the CPU or a CUDA device, got {x.layout} on {x.device}")
    device = x.device
    tensor = x.detach().resolve_neg().to(torch.float32)
    if device.type == "cuda" and ops.name == "cuda":
        _check_device(device.index, ops)
        import cupy

        stream = cupy.cuda.Stream.from_external(_ExternalStream(torch.cuda.current_stream(device).cuda_stream))
        with cupy.cuda.Device(device.index), stream:
            yield cupy.from_dlpack(tensor), torch.from_dlpack
    else:
        yield tensor.cpu().numpy(), lambda y: torch.from_numpy(ops.to_numpy(y)).to(device)


class _ExternalStream:
    """A CUDA stream under the stream protocol; torch's own class speaks it only in newer versions."""

    def __init__(self, ptr: int) -> None:
        self._ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._ptr


def _check_floating(floating: bool, dtype: Any) -> None:
    if not floating:
        raise TypeError(
            f"x is {dtype}; the network takes float32 (float16 and float64 are cast): "
            "scale and normalise integer images first, as torchvision's ToTensor and Normalize do"
        )


def _check_device(index: int, ops: Any) -> None:
    if index != ops.device:
        raise ValueError(
            f"x is on GPU {index}, but the model's weights are on GPU {ops.device}; "
            f"move x, or load the model with device={index}"
        )
