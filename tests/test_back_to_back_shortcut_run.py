"""What conv2d_wgmma_b2b computes with a shortcut instead of a residual: its own text, run on the host in many orders
(see `back_to_back_host`)."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from back_to_back_host import host_source, run
from helpers import ConvCase, torch_conv2d
from test_back_to_back_run import PLAIN, convolution, drawn, in_precision_of, to_bfloat16, to_tf32
from wgmma_host import COMPILER, Program, programs, wrong_programs

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import configurations

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FORMS: dict[str, dict[str, Any]] = {
    f"{'TF32 ' * (config.precision == 'tf32')}{config}": config.defines()
    for config in configurations()
    if config.precision != "fp16" and config.shortcut_channels
}
WIDE, NARROW = FORMS["192×64 and 64, 6 and 7 stages"], FORMS["64×64 and 64, 10 and 17 stages"]
FORMS["few stages"] = {**WIDE, "PIXEL_STAGES": 2, "FILTER_STAGES": 3}
FORMS["filters stay"] = {**NARROW, "PIXEL_STAGES": 6, "FILTER_STAGES": 21}
FORMS["a deep shortcut, nothing behind"] = {**NARROW, "MIDDLE": 128, "SHORTCUT": 256, "NEXT": 0, "FILTER_STAGES": 7}
FORMS["two consumers"] = {**FORMS["a deep shortcut, nothing behind"], "TILE_M": 128, "PIXEL_STAGES": 3, "NEXT": 128}
FORMS["TF32, nothing behind"] = {
    **FORMS["TF32 192×64 and 64, 5 and 7 stages"],
    "PIXEL_STAGES": 4,
    "NEXT": 0,
    "FILTER_STAGES": 8,
}

SHAPES = {  # the first, filters of the second, step of the shortcut
    "3×3": (PLAIN, 256, 1),
    "of all second pixels": (replace(PLAIN, H=10, stride_h=2, stride_w=2), 128, 2),
    "one slice, many tiles": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, N=9), 384, 1),
    "of all third pixels": (replace(PLAIN, stride_h=2, stride_w=3, N=11), 128, 3),
    "full tiles": (replace(PLAIN, N=2, H=8, W=16), 128, 1),
}


program = programs(host_source, FORMS)


def pair_of(form: dict[str, Any], shape: str) -> Conv2dPair:
    """With as many filters and channels as the form has."""
    first, K, stride = SHAPES[shape]
    first = in_precision_of(form, first)
    return Conv2dPair(first, K, form["SHORTCUT"], stride, form["NEXT"])


def of_shortcut(problem: Conv2dProblem, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Its part of the sums, not rounded."""
    none = {"bias": None, "residual": None}
    return torch_conv2d({"x": x, "weight": weight, **none}, ConvCase(problem, relu=False).arguments)


def is_right(program: Program, pair: Conv2dPair, seed: int) -> bool:
    draw = random.Random(seed)
    first, second, third = pair.first, pair.second, pair.third
    plain = second.without_shortcut()
    alone = second.shortcut_alone()
    if draw.random() < 0.5:  # there need not be rows and columns behind the last that an output wants
        N, H, W, C = alone.input_shape
        alone = second.shortcut_alone((N, H - alone.stride_h + 1, W - alone.stride_w + 1, C))
    generator = np.random.default_rng(seed + 1)

    def few(shape: tuple[int, ...], count: int) -> np.ndarray:
        """Powers of two, so that products have no more bits than what is multiplied."""
        return generator.choice([-2, -1, 1, 2], shape).astype(np.float32) * (
            generator.random(shape) < count / shape[-1]
        )

    arrays = {
        **drawn(first, plain, seed),
        "x0": generator.integers(-9, 10, alone.input_shape).astype(np.float32),
        "shortcut": few(alone.filter_shape, 4),
    }
    if third is not None:
        arrays["next"] = few(third.filter_shape, 4)
        arrays["next_bias"] = generator.integers(-9, 10, third.K).astype(np.float32)
    biases = draw.random() < 0.7
    relus = draw.choice([(True, True, True), (False, True, True), (True, False, True), (True, True, False)])
    first_bias, second_bias = (arrays[name] if biases else None for name in ("first_bias", "second_bias"))
    middle = convolution(first, arrays["x"], arrays["first"], first_bias, None, relus[0])
    rounded = to_tf32(middle) if first.precision == "tf32" else middle
    arguments = {"x": rounded, "weight": arrays["second"], "bias": second_bias}
    y = torch_conv2d(
        {**arguments, "residual": of_shortcut(alone, arrays["x0"], arrays["shortcut"])},
        ConvCase(plain, relu=relus[1]).arguments,
    )
    expected = [y if first.precision == "tf32" else to_bfloat16(y)]
    if third is not None:
        bias = arrays["next_bias"] if biases else None
        expected.append(convolution(third, expected[0], arrays["next"], bias, None, relus[2]))
    options = {"biases": biases, "in_place": False, "relus": relus if third is not None else relus[:2]}
    outputs = run(program, first, second, arrays, seed=seed, grid=draw.choice([1, 2, 5]), **options)
    if isinstance(outputs, str):
        return False
    return all(np.array_equal(output, right) for output, right in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_shortcut_is_added(program: Callable[[str], Program], form: str, shape: str) -> None:
    seed = list(SHAPES).index(shape) + list(FORMS).index(form)
    assert is_right(program(form), pair_of(FORMS[form], shape), seed)


MISTAKES = {
    "its pixels are not waited for": ("wait_until_full(barriers.shortcut, consumer.shortcut)", ""),
    "its pixels are given back before they have been read": (
        "consumer.shortcut);\n",
        "consumer.shortcut), consumer.release_shortcut();\n",
    ),
    "its pixels are looked for in the phase before": ("shortcut.next(1);\n    }\n    // Gives", "}\n    // Gives"),
    "its step": ("begin.q * second.shortcut_stride", "begin.q"),
    "its channels": ("maps.added, full, i * SLICE, begin.q", "maps.added, full, 0, begin.q"),
    "the other consumer's pixels": ("operand(work.staying + number * CONSUMER_BYTES)", "operand(work.staying)"),
    "its channels are multiplied in the wrong order": ("behind / STEPS * PIXEL_BYTES", "0 * PIXEL_BYTES"),
    "the second's filter twice": ("of_shortcut ? maps.shortcut : maps.second", "maps.second"),
    "its filter's depth": ("of_shortcut ? depth - MIDDLE :", "of_shortcut ? 0 :"),
    "what results leave from is not empty": ("SHORTCUT ? 0 : PIXEL_BYTES", "PIXEL_BYTES"),
    "only the second's filters are given back": ("stage < SECOND_STAGES; ++stage", "stage < SLICES; ++stage"),
}


def form_for(mistake: str) -> dict[str, Any]:
    if "filters are given back" in mistake or "order" in mistake or "its channels" in mistake:
        return FORMS["a deep shortcut, nothing behind"]
    return FORMS["two consumers"]


wrong = wrong_programs(host_source, MISTAKES, form_for)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program = wrong(mistake)
    pairs = [pair_of(form_for(mistake), shape) for shape in SHAPES]
    assert is_right(program.without_mistake, pairs[0], seed=0)
    assert not all(is_right(program, pair, seed) for seed in range(4) for pair in pairs)
