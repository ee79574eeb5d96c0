"""Launches that may overlap: programmatic dependent launch, which CuPy has no call for.

A kernel whose source waits (kernels_cu/include/dependent_launch.cuh) can be started before the one in front of it on
the stream has finished: its blocks prepare themselves while the last blocks of the other still run. Where many short
kernels follow each other, as in a captured forward pass at batch 1, that hides most of what a launch costs.
"""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

STATIC_LIMIT = 48 << 10
"""Bytes of dynamic shared memory a kernel gets without asking."""

_thread = threading.local()


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Has this thread's launches of kernels that can wait overlap with the kernels before them, where the GPU can."""
    before = getattr(_thread, "overlapping", False)
    _thread.overlapping = True
    try:
        yield
    finally:
        _thread.overlapping = before


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    shared: int = 0,
    waits: bool = False,
) -> None:
    """Enqueues a kernel on the current stream of the current device.

    Args:
        kernel: what `get_function` returned.
        grid, block: up to three sizes each.
        arguments: CuPy arrays, NumPy scalars, and one-element structured arrays, which are passed by value.
        shared: bytes of dynamic shared memory.
        waits: whether the kernel waits for earlier ones by itself, so that it may be started early.
    """
    if shared > STATIC_LIMIT:
        kernel.max_dynamic_shared_size_bytes = shared
    if waits and getattr(_thread, "overlapping", False) and _can_overlap():
        _launch_early(kernel, grid, block, arguments, shared)
    else:
        kernel(grid, block, tuple(arguments), shared_mem=shared)


def _can_overlap() -> bool:
    import cupy

    return int(cupy.cuda.Device().compute_capability) >= 90 and _driver() is not None


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        logger.info("cuda-bindings is not installed: kernels do not overlap their launches")
        return None
    return driver


def _launch_early(
    kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared: int
) -> None:
    import cupy

    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
    config.sharedMemBytes = shared
    config.hStream = cupy.cuda.get_current_stream().ptr
    config.attrs = [attribute]
    config.numAttrs = 1
    values = [_as_bytes(argument) for argument in arguments]  # alive until the launch has copied them
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    (status,) = driver.cuLaunchKernelEx(config, driver.CUfunction(kernel.kernel.ptr), ctypes.addressof(pointers), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise cupy.cuda.driver.CUDADriverError(int(status))


def _as_bytes(argument: Any) -> ctypes.Array[ctypes.c_char]:
    """The bytes of one kernel parameter."""
    if isinstance(argument, np.ndarray | np.generic):
        data = argument.tobytes()
    else:  # a CuPy array: its address
        data = np.uintp(argument.data.ptr).tobytes()
    return (ctypes.c_char * len(data)).from_buffer_copy(data)
