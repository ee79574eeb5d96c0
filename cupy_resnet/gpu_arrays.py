"""Arrays of CuPy and torch on a GPU, looked at with nothing in between.

`arrays` brings any array within the engine's reach, by way of DLPack, stream and device contexts. A call that repeats
an earlier one needs little of that: which of its predecessors it resembles, an address, a stream, and memory for the
result. Here each costs one or two calls of the library itself.
"""

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 16
"""Bytes: to more than this no kernel asks the input to be aligned."""


@dataclass(slots=True, eq=False)
class GpuInput:
    """A caller's array on a GPU.

    Args:
        array: (N, C, H, W).
        library: whose it is.
        signature: its type, shape, strides, GPU, and how it lies in `ALIGNMENT` bytes. Which kernel reads an input, and
            what that is told beside the address, depends on nothing else.
        sizes: (N, H, W).
        address: of its first element.
    """

    array: Any
    library: "Library"
    signature: tuple[Any, ...]
    sizes: tuple[int, int, int]
    address: int


class Library(Protocol):
    """What CuPy and torch have in common."""

    def look_at(self, x: Any) -> GpuInput | None:
        """Returns what there is to know of an array; None if it is nothing that a kernel could read as it lies."""

    def stream(self, device: int) -> int:
        """Returns the handle of the stream that is current on a device, which is itself current."""

    def empty(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        """Returns a new float32 array, on the device of another, and its address.

        Raises:
            MemoryError: there is no room.
        """

    def address_to_write(self, out: Any) -> int | None:
        """Returns the address of a C-contiguous array; None if the library has to know when it is written."""


def look_at(x: Any) -> GpuInput | None:
    """Returns what there is to know of a four-dimensional GPU array; None for everything else, valid input or not."""
    array_type: Any = type(x)
    library = _library_of(array_type)
    return None if library is None else library.look_at(x)


@lru_cache(maxsize=16)
def _library_of(array_type: Any) -> Library | None:
    """Returns the library that a type of array is the very own of: a subclass may mean something else by its memory."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and array_type is torch.Tensor:
        return _Torch(torch)
    if cupy is not None and array_type is cupy.ndarray:
        return _Cupy(cupy)
    return None


class _Torch:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # Triton and torch's own compiler ask in this way: the public one makes a Python object of the stream first.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def look_at(self, x: Any) -> GpuInput | None:
        # A lazily negated tensor (of torch.imag) has the opposite of its values in memory.
        if not x.is_cuda or x.layout is not self._torch.strided or x.is_neg():
            return None
        shape = x.shape
        if len(shape) != 4:
            return None
        N, _, H, W = shape
        address = x.data_ptr()
        signature = (x.dtype, shape, x.stride(), x.get_device(), address % ALIGNMENT)
        return GpuInput(x, self, signature, (N, H, W), address)

    def stream(self, device: int) -> int:
        if self._raw_stream is not None:
            return self._raw_stream(device)
        return self._torch.cuda.current_stream(device).cuda_stream

    def empty(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        try:
            array = like.new_empty(shape, dtype=self._torch.float32)
        except self._torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return array, array.data_ptr()

    def address_to_write(self, out: Any) -> int | None:
        plain = type(out) is self._torch.Tensor and not out.requires_grad and not out.is_neg()
        return out.data_ptr() if plain else None


class _Cupy:
    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def look_at(self, x: Any) -> GpuInput | None:
        shape = x.shape
        if len(shape) != 4:
            return None
        N, _, H, W = shape
        memory = x.data
        signature = (x.dtype, shape, x.strides, memory.device_id, memory.ptr % ALIGNMENT)
        return GpuInput(x, self, signature, (N, H, W), memory.ptr)

    def stream(self, device: int) -> int:
        return self._cupy.cuda.get_current_stream().ptr

    def empty(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        array = self._cupy.empty(shape, np.float32)
        return array, array.data.ptr

    def address_to_write(self, out: Any) -> int | None:
        return out.data.ptr if type(out) is self._cupy.ndarray else None
