"""Arrays from and to the caller: NumPy, CuPy or torch in, the same kind and device out.

torch and CuPy arrays are recognised without importing either library: where such an array exists, its library has
been imported already. torch and CuPy share GPU memory through DLPack, without a copy.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cuda_errors import lost_context_explained
from .engines.base import Array, Ops


@dataclass(frozen=True)
class Exchange:
    """A caller's array within the engine's reach, and the way back.

    Args:
        array: of the engine's kind, such that ``ops.pixels`` accepts it after its axes are permuted.
        back: brings an engine's array to the caller's kind, on the caller's device.
        view: shows memory of the caller's kind as an engine's array, or None where the engine cannot write there.
    """

    array: Array
    back: Callable[[Array], Any]
    view: Callable[[Any], Array] | None = None

    def deliver(self, result: Array, out: Any) -> None:
        """Copies a result to where the caller wants it, unless it was computed there."""
        if self.view is None:
            out[...] = self.back(result)


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
def exchanged(x: Any, ops: Ops) -> Iterator[Exchange]:
    """Brings a caller's array within the engine's reach and results back to the caller's kind.

    Work inside the context is ordered after whatever produced `x` and before whatever uses the results: it runs on
    torch's current stream for a torch tensor on the GPU, else on CuPy's.

    Args:
        x: a float16, float32 or float64 array (torch: bfloat16 as well) of any strides and byte order.
        ops: the engine.

    Raises:
        TypeError: no floating-point array, or a torch tensor that is sparse or on a device other than CPU and CUDA.
        ValueError: a GPU array on another device than the engine's.
    """
    kind = kind_of(x)
    with lost_context_explained(), (_torch if kind == "torch" else _numpy_or_cupy)(x, ops) as exchange:
        yield exchange


@contextmanager
def _numpy_or_cupy(x: Any, ops: Ops) -> Iterator[Exchange]:
    _check_floating(x.dtype.kind == "f", x.dtype)
    if x.dtype not in (np.float32, np.float16) or not x.dtype.isnative:
        x = x.astype(np.float32)
    if isinstance(x, np.ndarray):
        yield Exchange(ops.upload(x), ops.to_numpy)
    elif ops.name == "cuda":
        _check_device(x.device.id, ops)
        with x.device:
            yield Exchange(x, lambda y: y, lambda out: out)
    else:
        cupy: Any = sys.modules["cupy"]
        with x.device:
            yield Exchange(ops.upload(x.get()), cupy.asarray)


@contextmanager
def _torch(x: Any, ops: Ops) -> Iterator[Exchange]:
    torch: Any = sys.modules["torch"]
    _check_floating(x.is_floating_point(), x.dtype)
    if x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"x must be a dense torch tensor on the CPU or a CUDA device, got {x.layout} on {x.device}")
    device = x.device
    tensor = x.detach().resolve_neg()  # DLPack knows nothing of a negation that torch has put off
    if device.type == "cuda" and ops.name == "cuda":
        _check_device(device.index, ops)
        import cupy

        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)  # CuPy has no bfloat16; the engine knows these bits for what they are
        elif tensor.dtype not in (torch.float32, torch.float16):
            tensor = tensor.to(torch.float32)
        stream = cupy.cuda.Stream.from_external(_ExternalStream(torch.cuda.current_stream(device).cuda_stream))
        with cupy.cuda.Device(device.index), stream:
            yield Exchange(cupy.from_dlpack(tensor), torch.from_dlpack, cupy.from_dlpack)
    else:
        array = tensor.to(torch.float32).cpu().numpy()
        yield Exchange(ops.upload(array), lambda y: torch.from_numpy(ops.to_numpy(y)).to(device))


def check_out(out: Any, x: Any, shape: tuple[int, int]) -> None:
    """Raises unless `out` can take float32 results of `shape` beside the input `x`.

    Raises:
        TypeError: another kind of array than `x`, or not float32.
        ValueError: another shape or device, not C-contiguous, or read-only.
    """
    kind = kind_of(x)
    if kind_of(out) != kind:
        raise TypeError(f"out must be the same kind of array as x, {type(x).__name__}, got {type(out).__name__}")
    if str(out.dtype).removeprefix("torch.") != "float32":
        raise TypeError(f"out must be float32, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    if not (out.is_contiguous() if kind == "torch" else out.flags.c_contiguous):
        raise ValueError("out must be C-contiguous")
    if kind == "numpy" and not out.flags.writeable:
        raise ValueError("out is read-only")
    if kind != "numpy" and out.device != x.device:
        raise ValueError(f"out must be on the device of x, {x.device}, got {out.device}")


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
