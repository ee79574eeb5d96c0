"""conv2d_wgmma_patch: its tiles, with the accelerator and the tensor cores played by NumPy."""

import itertools

import numpy as np
import pytest
from helpers import ConvCase, torch_conv2d

from cupy_resnet.conv2d import H100, Conv2dProblem
from cupy_resnet.conv2d.variants import VARIANTS
from cupy_resnet.conv2d.wgmma_patch import PatchTile, patch_tile

LIMIT = H100.shared_memory_per_block
SIZES = [(56, 56), (28, 28), (14, 14), (7, 7), (9, 5), (1, 1), (3, 40), (23, 11)]


def fetched(x: np.ndarray, start: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """A box of an NHWC array, zeros outside of it: what the tensor memory accelerator writes."""
    result = np.zeros((*box, x.shape[-1]), x.dtype)
    for i, j, k in itertools.product(*map(range, box)):
        n, h, w = start[0] + i, start[1] + j, start[2] + k
        if 0 <= n < x.shape[0] and 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
            result[i, j, k] = x[n, h, w]
    return result


def convolved(problem: Conv2dProblem, x: np.ndarray, weight: np.ndarray, pixels: int, tile: PatchTile) -> np.ndarray:
    """The convolution as the kernel computes it, tile by tile."""
    p = problem
    y = np.full(p.output_shape, np.nan, np.float32)
    for number in range(tile.pixel_tiles):
        n, h = number // tile.row_tiles * tile.images, number % tile.row_tiles * tile.rows
        patch = np.full((tile.patch_bytes // 128 + pixels, p.C), np.nan, np.float32)  # what follows is somebody else's
        patch[: tile.patch_bytes // 128] = 0
        box = fetched(x, (n, h - p.pad_h, -p.pad_w), (tile.images, tile.patch_rows, tile.columns))
        patch[: tile.box_bytes // 128] = box.reshape(-1, p.C)
        sums = np.zeros((pixels, p.K), np.float32)
        for r, s in itertools.product(range(p.R), range(p.S)):
            first = r * tile.columns + s
            sums += patch[first : first + pixels] @ weight[:, r, s].T
        if tile.store_bytes == 0:  # as the kernel's pixel_at and Outputs have it
            store_by_pixels(p, tile, sums, y.reshape(-1, p.K), n, h)
            continue
        staged = np.full((tile.staged_bytes // 128, p.K), np.nan, np.float32)
        staged[:pixels] = sums
        stored = staged[: tile.store_bytes // 128].reshape(tile.images, tile.stored_rows, tile.columns, p.K)
        part = y[n : n + tile.images, h : h + tile.stored_rows]
        part[...] = stored[: part.shape[0], : part.shape[1], : p.W]
    return y


def store_by_pixels(p: Conv2dProblem, tile: PatchTile, sums: np.ndarray, y: np.ndarray, n: int, h: int) -> None:
    """Stores a tile that is not staged, whose first pixel is (n, h, 0), in the rows of y, one for each pixel."""
    images, rows = min(tile.images, p.N - n), min(tile.rows, p.H - h)
    count, first = ((images - 1) * p.H + rows) * p.W, (n * p.H + h) * p.W
    for column, outputs in enumerate(sums):
        row, q = divmod(column, tile.columns)
        image, r = divmod(row, tile.patch_rows)
        if q < p.W and r < tile.rows and image < tile.images and (pixel := (image * p.H + r) * p.W + q) < count:
            assert np.isnan(y[first + pixel]).all()
            y[first + pixel] = outputs


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("filter", [(1, 1), (3, 3), (5, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_every_tile_covers_the_output_and_nothing_else(
    size: tuple[int, int], filter: tuple[int, int], precision: str
) -> None:
    (H, W), (R, S) = size, filter
    problem = Conv2dProblem(N=5, H=H, W=W, C=64, K=8, R=R, S=S, pad_h=R // 2, pad_w=S // 2, precision=precision)
    arrays = ConvCase(problem).arrays(exact=True)
    x, weight = arrays["x"], arrays["weight"]
    assert x is not None
    assert weight is not None
    expected = torch_conv2d(arrays, ConvCase(problem).arguments)
    candidates = VARIANTS["conv2d_wgmma_patch"].candidates(problem, H100)
    assert candidates
    for config in candidates:
        tile = patch_tile(problem, config.pixels, LIMIT, config.split_k_slices)
        assert tile is not None
        assert tile.shared_memory + 1024 <= LIMIT
        assert tile.patch_bytes % 1024 == tile.staged_bytes % 1024 == 0
        np.testing.assert_array_equal(convolved(problem, x, weight, config.pixels, tile), expected, err_msg=str(tile))
