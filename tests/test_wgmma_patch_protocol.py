"""Who waits for whom in conv2d_wgmma_patch: its own text, run on the host in many orders (see `wgmma_patch_host`).

That of 2-byte elements; in TF32, whose barriers are the same but for those of staged tiles, `test_wgmma_patch_run` has
it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace

import numpy as np
import pytest
from wgmma_host import COMPILER, Program, build, wrong_programs
from wgmma_patch_host import host_source, run

from cupy_resnet.conv2d import H100, Conv2dProblem
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.wgmma_patch import PatchTile, patch_tile

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PIXELS = 64
"""The program is compiled for; so few that maps of 7² pixels and more are cut."""

DEFINES = {"ELEMENT": "Half", "PIXELS": PIXELS, "ACCUMULATORS": 32}

PLAIN = Conv2dProblem(N=2, H=7, W=7, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    assert COMPILER is not None
    return build(COMPILER, tmp_path_factory.mktemp("host"), host_source().text(), "block", DEFINES)


def tile_of(problem: Conv2dProblem, num_stages: int) -> PatchTile:
    tile = patch_tile(problem, PIXELS, H100.shared_memory_per_block)
    assert tile is not None
    return replace(tile, num_stages=num_stages)


def words(seed: int, problem: Conv2dProblem, num_stages: int, grid: int, block: int, residual: bool) -> tuple[int, ...]:
    params = np.frombuffer(conv2d_params(problem, True).tobytes(), np.int32).tolist()
    return (seed, *astuple(tile_of(problem, num_stages)), *params, grid, block, int(residual))


def steps_of(
    problem: Conv2dProblem, num_stages: int, grid: int, block: int, residual: bool
) -> tuple[Iterator[str], ...]:
    """What each consumer must do, in order: the lines of the log."""
    p, tile = problem, tile_of(problem, num_stages)
    tiles_k = -(-p.K // 64)

    def steps(consumer: int) -> Iterator[str]:
        for number in range(block + consumer * grid, tile.pixel_tiles * tiles_k, 2 * grid):
            pixels, k = number // tiles_k, number % tiles_k * 64
            n, h = pixels // tile.row_tiles * tile.images, pixels % tile.row_tiles * tile.rows
            added = 0
            for c in range(0, p.C, 64):
                for tap in range(p.R * p.S):
                    row = tap // p.S * tile.columns + tap % p.S
                    for step in range(4):
                        patch = f"{c} {-p.pad_w} {h - p.pad_h} {n}"
                        yield f"mma {consumer} {added} {tap * p.C + c} {k} {step} {patch} {row} {step}"
                        added = 1
            if residual:
                yield from [f"residual {consumer} {k} 0 {h} {n}"] * (PIXELS // 16)
            yield f"store {consumer} {k} 0 {h} {n}"

    return steps(0), steps(1)


Case = tuple[Conv2dProblem, int, int, int, bool]
"""A problem, num_stages, gridDim.x, blockIdx.x, whether with a residual."""


def is_right(log: list[str], case: Case) -> bool:
    return log[-1] == "end" and all(
        [line for line in log if line.split()[1:2] == [str(consumer)]] == list(steps)
        for consumer, steps in enumerate(steps_of(*case))
    )


def assert_all_right(program: Program, cases: list[Case]) -> None:
    logs = run(program, [words(seed, *case) for seed, case in enumerate(cases)])
    for log, case in zip(logs, cases, strict=False):
        assert is_right(log, case), f"{log[-1]}: {case}"
    assert len(logs) == len(cases)


def drawn_case(draw: random.Random) -> Case:
    R, S = draw.choice([(1, 1), (3, 3), (3, 3), (1, 3), (5, 1)])
    problem = replace(
        PLAIN,
        N=draw.choice([1, 2, 3, 9]),
        H=draw.choice([1, 2, 7, 13]),
        W=draw.choice([1, 4, 7, 30]),
        C=draw.choice([64, 128, 192, 256, 320]),
        K=draw.choice([8, 64, 72, 200]),
        R=R,
        S=S,
        pad_h=R // 2,
        pad_w=S // 2,
    )
    tiles = tile_of(problem, 3).pixel_tiles * -(-problem.K // 64)
    grid = draw.randint(1, tiles) if draw.random() < 0.5 else min(tiles, 3)
    return problem, draw.randint(3, 16), grid, draw.randrange(grid), draw.random() < 0.5


def test_every_product_has_its_operands_in_any_order_of_events(program: Program) -> None:
    draw = random.Random(1)
    assert_all_right(program, [drawn_case(draw) for _ in range(300)])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5])
def test_few_tiles_with_every_number_of_stages(program: Program, tiles: int, residual: bool) -> None:
    """The whole filter stays where it has room: 9 slices of C = 64, 18 of 128 never, one for 1×1."""
    cases = []
    for num_stages in range(3, 17):
        for C in (64, 128, 192):
            for R in (1, 3):
                problem = replace(PLAIN, N=tiles, C=C, R=R, S=R, pad_h=R // 2, pad_w=R // 2)
                cases.append((problem, num_stages, 1, 0, residual))
    assert tile_of(cases[0][0], 3).pixel_tiles == tiles
    assert_all_right(program, cases)


MISTAKES = {
    "nobody waits for his turn": ("if (handed > 0) barrier_wait", "if (false) barrier_wait"),
    "a turn's other phase": ("(handed - 1) & 1", "handed & 1"),
    "the other consumer's slices are not passed over": (
        "if (!resident) stage.advance(others * slices % (2 * shape.num_stages), shape.num_stages);",
        "",
    ),
    "the other consumer's patches are not passed over": (
        "patch.advance(others * chunks % (2 * PATCHES), PATCHES);",
        "",
    ),
    "a slice is given back before it has been read": ("warpgroup_wait<1>();", "warpgroup_wait<2>();"),
    "the last patch is kept": ("patch_empty[previous_patch]));\n    }\n}", "patch_empty[0]));\n    }\n}"),
    "a resident filter is waited for again": ("resident ? 0 : stage.parity", "stage.parity"),
    "the filter is fetched for every tile": ("if (!resident || number == turns.first) fetch_taps", "fetch_taps"),
    "the tile before is still being stored": (
        "            store_wait();\n            if (residual)",
        "            if (residual)",
    ),
    "the residual is not waited for": ("barrier_wait(shared_address(&barriers.residual[consumer]), turn & 1);", ";"),
}


wrong = wrong_programs(host_source, MISTAKES, lambda _: DEFINES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program = wrong(mistake)
    draw = random.Random(2)
    cases = [(replace(PLAIN, N=7, C=C), stages, 1, 0, True) for C in (64, 192) for stages in (4, 9, 12)]
    cases += [drawn_case(draw) for _ in range(60)]
    assert_all_right(program.without_mistake, cases[:1])
    assert not all(is_right(run(program, [words(seed, *case)])[0], case) for seed, case in enumerate(cases))
