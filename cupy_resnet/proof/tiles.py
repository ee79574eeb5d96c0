"""The tile as a picture: how a convolution's output is dealt out to blocks and threads, and what each fetches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..conv2d import Conv2dProblem
from ..conv2d.configs import WinogradConfig
from ..conv2d.variants import VARIANTS, Im2colSgemm, Shared
from .plot_style import GREY, OKABE_ITO, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCKS_DOWN = 6
"""Rows of blocks that are drawn of the output, which has thousands."""

MOST_LINES = 64
"""Threads along a side of a block up to which their borders are drawn."""


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts up the matrix product of a convolution.

    Args:
        block_m, block_n: rows (pixels) and columns (filters) of the output that a block computes.
        thread_m, thread_n: those that one thread keeps in registers.
        shared: whether a block's operands pass through shared memory.
        products: of this size that a block computes side by side: 16 in Winograd's F(2×2, 3×3), one for each element of
            a transformed tile.
        pixels: that a row stands for: 4 in Winograd, whose rows are tiles of 2 × 2.
    """

    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    shared: bool = True
    products: int = 1
    pixels: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_m * self.block_n * self.products // (self.thread_m * self.thread_n)

    @property
    def multiplications(self) -> float:
        """Of the direct convolution's multiplications, those that are made: 1, and 16 of 36 for Winograd."""
        return 1.0 if self.products == 1 else self.products / (9 * self.pixels)

    @property
    def shared_bytes(self) -> float:
        """Bytes read from shared memory for one multiply-add: 4 for each operand, shared by a thread's outputs."""
        return 4 * (1 / self.thread_m + 1 / self.thread_n)

    def blocks(self, problem: Conv2dProblem) -> int:
        """Returns how many blocks compute a problem."""
        rows = -(-problem.gemm_m // self.pixels)
        return -(-rows // self.block_m) * -(-problem.gemm_n // self.block_n) * problem.groups


def tile_of(variant: str, config: Any, problem: Conv2dProblem) -> Tile | None:
    """Returns a kernel's tile in a configuration, None for a kernel that is cut up in another way."""
    if isinstance(config, WinogradConfig):
        return Tile(config.TILES, config.TILE_K, 8, 8, products=16, pixels=4)
    if variant == "conv2d_direct":  # 256 outputs one after the other, of one pixel or several
        return Tile(max(1, 256 // problem.K), min(256, problem.K), 1, 1, shared=False)
    if isinstance(VARIANTS[variant], Shared):
        return Tile(Shared.TILE, Shared.TILE, 1, 1)
    if isinstance(VARIANTS[variant], Im2colSgemm):
        return Tile(Im2colSgemm.TILE_M, Im2colSgemm.TILE_N, 8, 8)
    names = ("tile_m", "tile_n", "thread_m", "thread_n")
    return Tile(*(getattr(config, name) for name in names)) if all(hasattr(config, name) for name in names) else None


def plot_tile(tile: Tile, problem: Conv2dProblem, title: str = "") -> "Figure":
    """Draws the matrix product of a problem with one block in it, and the block with one thread in it.

    Left the output between its operands, pixels going down and filters to the right, of which the block needs the
    coloured rows and columns. Right the block, to its own scale. A thread's outputs are drawn side by side; where they
    really lie differs from kernel to kernel, to keep threads out of each other's way in shared memory.
    """
    figure, (product, block) = new_figure(title, columns=2, width=8.5, height=3.7)
    _draw_product(product, tile, problem)
    _draw_block(block, tile)
    return figure


def _draw_product(axes: "Axes", tile: Tile, problem: Conv2dProblem) -> None:
    rows, across = -(-problem.gemm_m // tile.pixels), problem.gemm_n
    block_m, block_n = min(tile.block_m, rows), min(tile.block_n, across)
    down = min(rows, BLOCKS_DOWN * tile.block_m)
    # The depth is not to scale: it would be many times as wide as all filters.
    depth_x, depth_y, gap_x, gap_y = 0.55 * across, 0.3 * down, 0.07 * across, 0.07 * down
    _box(axes, -gap_x - depth_x, 0, depth_x, down, "white")
    _box(axes, 0, -gap_y - depth_y, across, depth_y, "white")
    _box(axes, 0, 0, across, down, "white")
    _box(axes, -gap_x - depth_x, 0, depth_x, block_m, "green")
    _box(axes, 0, -gap_y - depth_y, block_n, depth_y, "orange")
    _box(axes, 0, 0, block_n, block_m, "blue")
    for top in range(tile.block_m, down, tile.block_m):
        axes.plot([0, across], [top, top], color="#C8C8C8", linewidth=0.5)
    for left in range(tile.block_n, across, tile.block_n):
        axes.plot([left, left], [0, down], color="#C8C8C8", linewidth=0.5)
    unit = "pixels" if tile.pixels == 1 else "tiles of 2 × 2 pixels"
    words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    depth = problem.gemm_k if tile.products == 1 else problem.group_channels
    axes.text(-gap_x - depth_x / 2, down * 0.6, f"input:\nevery {unit.split()[0][:-1]}'s\n{depth:,} values", **words)
    axes.text(across / 2, -gap_y - depth_y / 2, f"filters: {depth:,} values each", **words)
    words["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(across / 2, down * 0.6, f"output:\n{across:,} filters ×\n{rows:,} {unit}", **words)
    axes.set_xlim(-gap_x - 1.04 * depth_x, 1.04 * across)
    axes.set_ylim(1.04 * down, -gap_y - 1.04 * depth_y)
    axes.axis("off")
    axes.set_title(f"{tile.blocks(problem):,} blocks of {tile.block_m} × {tile.block_n}", loc="left", fontsize=10)


def _draw_block(axes: "Axes", tile: Tile) -> None:
    _box(axes, 0, 0, tile.block_n, tile.block_m, "blue")
    _box(axes, 0, 0, tile.thread_n, tile.thread_m, "vermilion")
    if max(tile.block_m // tile.thread_m, tile.block_n // tile.thread_n) <= MOST_LINES:
        for top in range(tile.thread_m, tile.block_m, tile.thread_m):
            axes.axhline(top, color="white", linewidth=0.4)
        for left in range(tile.thread_n, tile.block_n, tile.thread_n):
            axes.axvline(left, color="white", linewidth=0.4)
    axes.set_xlim(0, tile.block_n)
    axes.set_ylim(tile.block_m, 0)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    if tile.block_m >= 8:
        axes.set_aspect("equal")
    axes.set_xticks([0, tile.thread_n, tile.block_n] if tile.thread_n > 1 else [0, tile.block_n])
    axes.set_yticks([0, tile.thread_m, tile.block_m] if tile.thread_m > 1 else [0, tile.block_m])
    axes.set_xlabel("filters")
    axes.set_ylabel("pixels" if tile.pixels == 1 else "tiles of 2 × 2 pixels")
    times = f", {tile.products} products" if tile.products > 1 else ""
    axes.set_title(
        f"one block: {tile.threads:,} threads{times};\none thread: {tile.thread_m} × {tile.thread_n}",
        loc="left",
        fontsize=10,
    )


def _box(axes: "Axes", left: float, top: float, width: float, height: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    fill = OKABE_ITO.get(color, color)
    axes.add_patch(Rectangle((left, top), width, height, facecolor=fill, edgecolor=GREY, linewidth=0.6))
