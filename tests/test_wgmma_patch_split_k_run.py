"""What conv2d_wgmma_patch_split_k computes: its own text, run on the host in many orders.

See `wgmma_patch_split_k_host`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from wgmma_host import COMPILER, Program, build, expected_output, random_epilogue, wrong_programs_in_forms
from wgmma_patch_split_k_host import host_source, run

from cupy_resnet.conv2d import H100, Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_PATCH_SPLIT_K, WgmmaPatchConfig
from cupy_resnet.conv2d.wgmma_patch import patch_tile

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=6, W=7, C=128, K=72, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
SHAPES = {
    "several images a tile": replace(PLAIN, N=5),
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, C=320, N=4),
    "an image larger than a tile": replace(PLAIN, N=1, H=13, W=22, C=64, K=8),
    "5×3": replace(PLAIN, R=5, S=3, pad_h=2, N=2, C=64, K=64),
    "one pixel": replace(PLAIN, N=2, H=1, W=1, C=192, K=136),
    "rows as long as a tile": replace(PLAIN, N=1, H=3, W=61, C=64, K=16),
    "1×1, rows as long as a tile": replace(PLAIN, N=1, R=1, S=1, pad_h=0, pad_w=0, H=3, W=64, C=64, K=16),
    "deep": replace(PLAIN, N=1, H=3, W=3, C=576, K=8),
}
CONFIGS = {
    f"{c.precision} {c.pixels}x{c.split_k_slices}": c for c in WGMMA_PATCH_SPLIT_K if c.precision in ("fp16", "tf32")
}
"""A bf16 is a Half to all that is played here."""


def fitting(problem: Conv2dProblem, config: WgmmaPatchConfig) -> Conv2dProblem:
    """In a form's precision, with a slice of channels for each block."""
    channels = max(problem.C // 64, config.split_k_slices) * config.channels
    return replace(problem, C=channels, precision=config.precision)


def is_right(
    program: Program, config: WgmmaPatchConfig, problem: Conv2dProblem, seed: int, num_stages: int | None = None
) -> bool:
    """Whether the outcome is torch's, of integers every sum of which is exact."""
    generator = np.random.default_rng(seed)
    shapes = {
        "x": (problem.input_shape, 3),
        "weight": (problem.filter_shape, 2),
        "bias": ((problem.K,), 100),
        "residual": (problem.output_shape, 100),
    }
    arrays = {name: generator.integers(-m, m + 1, shape).astype(np.float32) for name, (shape, m) in shapes.items()}
    epilogue = random_epilogue(random.Random(seed), in_place=0.3)
    tile = patch_tile(problem, config.pixels, H100.shared_memory_per_block, config.split_k_slices)
    assert tile is not None
    tile = replace(tile, num_stages=num_stages or tile.num_stages)
    y = run(program, problem, tile, arrays, seed=seed, **epilogue)
    return not isinstance(y, str) and np.array_equal(y, expected_output(problem, arrays, epilogue))


@pytest.mark.parametrize("form", CONFIGS)
def test_it_is_exact_on_integers(tmp_path: Path, form: str) -> None:
    config = CONFIGS[form]
    assert COMPILER is not None
    program = build(COMPILER, tmp_path, host_source().text(), "program", config.defines())
    seed = list(CONFIGS).index(form) % len(SHAPES)  # the next forms take the other shapes
    shape = list(SHAPES)[seed]
    assert is_right(program, config, fitting(SHAPES[shape], config), seed), shape


def test_it_is_exact_with_any_number_of_stages(tmp_path: Path) -> None:
    config = CONFIGS["fp16 64x2"]
    assert COMPILER is not None
    program = build(COMPILER, tmp_path, host_source().text(), "program", config.defines())
    for num_stages in (2, 3, 5, 9):
        for shape in ("deep", "1×1"):
            assert is_right(program, config, SHAPES[shape], num_stages, num_stages), (num_stages, shape)


TWO, FOUR, IMAGES = CONFIGS["fp16 64x2"], CONFIGS["tf32 64x4"], CONFIGS["fp16 128x2"]
"""Blocks that each finish what one consumer multiplies, such that finish half of it, and tiles of several images."""

FINISH = """barrier_wait(all_received, 0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (offsets"""

MISTAKES = {
    "a slice is not waited for": (TWO, "barrier_wait(shared_address(&barriers.full[stage.stage]), stage.parity);", ""),
    "a patch is not waited for": (
        TWO,
        "barrier_wait(shared_address(&barriers.patch_full[patch.stage]), patch.parity);",
        "",
    ),
    "patches are waited for in the wrong phase": (
        TWO,
        "Place stage{0, 0}, patch{0, 0};",
        "Place stage{0, 0}, patch{0, 1};",
    ),
    "a slice is given back before it has been read": (TWO, "warpgroup_wait<1>();", "warpgroup_wait<3>();"),
    "a patch is given back with its first slice": (
        TWO,
        "patch_empty[previous_patch]));",
        "patch_empty[patch.stage]));",
    ),
    "a patch is given back at its first tap and at others": (
        TWO,
        "if (r + s == 0) barrier_arrive",
        "if (r == 0) barrier_arrive",
    ),
    "one consumer gives back slices for both": (
        TWO,
        "shared_address(&empty[i]), readers",
        "shared_address(&empty[i]), 1",
    ),
    "one consumer gives back patches for both": (
        TWO,
        "shared_address(&patch_empty[i]), readers",
        "shared_address(&patch_empty[i]), 1",
    ),
    "who asks for filters does not wait": (
        TWO,
        "barrier_wait(shared_address(&barriers.empty[stage.stage]), stage.parity);",
        "",
    ),
    "who fetches waits for the first places": (TWO, "Place place{0, 1};", "Place place{0, 0};"),
    "who asks for patches does not wait": (
        TWO,
        "barrier_wait(shared_address(&barriers.patch_empty[patch.stage]), patch.parity);",
        "",
    ),
    "sums are sent before they are complete": (TWO, "warpgroup_wait<0>();", ""),
    "the other blocks may not have begun": (TWO, "cluster_wait();  // all blocks", "// all blocks"),
    "partial sums are not waited for": (FOUR, FINISH, FINISH.replace("barrier_wait(all_received, 0);", "")),
    "one's own sums are not waited for": (FOUR, "warpgroups_sync<CONSUMERS>(1);  // what", "// what"),
    "a block waits for its own sums as for others": (FOUR, "(SPLIT_K_CLUSTER - 1) * Rec", "SPLIT_K_CLUSTER * Rec"),
    "a block does not wait for all the others": (FOUR, "(SPLIT_K_CLUSTER - 1) * Rec", "(SPLIT_K_CLUSTER - 2) * Rec"),
    "one's own sums are sent as well": (FOUR, "if (finisher == static_cast<int>(blockIdx.z)) {", "if (false) {"),
    "sums go to the block of the other half": (
        TWO,
        "consumer * (HALF_PIXELS / SHARE) + share",
        "(1 - consumer) * (HALF_PIXELS / SHARE) + share",
    ),
    "both consumers' sums go to the first blocks": (FOUR, "consumer * (HALF_PIXELS / SHARE) + share", "share"),
    "a consumer sends the first block's sums to all": (FOUR, "&sums[share * SHARE / 2 + ", "&sums["),
    "sums take the place of another part": (FOUR, "row_offset(blockIdx.z, row_of(j))", "row_offset(share, row_of(j))"),
    "patches come too early": (TWO, "prefetch_map(pixels);\n            wait_for_earlier_kernels();", ""),
    "the residual is loaded too early": (TWO, "wait_for_earlier_kernels();  //", "//"),
    "zeros behind a patch are left out": (TWO, "i < shape.patch_bytes;", "i < 0;"),
    "only the first patch has zeros behind it": (TWO, "patch < PATCHES; ++patch", "patch < 1; ++patch"),
    "both consumers have the first half": (TWO, "patches + consumer * HALF_PIXELS * ROW_BYTES", "patches"),
    "all blocks have the first channels of the filter": (
        FOUR,
        "fetch_taps(filters, barriers, stages, place, shape, params, tile, chunk * SLICE_CHANNELS)",
        "fetch_taps(filters, barriers, stages, place, shape, params, tile, (chunk - begin) * SLICE_CHANNELS)",
    ),
    "all blocks have the first channels of the pixels": (
        FOUR,
        "fetch_patch(pixels, barriers, patches, place, shape, params, tile, chunk * SLICE_CHANNELS)",
        "fetch_patch(pixels, barriers, patches, place, shape, params, tile, (chunk - begin) * SLICE_CHANNELS)",
    ),
    "a slice is that of 2-byte elements": (
        FOUR,
        "SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT))",
        "SLICE_CHANNELS = 64",
    ),
    "the first product is added to nothing": (
        FOUR,
        "r * shape.columns + s, chunk + r + s);",
        "r * shape.columns + s, 1);",
    ),
    "a block finishes the first one's columns": (FOUR, "params, tile, rank * SHARE);", "params, tile, 0);"),
    "zeros between rows are outputs": (TWO, "q >= params.Q || ", ""),
    "zeros between images are outputs": (IMAGES, "p >= shape.rows || ", ""),
    "what is behind the last image is an output": (IMAGES, "min(shape.images, params.N - n)", "shape.images"),
    "what is behind the last row is an output": (TWO, "min(shape.rows, params.P - p)", "shape.rows"),
    "filters stay as they lie in registers": (
        FOUR,
        "low[i],  low[i + 2],  low[i + 4],  low[i + 6],",
        "low[i],  low[i + 4],  low[i + 2],  low[i + 6],",
    ),
    "filters behind the last are stored": (TWO, "min(max(params.K - k - i * 8, 0), 8)", "8"),
    "the upper eight's residual is the lower one's": (
        FOUR,
        "residuals[pass][i], offsets[pass] + i * 8",
        "residuals[pass][i], offsets[pass]",
    ),
}

TRIES = [
    (SHAPES[name], seed)
    for seed in range(4)
    for name in ("deep", "several images a tile", "1×1", "an image larger than a tile", "5×3")
]

wrong = wrong_programs_in_forms(host_source, MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program, config = wrong(mistake), MISTAKES[mistake][0]
    assert is_right(program.without_mistake, config, fitting(PLAIN, config), 0, 3)
    assert not all(is_right(program, config, fitting(problem, config), seed, 3) for problem, seed in TRIES)
