"""How a convolution kernel is specialised: frozen configurations, each a set of ``#define``s. Imports no CuPy.

Those of the kernels on Hopper's warpgroup instructions are in `configs_wgmma` and `configs_back_to_back`, and are found
here too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from .configs_back_to_back import BACK_TO_BACK as BACK_TO_BACK
from .configs_back_to_back import BackToBackConfig as BackToBackConfig
from .configs_wgmma import WGMMA as WGMMA
from .configs_wgmma import WGMMA_3XTF32 as WGMMA_3XTF32
from .configs_wgmma import WGMMA_PATCH as WGMMA_PATCH
from .configs_wgmma import WGMMA_PATCH_PIXELS as WGMMA_PATCH_PIXELS
from .configs_wgmma import WGMMA_PATCH_SPLIT_K as WGMMA_PATCH_SPLIT_K
from .configs_wgmma import WGMMA_PATCH_TF32_PIXELS as WGMMA_PATCH_TF32_PIXELS
from .configs_wgmma import WGMMA_SPLIT_K as WGMMA_SPLIT_K
from .configs_wgmma import Wgmma3xTf32Config as Wgmma3xTf32Config
from .configs_wgmma import WgmmaConfig as WgmmaConfig
from .configs_wgmma import WgmmaPatchConfig as WgmmaPatchConfig
from .precision import PRECISIONS


class Config(Protocol):
    """What is fixed when a kernel is compiled. Configurations compare, hash and print."""

    def defines(self) -> dict[str, int | str]:
        """The ``#define``s of this configuration."""


@dataclass(frozen=True)
class NoConfig:
    """A kernel with a single form."""

    def defines(self) -> dict[str, int | str]:
        return {}

    def __str__(self) -> str:
        return "–"


@dataclass(frozen=True)
class SgemmConfig:
    """sgemm.cu: `vector` elements per global load (4 or 1)."""

    vector: int

    def defines(self) -> dict[str, int | str]:
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
        sum_slices: slices of 16 that are summed before they are added to the total, or 0: all are summed at once.
    """

    tile_m: int
    tile_n: int
    thread_m: int
    thread_n: int
    vector: int
    min_blocks: int
    sum_slices: int = 0

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.tile_m * self.tile_n // (self.thread_m * self.thread_n)

    def defines(self) -> dict[str, int | str]:
        return {
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "THREAD_M": self.thread_m,
            "THREAD_N": self.thread_n,
            "VECTOR": self.vector,
            "MIN_BLOCKS": self.min_blocks,
            "SUM_SLICES": self.sum_slices,
        }

    def __str__(self) -> str:
        tile = (
            f"{self.tile_m}×{self.tile_n}×16, {self.thread_m}×{self.thread_n} per thread, {4 * self.vector}-byte loads"
        )
        return f"{tile}, summed by {16 * self.sum_slices}" if self.sum_slices else tile


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
    SUM_CHANNELS = 128

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block."""
        return 2 * 16 * self.chunk * (self.TILES + self.TILE_K) * 4

    def channels_by_launch(self, channels: int) -> list[tuple[int, int]]:
        """Returns what each launch sums, as its first channel and their number.

        The error of a sum grows with the square root of its length: with all of 512 channels in one it would be twice
        what it is with `SUM_CHANNELS` at a time. A last step with fewer channels is not left for another launch.
        """
        together = self.SUM_CHANNELS if channels % self.chunk == 0 else channels
        return [(first, min(together, channels - first)) for first in range(0, channels, together)]

    def defines(self) -> dict[str, int | str]:
        return {"CHUNK": self.chunk, "UNROLL": self.unroll}

    def __str__(self) -> str:
        return f"32 tiles × 64 filters, {self.chunk} channels per step"


