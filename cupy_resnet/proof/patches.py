"""The patch: what conv2d_mma_patch and conv2d_wgmma_patch keep of the input in shared memory, and a picture of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conv2d import Conv2dProblem
from ..conv2d.configs import MmaPatchConfig, WgmmaPatchConfig
from ..conv2d.device import H100
from ..conv2d.tensor_core_variants import patch_rows
from ..conv2d.variant import blocks
from ..conv2d.wgmma_patch import patch_tile
from .plot_style import GREY, OKABE_ITO, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUTSIDE, IMAGE, ZERO, PIXEL = range(4)
"""What a place of the padded images is: zero, a pixel of the image; and the same two as part of the patch."""

COLORS = {OUTSIDE: "white", IMAGE: "#DCDCDC", ZERO: "#F7DFB2", PIXEL: "#99D8C7"}
"""In the patch: orange and green of the palette, light enough for what is drawn on them."""

AROUND = 2
"""Rows that are drawn above and below a patch."""


@dataclass(frozen=True)
class Patch:
    """The input that a tile needs, once for all taps of the filter.

    Args:
        rows, columns: at most, in shared memory, zeros included, all images of the tile below each other.
        image_rows: from one image to the next below it.
        computed: columns of the matrix product, which may count zeros that lie between the tile's pixels.
        pixels: of the output in a tile, at most.
        tiles: of pixels in all.
        image_tiles: in an image, where each begins with its first pixel; None where tiles go on from image to image.
        filters_stay: whether the filter, too, stays in shared memory from tile to tile.
    """

    rows: int
    columns: int
    image_rows: int
    computed: int
    pixels: int
    tiles: int
    image_tiles: int | None = None
    filters_stay: bool = False

    def fetched(self, problem: Conv2dProblem) -> float:
        """Returns how many pixels of the input are fetched for a tile, on average: zeros are not fetched."""
        first, behind = self.span(problem, np.arange(self.tiles))
        begin, end = self.first_row(problem, first), self.first_row(problem, behind - 1)
        rows = self._image_rows_above(problem, end + problem.R) - self._image_rows_above(problem, begin)
        return float(rows.mean()) * problem.W

    def span(self, problem: Conv2dProblem, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a tile's first output pixel, counted through all images, and the one behind its last."""
        if self.image_tiles is None:
            first, limit = tile * self.pixels, np.full_like(tile, problem.gemm_m)
        else:
            image, part = np.divmod(tile, self.image_tiles)
            limit = (image + 1) * problem.P * problem.Q
            first = image * problem.P * problem.Q + part * self.pixels
        return first, np.minimum(first + self.pixels, limit)

    def first_row(self, problem: Conv2dProblem, m: np.ndarray) -> np.ndarray:
        """Returns the padded row, of all images below each other, in which the window of an output pixel begins."""
        return m // (problem.P * problem.Q) * self.image_rows + m // problem.Q % problem.P

    def _image_rows_above(self, problem: Conv2dProblem, row: np.ndarray) -> np.ndarray:
        """How many of the padded rows above one belong to an image."""
        within = np.clip(row % self.image_rows - problem.pad_h, 0, problem.H)
        return row // self.image_rows * problem.H + within


def patch_of(config: Any, problem: Conv2dProblem) -> Patch | None:
    """Returns the patch of a kernel's tile, None for a configuration of a kernel without.

    Raises:
        ValueError: the configuration has no tile of such a problem.
    """
    if isinstance(config, MmaPatchConfig):
        rows = patch_rows(problem, config.tile_m)
        columns, image_rows = problem.Q + problem.S - 1, problem.P + problem.R - 1
        tiles = blocks(problem.gemm_m, config.tile_m)
        return Patch(rows, columns, image_rows, config.tile_m, config.tile_m, tiles)
    if not isinstance(config, WgmmaPatchConfig):
        return None
    tile = patch_tile(problem, config.pixels, H100.shared_memory_per_block, config.split_k_slices)
    if tile is None:
        raise ValueError(f"{config} has no tile for {problem}")
    slices = problem.R * problem.S * blocks(problem.C, config.channels)
    return Patch(
        rows=tile.images * tile.patch_rows + (problem.pad_h if tile.images > 1 else 0),
        columns=tile.columns,
        image_rows=problem.H + (problem.pad_h if tile.images > 1 else 2 * problem.pad_h),
        computed=config.pixels,
        pixels=tile.images * tile.rows * problem.W,
        tiles=tile.pixel_tiles,
        image_tiles=tile.row_tiles if tile.images == 1 else None,
        filters_stay=not config.cluster and problem.K <= config.FILTERS and slices <= tile.num_stages,
    )


