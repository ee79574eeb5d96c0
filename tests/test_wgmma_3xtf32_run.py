"""What conv2d_wgmma_3xtf32 computes: its own text, run on the host in many orders (see `wgmma_3xtf32_host`)."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from wgmma_3xtf32_host import host_source, run
from wgmma_host import COMPILER, Program, expected_output, programs, random_epilogue, wrong_programs

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_3XTF32
from cupy_resnet.conv2d.tf32_parts import split_tf32

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=9, W=7, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1, precision="fp32-tc")
SHAPES = {
    "3×3": PLAIN,
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, K=200),
    "one slice": replace(PLAIN, C=32, R=1, S=1, pad_h=0, pad_w=0, N=9, K=64),
    "uneven strides": replace(PLAIN, stride_h=2, stride_w=3, C=32, K=4, N=11),
    "dilation": replace(PLAIN, dilation_h=2, pad_w=2, N=7),
    "one pixel": replace(PLAIN, N=1, H=1, W=1),
    "large padding": replace(PLAIN, N=2, H=3, W=5, pad_h=4, pad_w=3, C=32, K=132),
    "many tiles": replace(PLAIN, N=13, C=32, K=260),
}
FORMS = {f"{config.tile_m}x{config.tile_n}": config.defines() for config in WGMMA_3XTF32}
FORMS["few_stages"] = {**WGMMA_3XTF32[0].defines(), "NUM_STAGES": 2}
FORMS["few_stages_and_pieces"] = {**WGMMA_3XTF32[1].defines(), "TILE_M": 128, "NUM_STAGES": 2}
FORMS["many_blocks"] = {**WGMMA_3XTF32[0].defines(), "TILE_M": 256, "NUM_STAGES": 2}


program = programs(host_source, FORMS)


def drawn(problem: Conv2dProblem, seed: int) -> dict[str, np.ndarray]:
    """Integers, of which the pixels or the filters need their low parts too, while every sum has at most 24 bits.

    Low parts are without what makes up for truncation, which sums of doubles would not cut off.
    """
    generator = np.random.default_rng(seed)
    wide, narrow = (4999, 2) if seed % 2 else (2, 4999)
    weight = generator.integers(-narrow, narrow + 1, problem.filter_shape).astype(np.float32)
    high, _ = split_tf32(weight)
    return {
        "x": generator.integers(-wide, wide + 1, problem.input_shape).astype(np.float32),
        "weight": weight,
        "parts": np.stack([high, weight - high]),
        "bias": generator.integers(-9, 10, problem.K).astype(np.float32),
        "residual": generator.integers(-99, 100, problem.output_shape).astype(np.float32),
    }


def is_right(program: Program, problem: Conv2dProblem, seed: int) -> bool:
    draw = random.Random(seed)
    arrays = drawn(problem, seed)
    epilogue = random_epilogue(draw, in_place=0.3)
    y = run(program, problem, arrays, seed=seed, grid=draw.choice([1, 2, 5]), **epilogue)
    return not isinstance(y, str) and np.array_equal(y, expected_output(problem, arrays, epilogue))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_on_integers(program: Callable[[str], Program], shape: str, form: str) -> None:
    assert is_right(program(form), SHAPES[shape], seed=list(SHAPES).index(shape) + list(FORMS).index(form))


MISTAKES = {
    "the first slice is not waited for": (
        "    barrier_wait(shared_address(&barriers.full[place.stage]), place.parity);\n    next.load",
        "    next.load",
    ),
    "the next slices are not waited for": (
        "place.parity);\n                    next.load",
        "1 - place.parity);\n                    next.load",
    ),
    "a product is added before it is complete": ("warpgroup_wait<1>();", "warpgroup_wait<2>();"),
    "a slice is given back before it has been read": ("warpgroup_wait<0>();", "warpgroup_wait<1>();"),
    "one consumer gives back slices for both": (
        "barriers.empty[i]), CONSUMERS * WARPS);",
        "barriers.empty[i]), WARPS);",
    ),
    "the producer does not wait": (
        "barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);",
        "",
    ),
    "rows are not swizzled": ("(corner ^ chunk * 16)", "(corner + chunk * 16)"),
    "low parts take the place of high ones": (
        "product, low[step].words, b_high",
        "product, high[step].words, b_low",
    ),
    "the filter's low parts are forgotten": ("full, depth, params.K + n0", "full, depth, 2 * params.K"),
    "a product is added to its neighbour": (
        "[block % BLOCKS_N * (PRODUCT_N / 2) + i]",
        "[(block + 1) % BLOCKS_N * (PRODUCT_N / 2) + i]",
    ),
    "two products under way share a buffer": ("1 + step % 2))", "1 + step / 2))"),
    "a block begins in the buffer of the last one's sum": ("return (block + (step == 0", "return (0 + (step == 0"),
    "a slice's first product is added to what was there": (
        "low[step].words, b_high, false)",
        "low[step].words, b_high, true)",
    ),
    "a slice's last product is left out": ("if (step == STEPS - 1) sums", "if (step == STEPS - 2) sums"),
    "the residual is forgotten": ("* ROWS && residual; ++i) {", "* ROWS && false; ++i) {"),
    "only the first columns have a residual": ("const int j = first + i / ROWS", "const int j = i / ROWS"),
    "rows behind the last are stored": ("return m0 + row_step(f) < params.gemm_m && n0", "return n0"),
}
MISTAKES_WITH_PIECES = {
    "a piece is finished before its place is ready": (
        "barrier_wait(shared_address(&barriers.ready[at.consumer][piece % PLACES]), phase_of(turn, piece) & 1);",
        "",
    ),
    "a piece is stored before it is finished": (
        "barrier_wait(shared_address(&barriers.finished[consumer][piece % PLACES]), phase_of(turn, piece) & 1);",
        "",
    ),
    "a warp finishes for all": ("barriers.finished[0][i]), WARPGROUP);", "barriers.finished[0][i]), 32);"),
    "a place is given back before it has been stored from": ("                store_wait();\n", ""),
    "both consumers have the first one's rows": (
        "const int m0 = tile / tiles.per_row * TILE_M + consumer * CONSUMER_M, n0",
        "const int m0 = tile / tiles.per_row * TILE_M, n0",
    ),
    "a piece is another's columns": ("n0 + piece * SLICE_CHANNELS, m0", "n0 + (1 - piece) * SLICE_CHANNELS, m0"),
    "its phases do not go on": ("return turn * (PIECES / PLACES) + ", "return "),
}
MISTAKES |= MISTAKES_WITH_PIECES


wrong = wrong_programs(host_source, MISTAKES, lambda name: WGMMA_3XTF32[name in MISTAKES_WITH_PIECES].defines())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program = wrong(mistake)
    assert is_right(program.without_mistake, PLAIN, seed=0)
    assert not all(is_right(program, problem, seed) for problem in SHAPES.values() for seed in range(4))