@dataclass(frozen=True)
class MmaConfig:
    """conv2d_mma.cu.

    Args:
        precision: name of the arithmetic.
        tile_m, tile_n: pixels and filters per block.
        warp_m, warp_n: pixels and filters per warp.
        stages: slices of both operands in shared memory.
        min_blocks: blocks per multiprocessor that the register budget allows.
        aligned: whether 16 bytes are loaded and stored at once, or element by element.
        split_k_slices: blocks that share a tile, each computing a part of the depth.
        merged_groups: groups computed as one, with a filter that is zero between them.
        cluster: whether the blocks that share a tile form a cluster. Its size is fixed when the kernel is compiled;
            other numbers of slices are decided at launch.
    """

    precision: str
    tile_m: int
    tile_n: int
    warp_m: int
    warp_n: int
    stages: int
    min_blocks: int
    aligned: bool = True
    split_k_slices: int = 1
    merged_groups: int = 1
    cluster: bool = False

    ROW_BYTES = 128

    @property
    def tile_k(self) -> int:
        """Depth of a slice, in elements."""
        return self.ROW_BYTES // PRECISIONS[self.precision].element_size

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * (self.tile_m // self.warp_m) * (self.tile_n // self.warp_n)

    def defines(self) -> dict[str, int | str]:
        arithmetic = PRECISIONS[self.precision]
        return {
            **arithmetic.defines(),
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "WARP_M": self.warp_m,
            "WARP_N": self.warp_n,
            "NUM_STAGES": self.stages,
            "VECTOR": 16 // arithmetic.element_size if self.aligned else 1,
            "MIN_BLOCKS": self.min_blocks,
            "SPLIT_K_CLUSTER": self.split_k_slices if self.cluster else 1,
        }

    def __str__(self) -> str:
        text = f"{self.tile_m}×{self.tile_n}×{self.tile_k}, {self.stages} stages"
        if not self.aligned:
            text += ", element by element"
        if self.split_k_slices > 1:
            text += f", split-K {self.split_k_slices}{' in a cluster' if self.cluster else ''}"
        if self.merged_groups > 1:
            text += f", {self.merged_groups} groups as one"
        return text


@dataclass(frozen=True)
class MmaPatchConfig(MmaConfig):
    """conv2d_mma_patch.cu: fields as for conv2d_mma, always aligned and of one group; `stages` are of the filter."""

    def __str__(self) -> str:
        return f"{super().__str__()}, patch of the input"


@dataclass(frozen=True)
class WmmaConfig:
    """conv2d_wmma.cu.

    Args:
        precision: name of the arithmetic.
        tile_m, tile_n: pixels and filters per block.
        warp_m, warp_n: pixels and filters per warp.
        min_blocks: blocks per multiprocessor that the register budget allows.
        aligned: whether 16 bytes are loaded and stored at once, or element by element.
    """

    precision: str
    tile_m: int
    tile_n: int
    warp_m: int
    warp_n: int
    min_blocks: int
    aligned: bool = True

    @property
    def tile_k(self) -> int:
        """Depth of a slice, in elements."""
        return 64 // PRECISIONS[self.precision].element_size

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * (self.tile_m // self.warp_m) * (self.tile_n // self.warp_n)

    def defines(self) -> dict[str, int | str]:
        arithmetic = PRECISIONS[self.precision]
        return {
            "ELEMENT": arithmetic.element,
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "WARP_M": self.warp_m,
            "WARP_N": self.warp_n,
            "VECTOR": 16 // arithmetic.element_size if self.aligned else 1,
            "MIN_BLOCKS": self.min_blocks,
        }

    def __str__(self) -> str:
        text = f"{self.tile_m}×{self.tile_n}×{self.tile_k}"
        return text if self.aligned else f"{text}, element by element"


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
    # for a large depth: with two sums for one there are registers for 64 outputs per thread and for fewer blocks
    ImplicitGemmConfig(128, 128, 8, 8, vector=4, min_blocks=1, sum_slices=8),
    ImplicitGemmConfig(64, 128, 8, 8, vector=4, min_blocks=2, sum_slices=8),
    ImplicitGemmConfig(128, 64, 8, 8, vector=4, min_blocks=2, sum_slices=8),
    ImplicitGemmConfig(64, 64, 8, 8, vector=4, min_blocks=4, sum_slices=8),
    ImplicitGemmConfig(64, 32, 4, 4, vector=4, min_blocks=4, sum_slices=8),
)
"""The tiles that were fastest somewhere on ResNet's layers on an H100, large to small."""

MMA_TILES = (
    # tile_m, tile_n, warp_m, warp_n, stages, min_blocks
    (256, 128, 64, 64, 4, 1),
    (128, 256, 64, 64, 4, 1),
    (128, 128, 64, 64, 3, 2),
    (256, 64, 64, 64, 2, 2),
    (128, 64, 64, 32, 4, 2),
    (64, 128, 32, 64, 4, 2),
    (64, 64, 32, 32, 4, 3),
    (64, 32, 16, 32, 4, 4),
    # where there is one block per multiprocessor at best, as at batch 1: more loads on their way hide their latency
    (64, 64, 32, 32, 6, 2),
    (64, 32, 16, 32, 8, 2),
    (32, 64, 16, 32, 8, 2),
    # where the depth is small, 1×1 above all: the more blocks there are, the better memory is kept busy
    (64, 256, 64, 64, 2, 2),
    (128, 64, 64, 32, 2, 3),
    (64, 128, 32, 64, 2, 3),
    (64, 64, 32, 32, 2, 5),
)
MMA_FP32_TC_TILES = ((128, 64, 32, 32, 4, 1), (64, 64, 32, 32, 3, 2), (64, 32, 16, 32, 4, 3), (64, 32, 16, 32, 8, 2))
"""With three products a warp's tile is smaller: operands are held in two parts."""

MMA = tuple(
    MmaConfig(precision, *tile)
    for precision in ("fp16", "bf16", "tf32", "fp32-tc")
    for tile in (MMA_FP32_TC_TILES if precision == "fp32-tc" else MMA_TILES)
) + tuple(
    MmaConfig(precision, *tile, aligned=False)
    for precision in ("fp16", "bf16", "tf32", "fp32-tc")
    for tile in ((64, 64, 32, 32, 2, 2), (64, 32, 16, 32, 2, 2))
)
"""Every form in which conv2d_mma is compiled, but for clusters."""

MMA_PATCH_TILES = (
    (256, 128, 64, 64, 3, 1),
    (128, 256, 64, 64, 3, 1),
    (128, 128, 64, 64, 3, 2),
    (128, 128, 64, 64, 2, 2),
    (256, 64, 64, 64, 3, 2),
    (128, 64, 64, 32, 3, 3),
    (64, 128, 32, 64, 4, 2),
    (64, 64, 32, 32, 4, 3),
    (64, 32, 16, 32, 4, 4),
    (64, 64, 32, 32, 8, 2),
    (64, 32, 16, 32, 8, 2),
)

MMA_PATCH = tuple(
    MmaPatchConfig(precision, *tile)
    for precision in ("fp16", "bf16", "tf32", "fp32-tc")
    for tile in (MMA_FP32_TC_TILES if precision == "fp32-tc" else MMA_PATCH_TILES)
)
"""Every form in which conv2d_mma_patch is compiled, but for clusters."""

CLUSTER_SIZES = (2, 4, 8)
"""Slices of split-K that meet in a cluster; larger ones not every GPU with clusters has."""


def in_clusters(forms: Iterable[MmaConfig]) -> tuple[MmaConfig, ...]:
    """Returns the forms in clusters of each size, of those tiles that keep a few multiprocessors busy longest."""
    return tuple(
        replace(form, split_k_slices=size, cluster=True)
        for form in forms
        if form.aligned and form.tile_m * form.tile_n <= 64 * 64 and form.min_blocks == 2
        for size in CLUSTER_SIZES
    )


MMA_IN_CLUSTERS, MMA_PATCH_IN_CLUSTERS = in_clusters(MMA), in_clusters(MMA_PATCH)
"""The forms of both in which split-K's slices meet in a cluster."""

WMMA_TILES = (
    # (tile_m, tile_n, warp_m, warp_n, min_blocks), aligned
    ((128, 128, 64, 32, 2), True),
    ((128, 64, 64, 32, 3), True),
    ((64, 64, 32, 32, 4), True),
    ((64, 32, 16, 32, 4), True),
    ((64, 64, 32, 32, 3), False),
    ((64, 32, 16, 32, 4), False),
)

WMMA = tuple(
    WmmaConfig(precision, *tile, aligned=aligned)
    for precision in ("fp16", "bf16", "tf32")
    for tile, aligned in WMMA_TILES
)
"""Every form in which conv2d_wmma is compiled."""