def places(patch: Patch, problem: Conv2dProblem, tile: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns what lies where, for a tile.

    Returns:
        The padded images below each other, (rows, patch.columns), of `OUTSIDE`, `IMAGE`, `ZERO` and `PIXEL`; and for
        each output pixel of the tile, (pixels, 2), row and column of the place where its window begins.
    """
    m = np.arange(*(int(at) for at in patch.span(problem, np.array(tile))))
    starts = np.stack([patch.first_row(problem, m), m % problem.Q], axis=1)
    images = int(m[-1]) // (problem.P * problem.Q) + 1
    rows = images * patch.image_rows + (2 * problem.pad_h + problem.H - patch.image_rows)
    cells = np.full((rows, patch.columns), OUTSIDE)
    for image in range(images):
        top = image * patch.image_rows + problem.pad_h
        cells[top : top + problem.H, problem.pad_w : problem.pad_w + problem.W] = IMAGE
    cells[starts[0, 0] : starts[-1, 0] + problem.R] += ZERO
    return cells, starts


def plot_patch(patch: Patch, problem: Conv2dProblem, title: str = "", tile: int | None = None) -> "Figure":
    """Draws a tile's pixels, the patch around them, and the window of one of them.

    Args:
        patch: as `patch_of` returns it.
        problem: the convolution.
        title: of the figure.
        tile: which; by default the second, since the first has zeros above.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch as Square
    from matplotlib.patches import Rectangle

    tile = min(1, patch.tiles - 1) if tile is None else tile
    cells, starts = places(patch, problem, tile)
    width = cells.shape[1]
    top, bottom = max(0, starts[0, 0] - AROUND), min(len(cells), starts[-1, 0] + problem.R + AROUND)
    figure, axes = new_figure(title, width=8.5, height=min(7.5, max(2.6, 1.2 + 5.6 * (bottom - top) / width)))
    colors = ListedColormap(list(COLORS.values()))
    axes.pcolormesh(cells, cmap=colors, vmin=0, vmax=3, edgecolors="#BDBDBD", linewidth=0.4)
    x, y = starts[:, 1] + problem.pad_w + 0.5, starts[:, 0] + problem.pad_h + 0.5
    axes.scatter(x, y, s=12, marker="s", linewidths=0, color=OKABE_ITO["blue"])
    row, column = starts[len(starts) // 2]
    window: dict[str, Any] = {"fill": False, "edgecolor": OKABE_ITO["vermilion"], "linewidth": 2}
    axes.add_patch(Rectangle((column, row), problem.S, problem.R, **window))
    edge: dict[str, Any] = {"edgecolor": "#BDBDBD", "linewidth": 0.6}
    handles = [
        Square(facecolor=COLORS[PIXEL], label="in the patch: pixels of the input", **edge),
        Square(facecolor=COLORS[ZERO], label="in the patch: zeros", **edge),
        Square(facecolor=COLORS[IMAGE], label="not in it: pixels of the input", **edge),
        Square(facecolor=OKABE_ITO["blue"], label="output pixels of the tile"),
        Square(label=f"window of one of them, {problem.R}×{problem.S}", **window),
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5)
    count, taps, held = len(starts), problem.R * problem.S, int((cells >= ZERO).sum())
    note = f"{count} output pixels:\n{held} places in shared memory\ninstead of {taps} × {count} = {taps * count}"
    axes.text(1.03, 0.0, note, transform=axes.transAxes, fontsize=8.5, va="bottom", color=GREY)
    axes.set_xlim(0, width)
    axes.set_ylim(bottom, top)
    axes.set_aspect("equal")
    axes.locator_params(integer=True)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xlabel("columns of the input, padding included / pixels")
    axes.set_ylabel("rows / pixels")
    return figure
