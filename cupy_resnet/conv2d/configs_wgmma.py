"""Configurations of the kernels on Hopper's warpgroup instructions; `configs` has them too. Imports no CuPy."""

from dataclasses import dataclass, replace

from .precision import PRECISIONS


class _OneBlockOrACluster:
    """What configurations share whose tiles a block has, or a cluster, each block of which has a part of the depth."""

    KERNEL: str
    """Its file, without suffix; that for clusters is named after it."""

    precision: str
    split_k_slices: int

    ROW_BYTES = 128
    CONSUMERS = 2

    @property
    def element_size(self) -> int:
        """Bytes."""
        return PRECISIONS[self.precision].element_size

    @property
    def cluster(self) -> bool:
        """Whether the blocks that share a tile form a cluster, as of other configurations."""
        return self.split_k_slices > 1

    @property
    def source(self) -> str:
        """The kernel's file, without suffix."""
        return f"{self.KERNEL}_split_k" if self.cluster else self.KERNEL

    @property
    def threads(self) -> int:
        """Threads per block: two consumers of 128, and a producer, which is two warps where blocks share a tile."""
        return 320 if self.cluster else 384


@dataclass(frozen=True)
class WgmmaConfig(_OneBlockOrACluster):
    """conv2d_wgmma.cu, or conv2d_wgmma_split_k.cu where several blocks share a tile.

    Args:
        precision: name of the arithmetic.
        tile_m, tile_n: pixels and filters per tile.
        stages: slices of both operands in shared memory.
        buffers: pieces of each consumer's tiles, of `piece_n` filters, on their way to and from memory; of no meaning
            where blocks share one.
        split_k_slices: blocks that share a tile, each computing a part of the depth; they form a cluster.
        transposed: whether filters are the rows of the product and pixels the columns of its instructions.
    """

    precision: str
    tile_m: int
    tile_n: int
    stages: int
    buffers: int = 1
    split_k_slices: int = 1
    transposed: bool = False

    KERNEL = "conv2d_wgmma"

    @property
    def tile_k(self) -> int:
        """Depth of a slice, in elements."""
        return self.ROW_BYTES // self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block.

        Beside the stages it has room for what is stored by way of it, whole tiles of 2-byte elements or pieces of
        them, or, where blocks share a tile, for as many partial sums as the two consumers have.
        """
        stages = self.stages * (self.tile_m + self.tile_n) * self.ROW_BYTES
        if self.cluster:
            return stages + self.CONSUMERS * 64 * self.tile_n * 4
        if self.transposed and self.element_size == 4:
            return stages
        return stages + self.CONSUMERS * self.buffers * self.tile_m * self.piece_n * self.element_size

    @property
    def piece_n(self) -> int:
        """Filters whose outputs leave at a time: all of a tile, or 128 bytes of them where shared memory is short."""
        if self.element_size == 4:
            return self.tile_n if self.transposed else self.tile_k
        return self.tile_n if self.tile_m * self.tile_n <= 128 * 128 else self.tile_k

    def defines(self) -> dict[str, int | str]:
        return {
            "ELEMENT": PRECISIONS[self.precision].element,
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "NUM_STAGES": self.stages,
            **(
                {"SPLIT_K_CLUSTER": self.split_k_slices}
                if self.cluster
                else {"TRANSPOSED": int(self.transposed), "PIECE_N": self.piece_n, "BUFFERS": self.buffers}
            ),
        }

    def __str__(self) -> str:
        text = f"{self.tile_m}×{self.tile_n}×{self.tile_k}, {self.stages} stages"
        if self.cluster:
            text += f", split-K {self.split_k_slices} in a cluster"
        if self.transposed:
            text += ", transposed"
        return text if self.buffers == 1 else f"{text}, {self.buffers} tiles under way"


@dataclass(frozen=True)
class WgmmaPatchConfig(_OneBlockOrACluster):
    """conv2d_wgmma_patch.cu, or conv2d_wgmma_patch_split_k.cu where several blocks share a tile.

    Args:
        precision: name of the arithmetic.
        pixels: columns of the transposed product, zeros between rows included.
        split_k_slices: blocks that share a tile, each computing a part of the depth; they form a cluster.
    """

    precision: str
    pixels: int
    split_k_slices: int = 1

    KERNEL = "conv2d_wgmma_patch"
    FILTERS = 64
    PATCHES = 2

    @property
    def channels(self) -> int:
        """Channels of a patch, and of a slice of the filter."""
        return self.ROW_BYTES // self.element_size

    @property
    def staged(self) -> bool:
        """Whether a tile is stored by way of shared memory: of 2-byte elements only, and where no others share it."""
        return self.element_size == 2 and not self.cluster

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: three for tiles that are stored right from registers, which takes longer than to
        multiply them, unless sums leave no room for that many.
        """
        return 2 if self.staged or self.cluster or self.pixels > 200 else 3

    @property
    def threads(self) -> int:
        """Threads per block."""
        return super().threads + 128 * (self.consumers - 2)

    @property
    def max_stages(self) -> int:
        """Slices of the filter that are kept track of; in TF32 a 3×3 filter over 64 channels has 18."""
        return 16 if self.element_size == 2 else 18

    def defines(self) -> dict[str, int | str]:
        element = PRECISIONS[self.precision].element
        if not self.cluster:
            return {"ELEMENT": element, "PIXELS": self.pixels, "ACCUMULATORS": self.pixels // 2}
        return {
            "ELEMENT": element,
            "PIXELS": self.pixels,
            "HALF_PIXELS": self.pixels // 2,
            "ACCUMULATORS": self.pixels // 4,
            "SPLIT_K_CLUSTER": self.split_k_slices,
        }

    def __str__(self) -> str:
        text = f"{self.pixels}×{self.FILTERS}×{self.channels}, patch of the input"
        return f"{text}, split-K {self.split_k_slices} in a cluster" if self.cluster else text


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
    PLACES = 2
    tile_k = 32
    threads = 384

    @property
    def staged(self) -> bool:
        """Whether residuals and outputs pass through shared memory."""
        return self.tile_n == 64

    @property
    def consumer_m(self) -> int:
        """Pixels of a tile that a consumer has."""
        return self.tile_m // self.CONSUMERS

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block."""
        places = self.PLACES * self.tile_m * self.ROW_BYTES if self.staged else 0
        return self.stages * (self.tile_m + 2 * self.tile_n) * self.ROW_BYTES + places

    def defines(self) -> dict[str, int | str]:
        return {"TILE_M": self.tile_m, "TILE_N": self.tile_n, "NUM_STAGES": self.stages}

    def __str__(self) -> str:
        return f"{self.tile_m}×{self.tile_n}×{self.tile_k}, {self.stages} stages"


WGMMA_TILES = (
    *((128, 128, 5), (128, 64, 8), (64, 256, 4), (64, 128, 8), (64, 64, 10)),
    *((128, 128, 3, 2), (128, 64, 6, 2)),
)
"""(tile_m, tile_n, stages), of 2-byte elements; with buffers those for a small depth, which takes less than the end."""

WGMMA_TF32_TILES = (
    *((128, 128, 5, 2), (128, 64, 6, 2), (64, 256, 4, 2), (64, 128, 8, 2), (64, 64, 10, 2)),
    *((192, 128, 4, 1), (128, 64, 4, 4), (64, 128, 5, 6)),
)
"""The same of 4-byte elements, pieces of 32 columns under way; the last two for a small depth."""

WGMMA_TRANSPOSED_TILES = ((192, 128, 4),)
WGMMA_TRANSPOSED_TF32_TILES = ((192, 128, 5), (128, 128, 7))
"""The same where pixels are columns. With 64 filters, or two tiles under way, they were 0 to 3 % faster at best."""

WGMMA = tuple(
    replace(WgmmaConfig(precision, *tile), transposed=transposed)
    for precision in ("fp16", "bf16", "tf32")
    for tiles, transposed in (
        (WGMMA_TF32_TILES if precision == "tf32" else WGMMA_TILES, False),
        (WGMMA_TRANSPOSED_TF32_TILES if precision == "tf32" else WGMMA_TRANSPOSED_TILES, True),
    )
    for tile in tiles
)
"""Every form in which conv2d_wgmma is compiled."""

WGMMA_SPLIT_K_TILES = ((64, 64, 4), (64, 64, 8), (64, 128, 6), (128, 64, 8), (128, 128, 5))
"""(tile_m, tile_n, stages): two blocks of the first fit a multiprocessor."""

WGMMA_CLUSTER_SIZES = (2, 4, 8)
"""Blocks that share a tile; larger clusters not every GPU has."""

WGMMA_SPLIT_K = tuple(
    WgmmaConfig(precision, *tile, split_k_slices=size)
    for precision in ("fp16", "bf16", "tf32")
    for tile in WGMMA_SPLIT_K_TILES
    for size in WGMMA_CLUSTER_SIZES
)
"""Every form in which conv2d_wgmma_split_k is compiled."""

WGMMA_PATCH_PIXELS = (256, 248, 232, 216, 208, 184, 128, 64)
"""Among them what wastes least of ResNet's maps of 56², 28², 14² and 7² pixels, and of smaller pieces of them."""

WGMMA_PATCH_TF32_PIXELS = (248, 232, 216, 208, 176, 128, 64)
"""What these maps need. 176 is three rows of 56²: beside such patches a whole 3×3 filter over 64 channels has room."""

WGMMA_PATCH = tuple(
    WgmmaPatchConfig(precision, pixels)
    for precision in ("fp16", "bf16", "tf32")
    for pixels in (WGMMA_PATCH_TF32_PIXELS if precision == "tf32" else WGMMA_PATCH_PIXELS)
)
"""Every form in which conv2d_wgmma_patch is compiled."""

WGMMA_PATCH_SPLIT_K_PIXELS = (256, 128, 64)
"""Whole maps of 7², and pieces of larger ones; 208 and 224, for a map of 14², were never the fastest."""

WGMMA_PATCH_SPLIT_K = tuple(
    WgmmaPatchConfig(precision, pixels, split_k_slices=size)
    for precision in ("fp16", "bf16", "tf32")
    for size in WGMMA_CLUSTER_SIZES
    for pixels in WGMMA_PATCH_SPLIT_K_PIXELS
)
"""Every form in which conv2d_wgmma_patch_split_k is compiled."""

WGMMA_3XTF32 = (Wgmma3xTf32Config(128, 128, 4), Wgmma3xTf32Config(256, 64, 3), Wgmma3xTf32Config(128, 64, 6))
"""Every form in which conv2d_wgmma_3xtf32 is compiled: with as many stages as there is room for."""
