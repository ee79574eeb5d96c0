"""How a convolution kernel is specialised: frozen configurations, each a set of ``#define``s. Imports no CuPy."""

from dataclasses import dataclass
from typing import Protocol


class Config(Protocol):
    """What is fixed when a kernel is compiled. Configurations compare, hash and print."""

    def defines(self) -> dict[str, int]:
        """The ``#define``s of this configuration."""


@dataclass(frozen=True)
class NoConfig:
    """A kernel with a single form."""

    def defines(self) -> dict[str, int]:
        return {}

    def __str__(self) -> str:
        return "–"


@dataclass(frozen=True)
class SgemmConfig:
    """sgemm.cu: `vector` elements per global load (4 or 1)."""

    vector: int

    def defines(self) -> dict[str, int]:
        return {"VECTOR": self.vector}

    def __str__(self) -> str:
        return f"128×128×16, {4 * self.vector}-byte loads"


@dataclass(frozen=True)
class ImplicitGemmConfig:
    """conv2d_implicit_gemm.cu.

    Args:
        tile_m, tile_n: pixels and filters per block.
        thread_m, thread_n: pixels and filters per thread.
        vector: elements per global load (4 or 1).
        min_blocks: blocks per multiprocessor that the register budget allows.
    """

    tile_m: int
    tile_n: int
    thread_m: int
    thread_n: int
    vector: int
    min_blocks: int

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.tile_m * self.tile_n // (self.thread_m * self.thread_n)

    def defines(self) -> dict[str, int]:
        return {
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "THREAD_M": self.thread_m,
            "THREAD_N": self.thread_n,
            "VECTOR": self.vector,
            "MIN_BLOCKS": self.min_blocks,
        }

    def __str__(self) -> str:
        return (
            f"{self.tile_m}×{self.tile_n}×16, {self.thread_m}×{self.thread_n} per thread, {4 * self.vector}-byte loads"
        )


@dataclass(frozen=True)
class WinogradConfig:
    """conv2d_winograd.cu.

    Args:
        chunk: channels per step: 16, or 8 where shared memory is small.
        unroll: of them per loop iteration: as many as fit the registers of every architecture without spilling.
    """

    chunk: int
    unroll: int

    TILES = 32
    TILE_K = 64

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block."""
        return 2 * 16 * self.chunk * (self.TILES + self.TILE_K) * 4

    def defines(self) -> dict[str, int]:
        return {"CHUNK": self.chunk, "UNROLL": self.unroll}

    def __str__(self) -> str:
        return f"32 tiles × 64 filters, {self.chunk} channels per step"


SGEMM = (SgemmConfig(4), SgemmConfig(1))
WINOGRAD = (WinogradConfig(16, unroll=16), WinogradConfig(8, unroll=1))
IMPLICIT_GEMM = (
    ImplicitGemmConfig(128, 256, 8, 16, vector=4, min_blocks=1),
    ImplicitGemmConfig(256, 128, 16, 8, vector=4, min_blocks=1),
    ImplicitGemmConfig(128, 128, 8, 8, vector=4, min_blocks=1),
    ImplicitGemmConfig(64, 128, 8, 8, vector=4, min_blocks=3),
    ImplicitGemmConfig(128, 64, 8, 8, vector=4, min_blocks=3),
    ImplicitGemmConfig(64, 64, 8, 8, vector=4, min_blocks=6),
    ImplicitGemmConfig(64, 32, 4, 4, vector=4, min_blocks=4),
    ImplicitGemmConfig(128, 64, 8, 8, vector=1, min_blocks=2),
    ImplicitGemmConfig(64, 64, 4, 8, vector=1, min_blocks=4),
    ImplicitGemmConfig(64, 32, 4, 4, vector=1, min_blocks=4),
)
"""The tiles that were fastest somewhere on ResNet's layers on an H100, large to small."""
