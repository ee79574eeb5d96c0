"""GPU tests: the engine, and memory that betrays what a kernel reads or leaves unwritten."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def cuda_engine() -> Any:
    """An engine on the current GPU."""
    from cupy_resnet.engines.cuda_engine import CudaEngine

    return CudaEngine()


@contextlib.contextmanager
def gpu_lock(*, alone: bool) -> Iterator[None]:
    """Keeps what must be alone on the GPU from whatever other processes of pytest-xdist run there."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with (Path(tempfile.gettempdir()) / f"cupy_resnet-gpu-tests{gpu}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture(autouse=True)
def share_of_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets a test marked `alone` have the GPU to itself."""
    with gpu_lock(alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture(autouse=True)
def free_memory(share_of_gpu: None) -> Iterator[None]:
    """Returns cached blocks after each test: the big shapes would otherwise pile up."""
    yield
    import cupy

    if cupy.get_default_memory_pool().total_bytes() > 8 << 30:
        cupy.get_default_memory_pool().free_all_blocks()


MARGIN = 4096
POISON = 0xFF
"""Bytes of margin on either side, and what they hold: NaN in float32, float16 and bfloat16 alike."""


class Guarded:
    """An array with margins of NaN around it: a read outside poisons the result, a write outside is found.

    Args:
        shape: of the array.
        values: what it holds, of `dtype` already; NaN by default.
        dtype: float32, float16, or uint16 for bfloat16.
    """

    def __init__(self, shape: tuple[int, ...], values: Any = None, dtype: Any = np.float32) -> None:
        import cupy

        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.memory = cupy.empty(nbytes + 2 * MARGIN, cupy.uint8)
        self.array = self.memory[MARGIN : MARGIN + nbytes].view(dtype).reshape(shape)
        self.poison()
        if values is not None:
            self.array[...] = values

    def poison(self) -> None:
        """Makes everything NaN again."""
        self.memory.fill(POISON)

    def margins_intact(self) -> bool:
        """Whether nothing was written outside the array."""
        return bool((self.memory[:MARGIN] == POISON).all() and (self.memory[-MARGIN:] == POISON).all())


@pytest.fixture(scope="session")
def guarded() -> type[Guarded]:
    return Guarded
