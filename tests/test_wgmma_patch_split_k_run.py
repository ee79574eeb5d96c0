"""What conv2d_wgmma_patch_split_k computes: its own text, run on the host in many orders (see
`wgmma_patch_split_k_host`).
"""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import ConvCase, torch_conv2d
from wgmma_host import build
from wgmma_patch_split_k_host import host_source, run

from cupy_resnet.conv2d import H100, Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_PATCH_SPLIT_K, WgmmaPatchConfig
from cupy_resnet.conv2d.wgmma_patch import patch_tile

COMPILER = shutil.which("g++") or shutil.which("clang++")
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
CONFIGS = {f"{c.pixels}x{c.split_k_slices}": c for c in WGMMA_PATCH_SPLIT_K if c.precision == "fp16"}


def built(folder: Path, config: WgmmaPatchConfig, source: str) -> Path:
    assert COMPILER is not None
    return build(COMPILER, folder, source, "program", config.defines())


def deep_enough(problem: Conv2dProblem, config: WgmmaPatchConfig) -> Conv2dProblem:
    """With a slice of channels for each block."""
    return replace(problem, C=max(problem.C, 64 * config.split_k_slices))


def is_right(
    program: Path, config: WgmmaPatchConfig, problem: Conv2dProblem, seed: int, num_stages: int | None = None
) -> bool:
    """Whether the outcome is torch's, of integers every sum of which is exact."""
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    shapes = {
        "x": (problem.input_shape, 3),
        "weight": (problem.filter_shape, 2),
        "bias": ((problem.K,), 100),
        "residual": (problem.output_shape, 100),
    }
    arrays = {name: generator.integers(-m, m + 1, shape).astype(np.float32) for name, (shape, m) in shapes.items()}
    bias, in_place, relu = draw.random() < 0.7, draw.random() < 0.3, draw.random() < 0.5
    residual = in_place or draw.random() < 0.5
    given = {**arrays, "bias": arrays["bias"] if bias else None, "residual": arrays["residual"] if residual else None}
    expected = torch_conv2d(given, ConvCase(problem, relu=relu).arguments)
    tile = patch_tile(problem, config.pixels, H100.shared_memory_per_block, config.split_k_slices)
    assert tile is not None
    tile = replace(tile, num_stages=num_stages or tile.num_stages)
    epilogue = {"bias": bias, "residual": residual, "in_place": in_place, "relu": relu}
    y = run(program, problem, tile, arrays, seed=seed, **epilogue)
    return not isinstance(y, str) and np.array_equal(y, expected)


@pytest.mark.parametrize("form", CONFIGS)
def test_it_is_exact_on_integers(tmp_path: Path, form: str) -> None:
    config = CONFIGS[form]
    program = built(tmp_path, config, host_source())
    begin = list(CONFIGS).index(form) % 3  # every third shape: the next forms take the others
    for seed, (shape, problem) in list(enumerate(SHAPES.items()))[begin::3]:
        assert is_right(program, config, deep_enough(problem, config), seed), shape


@pytest.mark.parametrize("num_stages", [2, 3, 5, 9])
def test_it_is_exact_with_any_number_of_stages(tmp_path: Path, num_stages: int) -> None:
    config = CONFIGS["64x2"]
    program = built(tmp_path, config, host_source())
    for seed, shape in enumerate(("deep", "1×1")):
        assert is_right(program, config, SHAPES[shape], seed, num_stages), shape


SHARED_OUT, ODD = CONFIGS["64x2"], CONFIGS["208x8"]
"""Blocks that share a tile, and such that share eights of its columns."""

MISTAKES = {
    "a slice is not waited for": (SHARED_OUT, "barrier_wait(shared_address(&barriers.full[stage.stage]), stage.parity);", ""),
    "a patch is not waited for": (
        SHARED_OUT,
        "barrier_wait(shared_address(&barriers.patch_full[patch.stage]), patch.parity);",
        "",
    ),
    "a slice is given back before it has been read": (SHARED_OUT, "warpgroup_wait<1>();", "warpgroup_wait<3>();"),
    "one consumer gives back slices for both": (SHARED_OUT, "barriers.empty[i]), CONSUMERS);", "barriers.empty[i]), 1);"),
    "one consumer gives back patches for both": (
        SHARED_OUT,
        "barriers.patch_empty[i]), CONSUMERS);",
        "barriers.patch_empty[i]), 1);",
    ),
    "the producer does not wait for a slice's place": (
        SHARED_OUT,
        "barrier_wait(shared_address(&barriers.empty[stage.stage]), stage.parity);",
        "",
    ),
    "the producer does not wait for a patch's place": (
        SHARED_OUT,
        "barrier_wait(shared_address(&barriers.patch_empty[patch.stage]), patch.parity);",
        "",
    ),
    "sums are sent before they are complete": (SHARED_OUT, "warpgroup_wait<0>();", ""),
    "the other blocks may not have begun": (SHARED_OUT, "cluster_wait();  // all blocks", "// all blocks"),
    "partial sums are not waited for": (SHARED_OUT, "    barrier_wait(all_received, 0);\n#pragma unroll\n    for (int pass = 0; pass < PASSES; ++pass) {\n        if (offsets", "#pragma unroll\n    for (int pass = 0; pass < PASSES; ++pass) {\n        if (offsets"),
    "patches come too early": (SHARED_OUT, "wait_for_earlier_kernels();\n    for", "for"),
    "y is stored too early": (SHARED_OUT, "wait_for_earlier_kernels();  //", "//"),
    "zeros behind a patch are left out": (SHARED_OUT, "i < shape.patch_bytes;", "i < 0;"),
    "both consumers have the first half": (SHARED_OUT, "patches + consumer * HALF_PIXELS * ROW_BYTES", "patches"),
    "both blocks have the first channels": (SHARED_OUT, "begin * SLICE_CHANNELS, chunks", "0, chunks"),
    "a tap's channels begin elsewhere": (SHARED_OUT, "c0 + chunk * SLICE_CHANNELS, tile.k", "c0, tile.k"),
    "zeros between rows are outputs": (SHARED_OUT, "q < params.Q && ", ""),
    "zeros between images are outputs": (CONFIGS["128x1"], "row < shape.rows && ", ""),
    "what is behind the last image is an output": (CONFIGS["128x1"], " && n < params.N", ""),
    "an eight is not cut in two": (ODD, "row >= SHARE) row -= SHARE, ++rank;", "false) ;"),
    "filters stay as they lie in registers": (
        SHARED_OUT,
        "low[i],  low[i + 2],  low[i + 4],  low[i + 6],",
        "low[i],  low[i + 4],  low[i + 2],  low[i + 6],",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, mistake: str) -> None:
    """So that what is found right means something."""
    config, right, wrong = MISTAKES[mistake]
    source = host_source()
    assert source.count(right) == 1, mistake
    program = built(tmp_path, config, source.replace(right, wrong))
    names = ("deep", "several images a tile", "1×1", "an image larger than a tile", "5×3")
    tries = [(deep_enough(SHAPES[name], config), seed) for seed in range(4) for name in names]
    assert not all(is_right(program, config, problem, seed, 3) for problem, seed in tries)
