"""The tiles that the notebooks draw and reckon with are those that the kernels compute."""

from dataclasses import replace

import numpy as np
import pytest

from cupy_resnet.conv2d import VARIANTS, Conv2dProblem
from cupy_resnet.conv2d.configs import MmaConfig, MmaPatchConfig, WgmmaConfig, WgmmaPatchConfig, WmmaConfig
from cupy_resnet.conv2d.device import H100
from cupy_resnet.conv2d.heuristics import fastest
from cupy_resnet.proof.patches import IMAGE, OUTSIDE, PIXEL, ZERO, patch_of, places, plot_patch
from cupy_resnet.proof.tiles import WORKERS, Tile, plot_tile, tile_of

PROBLEM = Conv2dProblem(N=32, H=28, W=28, C=128, K=128, R=3, S=3, pad_h=1, pad_w=1)
FP16 = replace(PROBLEM, precision="fp16")
SMALL = replace(FP16, N=5, H=7, W=7, C=512, K=512)  # several images in a tile
WIDE = replace(FP16, N=2, H=56, W=56, C=64, K=64)
PRECISIONS = [(name, precision) for name, variant in VARIANTS.items() for precision in variant.precisions]
MMA = MmaConfig("fp16", 128, 128, 64, 64, 3, 2)
MMA_PATCH = MmaPatchConfig("fp16", 128, 64, 64, 32, 3, 3)


@pytest.mark.parametrize(("variant", "precision"), PRECISIONS)
def test_a_tile_covers_the_output(variant, precision):
    problem = replace(PROBLEM, precision=precision)
    tile = tile_of(variant, fastest(variant, problem, H100)[0], problem)
    if tile is None:
        return
    assert tile.threads % 32 == 0
    assert tile.threads <= 1024
    assert tile.blocks(problem) * tile.block_m * tile.block_n * tile.pixels >= problem.gemm_m * problem.K
    assert tile.element_size == problem.arithmetic.element_size
    figure = plot_tile(tile, problem, variant)
    noun = "tiles" if tile.takes_turns else "blocks"
    assert f"{tile.blocks(problem):,} {noun}" in figure.axes[0].get_title(loc="left")
    assert f"one {tile.worker}: " in figure.axes[1].get_title(loc="left")


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if "fp16" in variant.precisions])
def test_every_form_on_tensor_cores_has_a_tile_with_the_threads_that_are_launched(variant):
    for problem in (FP16, SMALL, WIDE):
        for config in VARIANTS[variant].candidates(problem, H100):
            tile = tile_of(variant, config, problem)
            assert tile.threads == config.threads
            assert tile.worker in WORKERS
            made = tile.blocks(problem) * tile.multiply_adds(problem)
            assert made >= problem.flops / 2 * (1 - 1e-9)


def test_what_the_tiles_of_the_ladder_are():
    fp32 = [name for name, variant in VARIANTS.items() if "fp32" in variant.precisions]
    tiles = {name: tile_of(name, fastest(name, PROBLEM, H100)[0], PROBLEM) for name in fp32}
    assert tiles["conv2d_direct"] == Tile(2, 128, 1, 1, shared=False)
    assert tiles["conv2d_direct"].threads == 256
    assert tiles["conv2d_shared"].threads == 1024
    assert tiles["conv2d_shared"].shared_bytes == 8
    assert tiles["im2col_sgemm"].threads == 256
    assert tiles["im2col_sgemm"].shared_bytes == 1
    assert tiles["conv2d_winograd"].threads == 512
    assert tiles["conv2d_winograd"].multiplications == pytest.approx(1 / 2.25)


def test_what_the_tiles_on_tensor_cores_are():
    wmma = tile_of("conv2d_wmma", WmmaConfig("fp16", 128, 64, 64, 32, 3), FP16)
    assert (wmma.threads, wmma.instruction, wmma.blocks(FP16)) == (128, (16, 16), 196 * 2)
    mma = tile_of("conv2d_mma", MMA, FP16)
    assert (mma.threads, mma.instruction, mma.blocks(FP16)) == (128, (16, 8), 196)
    assert mma.shared_bytes == 2 / 64 + 2 / 64
    assert mma.fetched_bytes(FP16) == 2 * FP16.gemm_k * (128 + 128)
    assert mma.multiply_adds(FP16) == 128 * 128 * FP16.gemm_k
    wgmma = tile_of("conv2d_wgmma", WgmmaConfig("fp16", 128, 64, 8), FP16)
    assert (wgmma.threads, wgmma.instruction, wgmma.blocks(FP16)) == (384, (64, 64), 196 * 2)
    # 64 × 64 × 16 multiply-adds in 32 clocks at 2,048 a clock: all 128 bytes per clock that shared memory has.
    assert wgmma.shared_bytes * 2048 == 128


