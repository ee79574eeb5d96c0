"""Configurations of the kernels on Hopper's warpgroup instructions; `configs` has them too. Imports no CuPy."""

from dataclasses import dataclass

from .precision import PRECISIONS


@dataclass(frozen=True)
class WgmmaConfig:
    """conv2d_wgmma.cu.

    Args:
        precision: name of the arithmetic.
        tile_m, tile_n: pixels and filters per tile.
        stages: slices of both operands in shared memory.
        buffers: tiles of each consumer on their way to and from memory.
    """

    precision: str
    tile_m: int
    tile_n: int
    stages: int
    buffers: int = 1

    ROW_BYTES = 128
    CONSUMERS = 2
    threads = 384

    @property
    def tile_k(self) -> int:
        """Depth of a slice, in elements."""
        return self.ROW_BYTES // PRECISIONS[self.precision].element_size

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block; tiles of 2-byte elements are stored by way of it."""
        staged = self.CONSUMERS * self.buffers * self.tile_m * self.tile_n * 2
        if PRECISIONS[self.precision].element_size != 2:
            staged = 0
        return self.stages * (self.tile_m + self.tile_n) * self.ROW_BYTES + staged

    def defines(self) -> dict[str, int | str]:
        return {
            "ELEMENT": PRECISIONS[self.precision].element,
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "NUM_STAGES": self.stages,
            "BUFFERS": self.buffers,
        }

    def __str__(self) -> str:
        text = f"{self.tile_m}×{self.tile_n}×{self.tile_k}, {self.stages} stages"
        return text if self.buffers == 1 else f"{text}, {self.buffers} tiles under way"


@dataclass(frozen=True)
class WgmmaPatchConfig:
    """conv2d_wgmma_patch.cu.

    Args:
        precision: name of the arithmetic.
        pixels: columns of the transposed product, zeros between rows included.
    """

    precision: str
    pixels: int

    FILTERS = 64
    CHANNELS = 64
    ROW_BYTES = 128
    CONSUMERS = 2
    PATCHES = 2
    MAX_STAGES = 16
    threads = 384

    def defines(self) -> dict[str, int | str]:
        return {
            "ELEMENT": PRECISIONS[self.precision].element,
            "PIXELS": self.pixels,
            "ACCUMULATORS": self.pixels // 2,
        }

    def __str__(self) -> str:
        return f"{self.pixels}×{self.FILTERS}×{self.CHANNELS}, patch of the input"


@dataclass(frozen=True)
class Wgmma3xTf32Config:
    """conv2d_wgmma_3xtf32.cu.

    Args:
        tile_m, tile_n: pixels and filters per tile.
        stages: slices of the pixels and of both parts of the filters in shared memory.
    """

    tile_m: int
    tile_n: int
    stages: int

    ROW_BYTES = 128
    CONSUMERS = 2
    tile_k = 32
    threads = 384

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block."""
        return self.stages * (self.tile_m + 2 * self.tile_n) * self.ROW_BYTES

    def defines(self) -> dict[str, int | str]:
        return {"TILE_M": self.tile_m, "TILE_N": self.tile_n, "NUM_STAGES": self.stages}

    def __str__(self) -> str:
        return f"{self.tile_m}×{self.tile_n}×{self.tile_k}, {self.stages} stages"


WGMMA_TILES = ((128, 128, 5), (128, 64, 8), (64, 256, 4), (64, 128, 8), (64, 64, 10))
"""(tile_m, tile_n, stages): the wide ones have as many stages as 2-byte tiles on their way out leave room for."""

WGMMA_SHALLOW_TILES = ((128, 128, 3, 2), (128, 64, 6, 2))
"""The same and buffers, for a small depth, where most of the time goes to residual and output; of 2-byte elements."""

WGMMA = tuple(
    WgmmaConfig(precision, *tile)
    for precision in ("fp16", "bf16", "tf32")
    for tile in (*WGMMA_TILES, *(WGMMA_SHALLOW_TILES if precision != "tf32" else ()))
)
"""Every form in which conv2d_wgmma is compiled."""

WGMMA_PATCH_PIXELS = (256, 248, 232, 216, 208, 184, 128, 64)
"""Among them what wastes least of ResNet's maps of 56², 28², 14² and 7² pixels, and of smaller pieces of them."""

WGMMA_PATCH = tuple(WgmmaPatchConfig(precision, n) for precision in ("fp16", "bf16") for n in WGMMA_PATCH_PIXELS)
"""Every form in which conv2d_wgmma_patch is compiled."""

WGMMA_3XTF32 = (Wgmma3xTf32Config(128, 128, 4), Wgmma3xTf32Config(256, 64, 4), Wgmma3xTf32Config(128, 64, 7))
"""Every form in which conv2d_wgmma_3xtf32 is compiled: with as many stages as there is room for."""
