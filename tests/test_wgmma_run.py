"""What conv2d_wgmma computes: its own text, run on the host in many orders (see `wgmma_run_host`)."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_wgmma_split_k_run import drawn, expected_of
from wgmma_host import COMPILER, Program, programs, random_epilogue, run_with_shortcut, wrong_programs_in_forms
from wgmma_run_host import host_source

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA, WgmmaConfig
from cupy_resnet.engines.bfloat16 import from_bfloat16, to_bfloat16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=9, W=7, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1)
SHAPES = {
    "3×3": PLAIN,
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, K=264),
    "one slice": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, N=11, K=64),
    "uneven strides": replace(PLAIN, stride_h=2, stride_w=3, K=8, N=23),
    "one pixel": replace(PLAIN, N=1, H=1, W=1),
    "a shortcut": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, K=136, shortcut_channels=64, shortcut_stride=2),
    "a shortcut of stride 1": replace(PLAIN, shortcut_channels=192),
    "both stride": replace(PLAIN, stride_h=2, stride_w=3, shortcut_channels=64, shortcut_stride=3),
    "many tiles": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, N=17, K=136),
}
CONFIGS = {f"{config.precision} {config}": config for config in WGMMA if config.precision != "fp16"}


program = programs(host_source, {name: config.defines() for name, config in CONFIGS.items()})


def is_right(program: Program, config: WgmmaConfig, problem: Conv2dProblem, seed: int) -> bool:
    draw = random.Random(seed)
    problem = replace(problem, precision=config.precision)
    arrays = drawn(problem, seed)
    epilogue = random_epilogue(draw, in_place=0.3)
    expected = expected_of(problem, arrays, **{name: epilogue[name] for name in ("bias", "residual", "relu")})
    grid, backwards = draw.choice([1, 2, 3]), draw.random() < 0.5
    y = run_with_shortcut(program, problem, arrays, seed=seed, grid=grid, backwards=backwards, **epilogue)
    if config.precision == "bf16":
        expected = from_bfloat16(to_bfloat16(np.asarray(expected)))
    return not isinstance(y, str) and np.array_equal(y, expected)


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_on_integers(program: Callable[[str], Program], shape: str, form: str) -> None:
    seed = list(SHAPES).index(shape) + list(CONFIGS).index(form)
    assert is_right(program(form), CONFIGS[form], SHAPES[shape], seed)


def form(precision: str, tile_m: int, tile_n: int, *, transposed: bool = False) -> WgmmaConfig:
    wanted = precision, tile_m, tile_n, transposed
    return next(c for c in WGMMA if (c.precision, c.tile_m, c.tile_n, c.transposed) == wanted)


STAGED = form("bf16", 128, 128)
IN_PIECES = form("tf32", 128, 64)
TRANSPOSED = form("bf16", 192, 128, transposed=True)
IN_MEMORY = form("tf32", 192, 128, transposed=True)
MISTAKES = {
    "a turn is handed on before all of a warp have had theirs": (STAGED, "            __syncwarp();\n", ""),
    "a turn is handed on to oneself": (STAGED, "barriers.turn[1 - consumer]", "barriers.turn[consumer]"),
    "a turn is not waited for": (STAGED, "if (tiles_before > 0) barrier_wait", "if (false) barrier_wait"),
    "a slice is given back before it has been read": (STAGED, "warpgroup_wait<1>();", "warpgroup_wait<2>();"),
    "a slice is not waited for": (
        STAGED,
        "barrier_wait(shared_address(&barriers.full[place.stage]), place.parity);\n        const unsigned stage =",
        "const unsigned stage =",
    ),
    "the residual is not waited for": (
        STAGED,
        "barrier_wait(shared_address(&barriers.residual[consumer][number % BUFFERS]), number / BUFFERS & 1);",
        "",
    ),
    "a tile is stored before all have written it": (
        STAGED,
        "            written_for_storing();\n            warpgroup_sync(1 + consumer);\n",
        "            written_for_storing();\n",
    ),
    "what was written is not made visible": (STAGED, "            written_for_storing();\n", ""),
    "a place is asked for before it has been stored from": (
        STAGED,
        "residual ? store_wait<BUFFERS - AHEAD>() : store_wait<BUFFERS - 1>();",
        "",
    ),
    "all pieces have the first one's biases": (IN_PIECES, "biases + piece * PAIRS_OF_PIECE % PAIRS", "biases + 0"),
    "a piece is finished with the first one's sums": (IN_PIECES, "(blocks_before + block + i / 2)", "(block + i / 2)"),
    "a piece's residual is its neighbour's": (
        IN_PIECES,
        "+ number % PIECES * PIECE_N;",
        "+ (number + 1) % PIECES * PIECE_N;",
    ),
    "the later residuals are of the same tile": (IN_PIECES, "(piece + AHEAD) / PIECES * step", "0"),
    "upper filters lie where lower ones do": (TRANSPOSED, "(warp_row / 8 + lane / 8 % 2)", "(warp_row / 8)"),
    "later pixels lie where earlier ones do": (
        TRANSPOSED,
        "(lane / 16 * 8 + lane % 8) * ROW_BYTES",
        "lane % 8 * ROW_BYTES",
    ),
    "both blocks of filters have the first one's sums": (
        TRANSPOSED,
        "sums[piece * PIECE_N / 64 + block]",
        "sums[block]",
    ),
    "biases are of neighbouring filters": (TRANSPOSED, "bias_of(filter + (STAGED ? 8 : 1))", "bias_of(filter + 1)"),
    "filters behind the last are stored": (IN_MEMORY, "filter < filters ? pixels : 0", "pixels"),
    "filters are not traded": (IN_MEMORY, "transpose_filters(sum);", ";"),
    "backwards the second consumer begins at the other end": (
        STAGED,
        "turns.first + consumer * turns.step",
        "turns.first + consumer * gridDim.x",
    ),
    "the shortcut steps as the first input does": (
        STAGED,
        "first.q * params.shortcut_stride",
        "first.q * params.stride_w",
    ),
    "the shortcut's filter goes on where the first one's ends": (
        STAGED,
        "fetch(shortcut, c, c,",
        "fetch(shortcut, depth + c, c,",
    ),
    "the shortcut is padded": (
        STAGED,
        "first.p * params.shortcut_stride, 0, 0)",
        "first.p * params.shortcut_stride, 0, params.pad_h)",
    ),
    "the shortcut's slices are not counted": (STAGED, " + params.shortcut_channels / SLICE_CHANNELS", ""),
    "the shortcut is the first input again": (STAGED, "fetch(shortcut, c, c,", "fetch(factors, c, c,"),
    "pixels and filters take each other's place": (
        IN_MEMORY,
        "a = TRANSPOSED ? filters : pixels, b = TRANSPOSED ? pixels : filters",
        "a = pixels, b = filters",
    ),
}


wrong = wrong_programs_in_forms(host_source, MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program, config = wrong(mistake), MISTAKES[mistake][0]
    assert is_right(program.without_mistake, config, PLAIN, seed=0)
    assert not all(is_right(program, config, problem, seed) for seed in range(6) for problem in SHAPES.values())
