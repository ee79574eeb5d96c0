"""What conv2d_wgmma_b2b computes with a third convolution: its own text, run on the host in many orders (see
`back_to_back_host`)."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from back_to_back_host import host_source, run
from test_back_to_back_run import FULL_PIXELS, SHAPES, convolution, drawn, form_name, in_precision_of, seed_of
from wgmma_host import COMPILER, Program, programs, wrong_programs

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import configurations

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FORMS: dict[str, dict[str, Any]] = {
    form_name(config): config.defines()
    for config in configurations()
    if config.precision != "fp16" and config.next_channels and not config.shortcut_channels
}
TWO_CONSUMERS = {**FORMS["192x64x128"], "TILE_M": 128}
FORMS["few_stages"] = {**FORMS["192x64x64"], "PIXEL_STAGES": 2, "FILTER_STAGES": 2}
FORMS["few_filters"] = {**TWO_CONSUMERS, "PIXEL_STAGES": 4, "FILTER_STAGES": 3}
FORMS["few_pixels"] = {**FORMS["64x128x128"], "PIXEL_STAGES": 2, "FILTER_STAGES": 7}
FORMS["resident"] = {**TWO_CONSUMERS, "PIXEL_STAGES": 3, "FILTER_STAGES": 21}
FORMS["TF32, few stages"] = {**FORMS["TF32 128x64x64"], "PIXEL_STAGES": 3, "FILTER_STAGES": 4}
FORMS["TF32, few stages, few columns"] = {
    **FORMS["TF32 192x64x128, 32 columns"],
    "PIXEL_STAGES": 2,
    "FILTER_STAGES": 3,
}
FORMS["TF32, resident"] = {**FORMS["TF32 64x64x64"], "PIXEL_STAGES": 3, "FILTER_STAGES": 24}


program = programs(host_source, FORMS)


def is_right(program: Program, first: Conv2dProblem, K: int, next_channels: int, seed: int) -> bool:
    draw = random.Random(seed)
    _, second, third = Conv2dPair(first, K, following=next_channels).parts
    generator = np.random.default_rng(seed + 1)
    # Few, so that sums are small, and powers of two, so that products have no more bits than what is multiplied.
    few = generator.random(third.filter_shape) < 4 / K
    arrays = {
        **drawn(first, second, seed),
        "next": generator.choice([-2, -1, 1, 2], third.filter_shape).astype(np.float32) * few,
        "next_bias": generator.integers(-9, 10, next_channels).astype(np.float32),
    }
    biases, in_place = draw.random() < 0.7, draw.random() < 0.5
    relus = draw.choice([(True, True, True), (False, True, True), (True, False, True), (True, True, False)])
    expected = []
    x, given = arrays["x"], ((first, "first"), (second, "second"), (third, "next"))
    for (problem, name), relu in zip(given, relus, strict=True):
        bias = arrays[f"{name}_bias"] if biases else None
        x = convolution(problem, x, arrays[name], bias, arrays["residual"] if name == "second" else None, relu)
        expected.append(x)
    options = {"biases": biases, "in_place": in_place, "relus": relus, "backwards": draw.random() < 0.5}
    outputs = run(program, first, second, arrays, seed=seed, grid=draw.choice([1, 2, 5]), **options)
    if isinstance(outputs, str):
        return False
    return all(np.array_equal(output, right) for output, right in zip(outputs, expected[1:], strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_all_are_convolutions(program: Callable[[str], Program], form: str, shape: str) -> None:
    first, K = SHAPES[shape]
    first = in_precision_of(FORMS[form], first)
    assert is_right(program(form), first, K, FORMS[form]["NEXT"], seed=seed_of(shape, form, FORMS))


# Of the kernel's text, where results of the next convolution are finished.
LEAVES = "#pragma unroll\n            for (int j = 0; j < STEPS; ++j) {\n                unsigned words[4];"

MISTAKES = {
    "the next filter is not waited for": (
        "b[SLICES * PARTS];\n        next_filters(b);",
        "b[SLICES * PARTS];\n"
        "        for (auto& of : b) of = operand(work.filter_stage(filter.stage)), filter.next(FILTER_STAGES);",
    ),
    "stages for what leaves are not waited for": (f"{FULL_PIXELS}{LEAVES}", LEAVES),
    "no stages for what leaves": ("// nor into these\n            claim(barriers.pixels, pixel, 0);", ""),
    "products are not waited for": ("warpgroup_wait<0>();\n        do {", "warpgroup_wait<1>();\n        do {"),
    "only one filter is given back": ("while (elected && !work.resident && oldest != filter.stage);", "while (false);"),
    "what was finished is multiplied too late": ("work, filter, k - COLUMNS);", "work, filter, k);"),
    "the last of the next filter is missing": ("if (NEXT && with_filters) fetch_next", "if (false) fetch_next"),
    "columns are finished before they have been multiplied": (
        "wait_for_products();\n        warpgroup_results(sums);",
        "warpgroup_results(sums);",
    ),
    "TF32: what is finished is that of the first slice": ("to_operand(finished[step],", "to_operand(finished[j],"),
    "the wrong part": ("k + slice * SLICE, part * MIDDLE);", "k + slice * SLICE, 0);"),
    "TF32: the next filter's first slice comes twice": ("maps.next, full, k + slice * SLICE", "maps.next, full, k"),
    "TF32: a slice's stage is the other's": ("b[slice * PARTS + part] + step * 2", "b[part] + step * 2"),
    "the wrong sums": ("&sums[k / MIDDLE][k % MIDDLE / 2 +", "&sums[0][k % MIDDLE / 2 +"),
    "the second's ReLU": ("next_bias, next_floor);\n        } else", "next_bias, second_floor);\n        } else"),
    "filters fetched again": ("NEXT ? PARTS * SLICES : 0", "0"),
}  # fmt: skip


def form_for(mistake: str) -> dict[str, Any]:
    stages = {
        "PIXEL_STAGES": 2 if "leaves" in mistake else 3,
        "FILTER_STAGES": 14 if mistake == "filters fetched again" else 5,
    }
    return {**(FORMS["TF32 128x64x64"] if "TF32" in mistake else TWO_CONSUMERS), **stages}


wrong = wrong_programs(host_source, MISTAKES, form_for)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program = wrong(mistake)
    form = form_for(mistake)
    cases = [(in_precision_of(form, first), K) for first, K in SHAPES.values()]
    assert is_right(program.without_mistake, *cases[0], form["NEXT"], seed=0)
    assert not all(is_right(program, first, K, form["NEXT"], seed) for seed in range(4) for first, K in cases)