def test_split_k_shares_the_work_of_a_tile():
    whole, split = (tile_of("conv2d_mma", replace(MMA, split_k_slices=n), FP16) for n in (1, 4))
    assert split.blocks(FP16) == 4 * whole.blocks(FP16)
    for of in (Tile.multiply_adds, Tile.fetched_bytes):
        assert of(split, FP16) == of(whole, FP16) / 4
    assert "784 blocks of 128 × 128, 4 for each tile" in plot_tile(split, FP16).axes[0].get_title(loc="left")


def test_merged_groups_have_no_tile_of_this_kind():
    assert tile_of("conv2d_mma", replace(MMA, merged_groups=2), replace(FP16, groups=64)) is None


def test_what_is_multiplied_for_nothing_between_the_rows_of_a_patch():
    tile = tile_of("conv2d_wgmma_patch", WgmmaPatchConfig("fp16", 208), FP16)
    assert (tile.block_m, tile.block_n, tile.instruction) == (7 * 28, 64, (208, 64))
    assert tile.blocks(FP16) == 32 * 4 * 2
    assert tile.multiplications == 208 / 196
    assert tile.multiply_adds(FP16) == pytest.approx(208 * 64 * FP16.gemm_k)


def test_a_filter_that_stays_is_not_fetched_for_a_tile():
    config = fastest("conv2d_wgmma_patch", WIDE, H100)[0]
    tile = tile_of("conv2d_wgmma_patch", config, WIDE)
    assert tile.patch.filters_stay
    assert tile.fetched_bytes(WIDE) == pytest.approx(2 * tile.patch.fetched(WIDE) * WIDE.C)


PATCHES = [
    (problem, config)
    for problem in (FP16, SMALL, WIDE)
    for config in (MMA_PATCH, *VARIANTS["conv2d_wgmma_patch"].candidates(problem, H100))
]


@pytest.mark.parametrize(("problem", "config"), PATCHES, ids=str)
def test_a_patch_holds_what_every_tap_of_its_tile_reads(problem, config):
    patch = patch_of(config, problem)
    fetched, covered = [], 0
    for tile in range(patch.tiles):
        cells, starts = places(patch, problem, tile)
        held = cells >= ZERO
        first, rows = np.flatnonzero(held.any(1))[0], held.any(1).sum()
        assert held[first : first + rows].all()
        assert rows <= patch.rows
        fetched.append((cells == PIXEL).sum())
        m = np.arange(*patch.span(problem, tile))
        assert m[0] == covered
        covered = m[-1] + 1
        p, q = m // problem.Q % problem.P, m % problem.Q
        for r in range(problem.R):
            for s in range(problem.S):
                # The memory goes on behind the end of a row, and zeros behind the end of the patch.
                at = (starts[:, 0] + r) * patch.columns + starts[:, 1] + s
                found = np.append(cells.ravel(), [ZERO] * (2 * patch.columns))[at]
                h, w = p + r - problem.pad_h, q + s - problem.pad_w
                inside = (h >= 0) & (h < problem.H) & (w >= 0) & (w < problem.W)
                assert (found[inside] == PIXEL).all()
                assert np.isin(found[~inside], [ZERO, OUTSIDE]).all()
    assert covered == problem.gemm_m
    assert patch.fetched(problem) == pytest.approx(np.mean(fetched))
    assert (cells == IMAGE).sum() + fetched[-1] == problem.N * problem.H * problem.W


def test_a_patch_is_drawn_with_its_size():
    patch = patch_of(WgmmaPatchConfig("fp16", 208), FP16)
    (axes,) = plot_patch(patch, FP16, "title").axes
    assert "196 output pixels:\n261 places" in axes.texts[0].get_text()
    assert axes.get_xlabel().endswith("/ pixels")


def test_a_kernel_without_a_patch_and_a_tile_that_does_not_fit():
    assert patch_of(MMA, FP16) is None
    with pytest.raises(ValueError, match="has no tile for"):
        patch_of(WgmmaPatchConfig("fp16", 64), replace(FP16, H=300, W=300))
