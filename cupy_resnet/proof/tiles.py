"""The tile as a picture: how a convolution's output is dealt out to blocks and threads, and what each fetches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..conv2d import Conv2dProblem
from ..conv2d.configs import MmaConfig, WgmmaConfig, WgmmaPatchConfig, WinogradConfig, WmmaConfig
from ..conv2d.variants import VARIANTS, Im2colSgemm, Shared
from .patches import Patch, patch_of
from .plot_style import GREY, OKABE_ITO, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCKS_DOWN = 6
"""Rows of blocks that are drawn of the output, which has thousands."""

MOST_LINES = 64
"""Threads along a side of a block up to which their borders are drawn."""

WORKERS = {"thread": 1, "warp": 32, "warpgroup": 128}
"""Who multiplies, and of how many threads it is."""


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts up the matrix product of a convolution.

    Args:
        block_m, block_n: rows (pixels) and columns (filters) of the output that a block computes at a time.
        part_m, part_n: those that one worker keeps in registers.
        shared: whether a block's operands pass through shared memory.
        products: of this size that a block computes side by side: 16 in Winograd's F(2×2, 3×3), one for each element of
            a transformed tile.
        pixels: that a row stands for: 4 in Winograd, whose rows are tiles of 2 × 2.
        worker: one of `WORKERS`.
        instruction: rows and columns that one instruction of the tensor cores multiplies; None on CUDA cores.
        others: threads of a block that do not multiply this tile: they fetch, or have a tile of their own.
        split_k: blocks that share a tile, each computing a part of the depth.
        element_size: bytes of an element.
        patch: what a block keeps of the input for all taps of the filter, if it does.
    """

    block_m: int
    block_n: int
    part_m: int
    part_n: int
    shared: bool = True
    products: int = 1
    pixels: int = 1
    worker: str = "thread"
    instruction: tuple[int, int] | None = None
    others: int = 0
    split_k: int = 1
    element_size: int = 4
    patch: Patch | None = None

    @property
    def threads(self) -> int:
        """Threads of a block."""
        parts = self.block_m * self.block_n * self.products // (self.part_m * self.part_n)
        return parts * WORKERS[self.worker] + self.others

    @property
    def takes_turns(self) -> bool:
        """Whether a block computes one tile after the other."""
        return self.worker == "warpgroup"

    @property
    def multiplications(self) -> float:
        """Of the direct convolution's multiplications, those that are made: 16 of 36 for Winograd, and more than all
        where zeros between rows of pixels are multiplied as well.
        """
        if self.patch:
            return self.patch.computed / self.patch.pixels
        return 1.0 if self.products == 1 else self.products / (9 * self.pixels)

    @property
    def shared_bytes(self) -> float:
        """Bytes read from shared memory for one multiply-add: an element of each operand, shared by a part's outputs,
        or by those of one instruction where that reads shared memory itself.
        """
        rows, columns = self.part_m, self.part_n
        if self.worker == "warpgroup" and self.instruction:
            rows, columns = self.instruction
        return self.element_size * (1 / rows + 1 / columns)

    def blocks(self, problem: Conv2dProblem) -> int:
        """Returns how many blocks compute a problem; those that take turns count once for each tile."""
        down = _ceil(_ceil(problem.gemm_m, self.pixels), self.block_m) if self.patch is None else self.patch.tiles
        return down * _ceil(problem.gemm_n, self.block_n) * problem.groups * self.split_k

    def multiply_adds(self, problem: Conv2dProblem) -> float:
        """Returns how many one block makes, whether or not all of its outputs exist."""
        outputs = self.block_m * self.pixels * self.block_n
        return outputs * problem.gemm_k / self.split_k * self.multiplications

    def fetched_bytes(self, problem: Conv2dProblem) -> float:
        """Returns how many bytes one block of a matrix product fetches into shared memory: all rows and columns of its
        operands, or the patch instead of the rows. Winograd's products, of another depth, are not told here.
        """
        depth = problem.gemm_k / self.split_k
        if self.patch is None:
            return self.element_size * depth * (self.block_m + self.block_n)
        pixels = self.patch.fetched(problem) * depth / (problem.R * problem.S)
        return self.element_size * (pixels + (0 if self.patch.filters_stay else self.block_n * depth))


def tile_of(variant: str, config: Any, problem: Conv2dProblem) -> Tile | None:
    """Returns a kernel's tile in a configuration, None for a kernel that is cut up in another way."""
    if isinstance(config, MmaConfig | WmmaConfig | WgmmaConfig | WgmmaPatchConfig):
        return _tensor_core_tile(config, problem)
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


