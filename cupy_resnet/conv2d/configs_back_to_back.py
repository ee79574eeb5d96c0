"""Configurations of conv2d_wgmma_b2b, which computes several convolutions in a row; `configs` has them too. No CuPy."""

from dataclasses import dataclass

from .precision import PRECISIONS


@dataclass(frozen=True)
class BackToBackConfig:
    """conv2d_wgmma_b2b.cu.

    Args:
        precision: name of the arithmetic.
        tile_m: pixels per tile, 64 for each consumer, of which there are up to three.
        mid_channels: filters of the first convolution.
        pixel_stages: slices of the input, or of the residual and then the output, in shared memory.
        filter_stages: slices of any filter.
        next_channels: filters of a third convolution, the next bottleneck's first; 0: there is none.
        shortcut_channels: of the input of a shortcut, all of which a tile has; 0: there is a residual.
        cluster_size: blocks that share a tile, each with as many of the filters of both convolutions: 1 or 2.
        columns: filters of the second convolution that are multiplied at a time.
    """

    precision: str
    tile_m: int
    mid_channels: int
    pixel_stages: int
    filter_stages: int
    next_channels: int = 0
    shortcut_channels: int = 0
    cluster_size: int = 1
    columns: int = 64

    ROW_BYTES = 128

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """Threads per block: the consumers', and a producer warpgroup."""
        return 128 * (1 + self.consumers)

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory per block."""
        staying = self.shortcut_channels + self.mid_channels - self.block_channels
        pixels = self.pixel_stages + staying * PRECISIONS[self.precision].element_size // self.ROW_BYTES
        return (pixels * self.tile_m + self.filter_stages * self.block_channels) * self.ROW_BYTES

    @property
    def block_channels(self) -> int:
        """Filters of the first convolution that a block has."""
        return self.mid_channels // self.cluster_size

    def defines(self) -> dict[str, int | str]:
        return {
            "ELEMENT": PRECISIONS[self.precision].element,
            "TILE_M": self.tile_m,
            "MIDDLE": self.block_channels,
            "PIXEL_STAGES": self.pixel_stages,
            "FILTER_STAGES": self.filter_stages,
            "NEXT": self.next_channels,
            "SHORTCUT": self.shortcut_channels,
            "COLUMNS": self.columns,
            "CLUSTER": self.cluster_size,
        }

    def __str__(self) -> str:
        behind = f" and {self.next_channels}" if self.next_channels else ""
        columns = "" if self.columns == 64 else f", {self.columns} columns at a time"
        text = (
            f"{self.tile_m}×{self.mid_channels}{behind}, {self.pixel_stages} and {self.filter_stages} stages{columns}"
        )
        return f"{text}, {self.cluster_size} blocks a tile" if self.cluster_size > 1 else text


BACK_TO_BACK_TILES = (
    (128, 256, 6, 4),
    (192, 128, 6, 5),
    (128, 128, 7, 7),
    (192, 64, 5, 13),
    (64, 256, 8, 5),
    (64, 128, 10, 9),
    (64, 64, 15, 13),
    (192, 64, 7, 7, 64),
    (192, 64, 7, 7, 128),
    (128, 128, 7, 7, 128),
    (64, 128, 10, 9, 128),
    (64, 64, 11, 17, 64),
    (64, 64, 7, 21, 128),
    (192, 64, 6, 7, 64, 64),
    (64, 64, 10, 17, 64, 64),
    (192, 256, 4, 5, 0, 0, 2),
)
"""(tile_m, mid_channels, pixel_stages, filter_stages, next_channels, shortcut_channels, cluster_size), elements of 2
bytes: as many stages as there is room for. 13 hold both filters where 64 of 3×3 over 64 channels have 256 behind them:
they are fetched once. Where more is behind these, tiles of 192 pixels do better with stages for pixels.
"""

BACK_TO_BACK_TF32_TILES = (
    (128, 256, 6, 4),
    (128, 128, 6, 8),
    (192, 128, 5, 6, 0, 0, 1, 32),
    (192, 64, 5, 13),
    (64, 256, 8, 5),
    (64, 128, 10, 9),
    (64, 64, 12, 16),
    (192, 64, 7, 7, 64),
    (192, 64, 7, 7, 128, 0, 1, 32),
    (128, 64, 6, 16, 64),
    (128, 64, 6, 16, 128),
    (128, 128, 6, 8, 128),
    (64, 64, 12, 16, 64),
    (192, 64, 5, 7, 64, 64),
    (128, 256, 6, 4, 0, 0, 1, 32),
    (128, 128, 7, 7, 128, 0, 1, 32),
    (192, 64, 5, 7, 64, 64, 1, 32),
)
"""The same in TF32: a slice has half as many channels, and registers hold half as many results. Three consumers have
room for more than 64 of them if they multiply 32 columns at a time."""

BACK_TO_BACK = tuple(
    BackToBackConfig(precision, *tile)
    for precision in ("fp16", "bf16", "tf32")
    for tile in (BACK_TO_BACK_TF32_TILES if precision == "tf32" else BACK_TO_BACK_TILES)
)
"""Every form in which conv2d_wgmma_b2b is compiled."""
