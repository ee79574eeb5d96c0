"""Arrays of CuPy and torch on a GPU, looked at with nothing in between.

`arrays` brings any array within the engine's reach, by way of DLPack, stream and device contexts. A call that repeats
an earlier one needs little of that: which of its predecessors it resembles, an address, a stream, and memory for the
result. Here each costs one or two calls of the library itself; every tenth of a microsecond counts.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 16
"""Bytes: to more than this no kernel asks the input to be aligned."""

Signature = tuple[Any, ...]
"""An array's type, shape, strides, device, and how it lies in `ALIGNMENT` bytes. Which kernel reads an input, and what
that is told beside the address, depends on nothing else."""


class Library(Protocol):
    """What CuPy and torch have in common."""

    def look_at(self, x: Any) -> tuple[Signature, int] | None:
        """Returns an input's signature and its address; None if the memory there does not say all about its values."""

    @property
    def stream(self) -> Callable[[int], int]:
        """Returns the handle of the stream that is current on a device, which is itself current."""

    def empty(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        """Returns a new float32 array, on the device of another, and its address.

        Raises:
            MemoryError: there is no room.
        """

    def spare(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        """The same for a later caller, of whatever mode."""

    def address_of_out(self, out: Any, shape: tuple[int, ...], like: Any) -> int | None:
        """Returns the address of an array, if float32 results of `shape` can be written there just like that.

        It must be of this library, on the device of `like`, C-contiguous, and such that nobody has to be told.
        """


def library_of(x: Any) -> Library | None:
    """Returns the library of a GPU array; None for anything else, but for torch tensors that are not on a GPU."""
    array_type: Any = type(x)
    return _library_of_type(array_type)


@lru_cache(maxsize=16)
def _library_of_type(array_type: Any) -> Library | None:
    """Recognises the libraries' own types: what a subclass means by its memory, it alone knows."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and array_type is torch.Tensor:
        return _Torch(torch)
    if cupy is not None and array_type is cupy.ndarray:
        return _Cupy(cupy)
    return None


class _Torch:
    def __init__(self, torch: Any) -> None:
        self._tensor, self._strided, self._float32 = torch.Tensor, torch.strided, torch.float32
        self._no_room, self._inference_mode = torch.cuda.OutOfMemoryError, torch.inference_mode
        # Triton and torch's own compiler ask in this way: the public one makes a Python object of the stream first.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)

    def look_at(self, x: Any) -> tuple[Signature, int] | None:
        # A lazily negated tensor (of torch.imag) has the opposite of its values in memory.
        if x.layout is not self._strided or x.is_neg():
            return None
        address = x.data_ptr()
        return (x.dtype, x.shape, x.stride(), x.get_device(), address % ALIGNMENT), address

    def empty(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        try:
            array = like.new_empty(shape, dtype=self._float32)
        except self._no_room as error:
            raise MemoryError(str(error)) from error
        return array, array.data_ptr()

    def spare(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        with self._inference_mode(False):  # its tensors are of no use to a caller outside of it
            return self.empty(shape, like)

    def address_of_out(self, out: Any, shape: tuple[int, ...], like: Any) -> int | None:
        suits = (
            type(out) is self._tensor
            and out.dtype is self._float32
            and out.shape == shape
            and out.layout is self._strided
            and out.is_contiguous()
            and out.device == like.device
            and not (out.requires_grad or out.is_neg())
        )
        return out.data_ptr() if suits else None


class _Cupy:
    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def look_at(self, x: Any) -> tuple[Signature, int] | None:
        memory = x.data
        address = memory.ptr
        return (x.dtype, x.shape, x.strides, memory.device_id, address % ALIGNMENT), address

    def stream(self, device: int) -> int:
        return self._cupy.cuda.get_current_stream().ptr

    def empty(self, shape: tuple[int, ...], like: Any) -> tuple[Any, int]:
        array = self._cupy.empty(shape, np.float32)
        return array, array.data.ptr

    spare = empty

    def address_of_out(self, out: Any, shape: tuple[int, ...], like: Any) -> int | None:
        suits = (
            type(out) is self._cupy.ndarray
            and out.dtype == np.float32
            and out.shape == shape
            and out.flags.c_contiguous
            and out.data.device_id == like.data.device_id
        )
        return out.data.ptr if suits else None
