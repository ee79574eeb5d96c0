"""What conv2d_wgmma_split_k computes: its own text, run on the host in many orders (see `wgmma_split_k_host`)."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ConvCase, torch_conv2d
from wgmma_host import COMPILER, Program, build, random_epilogue, run_with_shortcut, wrong_programs_in_forms
from wgmma_split_k_host import host_source

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_SPLIT_K, WgmmaConfig
from cupy_resnet.conv2d.tensor_core_variants import tile_count

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=6, W=7, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1, precision="tf32")
SHAPES = {
    "3×3": PLAIN,
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, C=544, N=2),
    "uneven strides": replace(PLAIN, stride_h=2, stride_w=3, K=8, N=11),
    "one pixel": replace(PLAIN, N=1, H=1, W=1),
    "deep": replace(PLAIN, N=1, C=320, K=64),
    "3×3 and a shortcut": replace(PLAIN, shortcut_channels=96, shortcut_stride=2),
    "1×1 and a shortcut": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, C=256, shortcut_channels=352),
    "a tap and a deep shortcut": replace(
        PLAIN, R=1, S=1, pad_h=0, pad_w=0, C=32, shortcut_channels=512, shortcut_stride=3, K=8
    ),
    "a pixel and a shortcut": replace(PLAIN, N=1, H=1, W=1, shortcut_channels=32, shortcut_stride=2),
}
CONFIGS = {f"{c.tile_m}x{c.tile_n}x{c.stages}x{c.split_k_slices}": c for c in WGMMA_SPLIT_K if c.precision == "tf32"}


def drawn(problem: Conv2dProblem, seed: int) -> dict[str, np.ndarray]:
    """Integers, every sum of which is exact."""
    generator = np.random.default_rng(seed)
    N, H, W, C = problem.shortcut_shape
    left_out = generator.integers(0, problem.shortcut_stride, 2)  # of the last step: rows and columns nobody needs
    shapes = {
        "x": problem.input_shape,
        "weight": problem.filter_shape,
        "bias": (problem.K,),
        "residual": problem.output_shape,
        "x0": (N, H - left_out[0], W - left_out[1], C),
        "weight0": problem.shortcut_filter_shape,
    }
    return {name: generator.integers(-9, 10, shape).astype(np.float32) for name, shape in shapes.items()}


def expected_of(
    problem: Conv2dProblem, arrays: dict[str, np.ndarray], *, bias: bool, residual: bool, relu: bool
) -> Any:
    """Both convolutions by torch, in float64."""
    added = arrays["residual"] if residual else np.zeros(problem.output_shape, np.float32)
    if problem.shortcut_channels:
        assert problem.has_shortcut_of(arrays["x0"].shape)
        alone = ConvCase(problem.shortcut_alone(arrays["x0"].shape)).arguments
        given = {"x": arrays["x0"], "weight": arrays["weight0"], "bias": None, "residual": added}
        added = torch_conv2d(given, alone)
    given = {**arrays, "bias": arrays["bias"] if bias else None, "residual": added}
    return torch_conv2d(given, ConvCase(problem, relu=relu).arguments)


def is_right(program: Program, config: WgmmaConfig, problem: Conv2dProblem, seed: int) -> bool:
    draw = random.Random(seed)
    arrays = drawn(problem, seed)
    epilogue = random_epilogue(draw, in_place=0.3)
    expected = expected_of(problem, arrays, **{name: epilogue[name] for name in ("bias", "residual", "relu")})
    y = run_with_shortcut(program, problem, arrays, seed=seed, grid=tile_count(problem, config), **epilogue)
    return not isinstance(y, str) and np.array_equal(y, expected)


@pytest.mark.parametrize("form", CONFIGS)
def test_it_is_exact_on_integers(tmp_path: Path, form: str) -> None:
    config = CONFIGS[form]
    assert COMPILER is not None
    program = build(COMPILER, tmp_path, host_source().text(), "program", config.defines())
    begin = list(CONFIGS).index(form) % 3  # every third shape: the next forms take the others
    for seed, (shape, problem) in list(enumerate(SHAPES.items()))[begin::3]:
        assert problem.depth // config.tile_k >= 2 * config.split_k_slices
        assert is_right(program, config, problem, seed), shape


ROWS, SLICES = CONFIGS["128x64x8x4"], CONFIGS["64x64x4x2"]
"""Consumers that share the rows of a tile, and its slices."""

MISTAKES = {
    "a slice is not waited for": (SLICES, "barrier_wait(shared_address(&barriers.full[stage]), parity);", ""),
    "a slice is given back before it has been read": (SLICES, "warpgroup_wait<1>();", "warpgroup_wait<2>();"),
    "one consumer gives back slices for both": (ROWS, "barriers.empty[i]), READERS);", "barriers.empty[i]), 1);"),
    "who asks for filters does not wait": (
        SLICES,
        "barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);\n"
        "        barrier_arrive_expecting(full, STAGE_BYTES - PIXEL_BYTES);",
        "barrier_arrive_expecting(full, STAGE_BYTES - PIXEL_BYTES);",
    ),
    "who asks for pixels does not wait": (
        SLICES,
        "barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);\n"
        "        barrier_arrive_expecting(full, PIXEL_BYTES);",
        "barrier_arrive_expecting(full, PIXEL_BYTES);",
    ),
    "sums are sent before they are complete": (SLICES, "warpgroup_wait<0>();", ""),
    "the other blocks may not have begun": (SLICES, "cluster_wait();  // all blocks", "// all blocks"),
    "partial sums are not waited for": (ROWS, "barrier_wait(all_received, 0);", ""),
    "one's own sums are not waited for": (SLICES, "warpgroups_sync<CONSUMERS>(1);  // what", "// what"),
    "a block waits for sums that are not sent": (ROWS, "(SPLIT_K_CLUSTER - 1) * PARTS", "SPLIT_K_CLUSTER * PARTS"),
    "pixels come too early": (SLICES, "wait_for_earlier_kernels();\n    in_turn", "in_turn"),
    "y is stored too early": (SLICES, "wait_for_earlier_kernels();  //", "//"),
    "the shortcut's pixels are those of the first input": (SLICES, "(target, shortcut, full", "(target, pixels, full"),
    "the shortcut's filter begins elsewhere": (SLICES, "(adding ? all_taps : 0)", "0"),
    "the shortcut steps like the taps": (SLICES, "step = params.shortcut_stride", "step = params.stride_w"),
    "the shortcut ends as a tap does": (SLICES, "if (!adding && c == params.C)", "if (c == params.C)"),
    "the shortcut begins a slice late": (SLICES, "slice < min(end, of_taps)", "slice <= min(end - 1, of_taps)"),
    "the shortcut's slices are left out": (SLICES, "+ params.shortcut_channels / SLICE_CHANNELS", ""),
    "rows of the other consumer": (ROWS, "(PARTS > 1 ? 0 : consumer * 64) + warp * 16", "warp * 16"),
}


TRIES = [(problem, seed) for seed in range(4) for problem in reversed(SHAPES.values())]


wrong = wrong_programs_in_forms(host_source, MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program, config = wrong(mistake), MISTAKES[mistake][0]
    assert is_right(program.without_mistake, config, PLAIN, seed=0)
    assert not all(is_right(program, config, problem, seed) for problem, seed in TRIES)


def test_stages_must_not_change_hands(tmp_path: Path) -> None:
    """What the kernel refuses to be compiled for is wrong."""
    assert COMPILER is not None
    refused, allowed = "NUM_STAGES % PARTS == 0 && NUM_STAGES > PARTS", "NUM_STAGES > PARTS"
    config, source = replace(SLICES, stages=5), host_source().with_mistake((refused, allowed))
    program = build(COMPILER, tmp_path, source.text(), "program", config.defines())
    assert not all(is_right(program, config, problem, seed) for problem, seed in TRIES)