def _tensor_core_tile(config: Any, problem: Conv2dProblem) -> Tile | None:
    size = problem.arithmetic.element_size
    if isinstance(config, WgmmaPatchConfig):
        patch = patch_of(config, problem)
        assert patch is not None
        block = (patch.pixels, config.FILTERS)
        halves = 2 if config.cluster else 1  # both consumers work on a tile
        return Tile(
            *block,
            *block,
            worker="warpgroup",
            instruction=(config.pixels // halves, config.FILTERS),
            others=config.threads - WORKERS["warpgroup"],
            split_k=config.split_k_slices,
            element_size=size,
            patch=patch,
        )
    if isinstance(config, WgmmaConfig):
        block = (config.tile_m, config.tile_n)
        others = config.threads - WORKERS["warpgroup"]
        return Tile(
            *block,
            *block,
            worker="warpgroup",
            instruction=(64, config.tile_n),
            others=others,
            split_k=config.split_k_slices,
            element_size=size,
        )
    if getattr(config, "merged_groups", 1) > 1:
        return None
    return Tile(
        config.tile_m,
        config.tile_n,
        config.warp_m,
        config.warp_n,
        worker="warp",
        instruction=(16, 16) if isinstance(config, WmmaConfig) else (16, 8),
        split_k=getattr(config, "split_k_slices", 1),
        element_size=size,
        patch=patch_of(config, problem),
    )


def plot_tile(tile: Tile, problem: Conv2dProblem, title: str = "") -> "Figure":
    """Draws the matrix product of a problem with one block in it, and the block with the part of one worker in it.

    Left the output between its operands, pixels going down and filters to the right, of which the block needs the
    coloured rows and columns. Right the block, to its own scale, on tensor cores with what one instruction multiplies
    in the part of a warp or a warpgroup. A thread's outputs are drawn side by side; where they really lie differs from
    kernel to kernel, to keep threads out of each other's way in shared memory.
    """
    figure, (product, block) = new_figure(title, columns=2, width=8.5, height=3.9 if tile.instruction else 3.7)
    _draw_product(product, tile, problem)
    _draw_block(block, tile)
    return figure


def _draw_product(axes: "Axes", tile: Tile, problem: Conv2dProblem) -> None:
    rows, across = _ceil(problem.gemm_m, tile.pixels), problem.gemm_n
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
    noun = "tiles, taken in turn," if tile.takes_turns else "blocks"
    depth_cut = f", {tile.split_k} for each tile" if tile.split_k > 1 else ""
    text = f"{tile.blocks(problem):,} {noun} of {tile.block_m} × {tile.block_n}{depth_cut}"
    axes.set_title(text, loc="left", fontsize=10)


def _draw_block(axes: "Axes", tile: Tile) -> None:
    _box(axes, 0, 0, tile.block_n, tile.block_m, "blue")
    part_m, part_n = tile.part_m, tile.part_n
    small_m, small_n = part_m, part_n  # what is drawn smallest
    if tile.instruction:
        _box(axes, 0, 0, part_n, part_m, "sky")
        small_m, small_n = min(tile.instruction[0], part_m), tile.instruction[1]
    _box(axes, 0, 0, small_n, small_m, "vermilion")
    if max(tile.block_m // part_m, tile.block_n // part_n) <= MOST_LINES:
        for top in range(part_m, tile.block_m, part_m):
            axes.axhline(top, color="white", linewidth=0.4)
        for left in range(part_n, tile.block_n, part_n):
            axes.axvline(left, color="white", linewidth=0.4)
    axes.set_xlim(0, tile.block_n)
    axes.set_ylim(tile.block_m, 0)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    if tile.block_m >= 8:
        axes.set_aspect("equal")
    axes.set_xticks(sorted({0, part_n if part_n > 1 else 0, small_n if small_n > 1 else 0, tile.block_n}))
    axes.set_yticks(sorted({0, part_m if part_m > 1 else 0, small_m if small_m > 1 else 0, tile.block_m}))
    axes.set_xlabel("filters")
    axes.set_ylabel("pixels" if tile.pixels == 1 else "tiles of 2 × 2 pixels")
    times = f", {tile.products} products" if tile.products > 1 else ""
    lines = [f"one block: {tile.threads:,} threads{times};", f"one {tile.worker}: {part_m} × {part_n}"]
    if tile.instruction:
        lines.append(f"one instruction: {' × '.join(map(str, tile.instruction))}")
    axes.set_title("\n".join(lines), loc="left", fontsize=10)


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _box(axes: "Axes", left: float, top: float, width: float, height: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    fill = OKABE_ITO.get(color, color)
    axes.add_patch(Rectangle((left, top), width, height, facecolor=fill, edgecolor=GREY, linewidth=0.6))
