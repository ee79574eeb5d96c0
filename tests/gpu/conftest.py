"""GPU tests: the engine, and memory that betrays what a kernel reads or leaves unwritten."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def cuda_engine() -> Any:
    """An engine on the current GPU."""
    from cupy_resnet.engines.cuda_engine import CudaEngine

    return CudaEngine()


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Returns cached blocks after each test: the big shapes would otherwise pile up."""
    yield
    import cupy

    if cupy.get_default_memory_pool().total_bytes() > 8 << 30:
        cupy.get_default_memory_pool().free_all_blocks()


MARGIN = 1024


class Guarded:
    """An array with margins of NaN around it: a read outside poisons the result, a write outside is found."""

    def __init__(self, shape: tuple[int, ...], values: Any = None) -> None:
        import cupy

        size = int(np.prod(shape, dtype=np.int64))
        self.memory = cupy.full(size + 2 * MARGIN, cupy.nan, cupy.float32)
        self.array = self.memory[MARGIN : MARGIN + size].reshape(shape)
        if values is not None:
            self.array[...] = values

    def margins_intact(self) -> bool:
        """Whether nothing was written outside the array."""
        import cupy

        return bool(cupy.isnan(self.memory[:MARGIN]).all() and cupy.isnan(self.memory[-MARGIN:]).all())


@pytest.fixture(scope="session")
def guarded() -> type[Guarded]:
    return Guarded
