"""What conv2d_wgmma_patch computes in TF32: its own text, run on the host in many orders (`wgmma_patch_run_host`)."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from wgmma_host import COMPILER, Program, expected_output, programs, random_epilogue, wrong_programs
from wgmma_patch_run_host import host_source, run

from cupy_resnet.conv2d import H100, Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_PATCH_TF32_PIXELS, WgmmaPatchConfig
from cupy_resnet.conv2d.wgmma_patch import patch_tile

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=9, W=6, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1, precision="tf32")
SHAPES = {
    "3×3": PLAIN,
    "one slice, few filters": replace(PLAIN, C=32, K=4, N=5),
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, K=132, N=5),
    "one tap": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, C=32, K=196, N=5),
    "5×3, a last tile of fewer rows": replace(PLAIN, H=13, W=12, R=5, pad_h=2, C=32, K=64, N=2),
    "whole images": replace(PLAIN, H=3, W=4, C=32, K=68, N=7),
    "one pixel": replace(PLAIN, N=1, H=1, W=1),
    "many slices": replace(PLAIN, C=160, K=8, N=2),
}
FORMS = {f"{pixels}": WgmmaPatchConfig("tf32", pixels).defines() for pixels in WGMMA_PATCH_TF32_PIXELS}


program = programs(host_source, FORMS)


def drawn(problem: Conv2dProblem, seed: int) -> dict[str, np.ndarray]:
    """Integers: residuals with more digits than TF32 has, which must not be rounded."""
    generator = np.random.default_rng(seed)
    return {
        "x": generator.integers(-9, 10, problem.input_shape).astype(np.float32),
        "weight": generator.integers(-9, 10, problem.filter_shape).astype(np.float32),
        "bias": generator.integers(-(2**20), 2**20, problem.K).astype(np.float32),
        "residual": generator.integers(-(2**22), 2**22, problem.output_shape).astype(np.float32),
    }


def is_right(program: Program, problem: Conv2dProblem, pixels: int, seed: int) -> bool:
    draw = random.Random(seed)
    arrays = drawn(problem, seed)
    epilogue = random_epilogue(draw, in_place=0.4)
    tile = patch_tile(problem, pixels, H100.shared_memory_per_block)
    assert tile is not None
    tile = replace(tile, num_stages=draw.choice([3, 5, tile.num_stages]))
    grid, backwards = draw.choice([1, 2]), draw.random() < 0.5
    y = run(program, problem, tile, arrays, seed=seed, grid=grid, backwards=backwards, **epilogue)
    return not isinstance(y, str) and np.array_equal(y, expected_output(problem, arrays, epilogue))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_on_integers(program: Callable[[str], Program], shape: str, form: str) -> None:
    assert is_right(program(form), SHAPES[shape], int(form), seed=list(SHAPES).index(shape) + list(FORMS).index(form))


MISTAKES = {
    "the zeros behind a patch are not written": (
        "store_chunk(patches + patch * shape.patch_bytes + i, Chunk{});",
        ";",
    ),
    "a slice is that of 2-byte elements": (
        "SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT))",
        "SLICE_CHANNELS = 64",
    ),
    "a tap begins in the row before": (
        "multiply_tap<PIXELS>(sums, a, b, r * shape.columns + s,",
        "multiply_tap<PIXELS>(sums, a, b, r * shape.columns,",
    ),
    "zeros between rows are stored": ("if (q >= params.Q || p >=", "if (p >="),
    "zeros between images are stored": ("|| p >= shape.rows ||", "||"),
    "images that the tile does not have are stored": (
        "images = min(shape.images, params.N - n), rows",
        "images = shape.images, rows",
    ),
    "rows behind the last are stored": ("rows = min(shape.rows, params.P - p);", "rows = shape.rows;"),
    "images follow each other with their zeros": (
        "(image * params.P + p) * params.Q + q)",
        "(image * shape.patch_rows + p) * params.Q + q)",
    ),
    "filters behind the last are stored": ("pixels = k < params.K ?", "pixels = true ?"),
    "filters are not traded": ("transpose_filters(sum);", ";"),
    "all lanes give the same place": ("exchange(values, lane / 4);", ""),
    "only neighbours trade": ("for (int bit = 1; bit <= 2; bit *= 2)", "for (int bit = 1; bit <= 1; bit *= 2)"),
    "pixels are those of the lane before": ("column = threadIdx.x % 32 / 4;", "column = threadIdx.x % 32 / 8;"),
    "filters are those of a staged tile": ("STAGED ? lane / 4 : ", "true ? lane / 4 : "),
    "biases are those of a staged tile": ("i * (STAGED ? 8 : 1)", "i * 8"),
    "a block's residual is its neighbour's": (
        "float4 shortcut = shortcuts[i];",
        "float4 shortcut = shortcuts[i ^ (i < 8)];",
    ),
    "negative sums stay": ("least_kept(params.relu)", "least_kept(false)"),
    "residuals are brought to L2 for the first 32 filters only": (
        "residuals && k < FILTERS;",
        "residuals && k < FILTERS / 2;",
    ),
    "backwards the other consumers begin at the other end": (
        "turns.first + consumer * turns.step",
        "turns.first + consumer * gridDim.x",
    ),
    "the third consumer is left out": ("(consumer + 1) % CONSUMERS", "1 - consumer % 2"),
    "only one of two others is passed over": ("pass_over(CONSUMERS - 1);", "pass_over(1);"),
    "one warp says for all that it is the other's turn": (
        "if (threadIdx.x % 32 == 0) barrier_arrive",
        "if (threadIdx.x % 128 < 4) barrier_arrive",
    ),
    "nobody waits for a product": ("warpgroup_wait<0>();", ""),
}


OF_TWO_CONSUMERS = {"one warp says for all that it is the other's turn"}
"""What three do not run into: a consumer's turns come too seldom to overtake each other."""


def pixels_of(mistake: str) -> int:
    """The form that a mistake is planted in."""
    return 208 if mistake in OF_TWO_CONSUMERS else 64


wrong = wrong_programs(host_source, MISTAKES, lambda mistake: FORMS[f"{pixels_of(mistake)}"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program, pixels = wrong(mistake), pixels_of(mistake)
    assert is_right(program.without_mistake, PLAIN, pixels, seed=0)
    assert not all(is_right(program, problem, pixels, seed) for problem in SHAPES.values() for seed in range(4))
