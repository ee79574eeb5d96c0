"""What conv2d_wgmma_b2b computes: its own text, run on the host in many orders (see `back_to_back_host`)."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from back_to_back_host import host_source, run
from helpers import ConvCase, torch_conv2d
from wgmma_host import COMPILER, Defines, Program, programs, wrong_programs

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import BackToBackConfig, configurations

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=9, W=7, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="bf16")
SHAPES = {
    "3×3": (PLAIN, 256),
    "few columns": (PLAIN, 128),
    "1×1": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0), 384),
    "one slice, many tiles": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, N=9), 128),
    "uneven strides": (replace(PLAIN, stride_h=2, stride_w=3, N=11), 128),
    "dilation": (replace(PLAIN, dilation_h=2, pad_w=2, N=5), 128),
    "one pixel": (replace(PLAIN, N=1, H=1, W=1), 256),
    "large padding": (replace(PLAIN, N=2, H=3, W=5, pad_h=4, pad_w=3, C=128), 128),
    "full tiles": (replace(PLAIN, N=2, H=8, W=16), 256),
}


def form_name(config: BackToBackConfig) -> str:
    """Of one that is tested."""
    sizes = [config.tile_m, config.mid_channels, *([config.next_channels] if config.next_channels else [])]
    columns = "" if config.columns == 64 else f", {config.columns} columns"
    return f"{'TF32 ' * (config.precision == 'tf32')}{'x'.join(map(str, sizes))}{columns}"


FORMS = {
    form_name(config): config.defines()
    for config in configurations()
    if config.precision != "fp16" and config.next_channels == config.shortcut_channels == 0 and config.cluster_size == 1
}
NARROW: Defines = {**FORMS["128x128"], "MIDDLE": 64, "FILTER_STAGES": 13}
FORMS["few_stages"] = {**NARROW, "PIXEL_STAGES": 2, "FILTER_STAGES": 2}
FORMS["few_filters"] = {**NARROW, "PIXEL_STAGES": 5, "FILTER_STAGES": 3}
FORMS["few_pixels"] = {**FORMS["64x128"], "PIXEL_STAGES": 2, "FILTER_STAGES": 7}
FORMS["TF32, few stages"] = {**FORMS["TF32 192x64"], "PIXEL_STAGES": 3, "FILTER_STAGES": 4}
FORMS["TF32, resident"] = {**FORMS["TF32 64x64"], "PIXEL_STAGES": 3, "FILTER_STAGES": 25}
"""Both filters of 1×1 have room."""


program = programs(host_source, FORMS)


def in_precision_of(form: Defines, first: Conv2dProblem) -> Conv2dProblem:
    """With as many filters as the form has."""
    precision = "tf32" if form["ELEMENT"] == "float" else "bf16"
    return replace(first, K=int(form["MIDDLE"]), precision=precision)


def drawn(first: Conv2dProblem, second: Conv2dProblem, seed: int) -> dict[str, np.ndarray]:
    """Integers: few of the second filter, so that most sums have the 8 bits of a bfloat16; larger ones for TF32, so
    that what is between two convolutions has to be rounded, and what is stored has not.
    """
    generator = np.random.default_rng(seed)
    most = 16 if first.precision == "tf32" else 1

    def integers(most: int, shape: tuple[int, ...]) -> np.ndarray:
        return generator.integers(-most, most + 1, shape).astype(np.float32)

    few = generator.random(second.filter_shape) < 8 / first.K
    return {
        "x": integers(most, first.input_shape),
        "first": integers(most, first.filter_shape),
        "second": integers(1, second.filter_shape) * few,
        "first_bias": integers(9, (first.K,)),
        "second_bias": integers(9, (second.K,)),
        "residual": integers(99, second.output_shape),
    }


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as float32."""
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def to_tf32(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, halves away from zero, as float32."""
    return ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def convolution(
    problem: Conv2dProblem,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    relu: bool,
) -> np.ndarray:
    rounded = to_tf32(x) if problem.precision == "tf32" else x
    y = torch_conv2d(
        {"x": rounded, "weight": weight, "bias": bias, "residual": residual}, ConvCase(problem, relu=relu).arguments
    )
    return y if problem.precision == "tf32" else to_bfloat16(y)


def is_right(program: Program, first: Conv2dProblem, K: int, seed: int) -> bool:
    draw = random.Random(seed)
    second = Conv2dPair(first, K).second
    arrays = drawn(first, second, seed)
    biases, in_place = draw.random() < 0.7, draw.random() < 0.5
    relus = draw.choice([(True, True), (True, True), (False, True), (True, False)])
    first_bias, second_bias = (arrays[name] if biases else None for name in ("first_bias", "second_bias"))
    middle = convolution(first, arrays["x"], arrays["first"], first_bias, None, relus[0])
    expected = convolution(second, middle, arrays["second"], second_bias, arrays["residual"], relus[1])
    options = {"biases": biases, "in_place": in_place, "relus": relus, "backwards": draw.random() < 0.5}
    outputs = run(program, first, second, arrays, seed=seed, grid=draw.choice([1, 2, 5]), **options)
    return not isinstance(outputs, str) and np.array_equal(outputs[0], expected)


def seed_of(shape: str, form: str, forms: Iterable[str]) -> int:
    """One for each case: it also draws the grid, ReLUs, biases, and whether the output lies in the residual's place."""
    return list(SHAPES).index(shape) + list(forms).index(form)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_exact_on_integers(program: Callable[[str], Program], shape: str, form: str) -> None:
    first, K = SHAPES[shape]
    assert is_right(program(form), in_precision_of(FORMS[form], first), K, seed=seed_of(shape, form, FORMS))


# Of the kernel's text: a wait up to the indentation of the next line.
FULL_PIXELS = "wait_until_full(barriers.pixels, pixel);\n"
LEAVES = "#pragma unroll\n            for (int first = 0;"
FULL_FILTERS = "wait_until_full(barriers.filters, filter);\n"

MISTAKES = {
    "the input is not waited for": (f"{FULL_PIXELS}            const", "            const"),
    "the first filter is not waited for": (f"{FULL_FILTERS}            wait", "            wait"),
    "the second filter is not waited for": (f"{FULL_FILTERS}            b[i]", "            b[i]"),
    "the residual is not waited for": (f"{FULL_PIXELS}{LEAVES}", LEAVES),
    "the sums are not waited for": ("warpgroup_wait<PENDING>();", "warpgroup_wait<PENDING + 1>();"),
    "a slice is given back before it has been read": ("warpgroup_wait<1>();", "warpgroup_wait<2>();"),
    "one consumer gives back for both": ("&ring.empty[stage]), readers);", "&ring.empty[stage]), 1);"),
    "the producer does not wait": ("barrier_wait(shared_address(&ring.empty[place.stage]), place.parity);", ""),
    "a stage is filled while it is stored from": ("store_wait<PENDING>();", ""),
    "the last stage stored from is kept": ("if (slice == 0 && elected) release_stored<0>();", ""),
    "a stage is never given back": ("stored = pixel.stage;", "stored = -1;"),
    "the wrong filter is given back": ("release(barriers.filters, oldest);", "release(barriers.filters, 0);"),
    "stored before all have written": ("        warpgroup_sync(1 + number);\n        if", "        if"),
    "stored before it is visible": ("written_for_storing();\n        warp", "warp"),
    "the last is not stored": ("if (consumer.elected) store_wait<0>();", ""),
    "rows are not swizzled": ("(lane / 16 ^ lane % 8) * 16", "lane / 16 * 16"),
    "columns of the middle are exchanged": ("operand[half] =", "operand[1 - half] ="),
    "rows of the middle are exchanged": (
        "low = words[half * 2], high = words[half * 2 + 1]",
        "low = words[half * 2 + 1], high = words[half * 2]",
    ),
    "the wrong slice of the second filter": ("at / STEPS * SECOND_BOX_BYTES", "0 * SECOND_BOX_BYTES"),
    "the other consumer's rows are stored": ("k, m0 + number * 64);", "k, m0);"),
    "resident filters are fetched again": ("!work.resident || tile == work.turns.first", "true"),
    "resident filters are looked for further on": ("if (work.resident) consumer.filter = {0, 0};", ""),
    "the first's ReLU is the second's": ("nullptr, first_floor", "nullptr, second_floor"),
    "TF32: what is between two is not rounded": ("low = round_to_tf32(low), high = round_to_tf32(high);", ";"),
    "TF32: one stage for both slices": ("b[step / IN_STAGE] + offset", "b[0] + offset"),
    "TF32: only one stage is given back": ("stage < SECOND_STAGES; ++stage) release", "stage < 1; ++stage) release"),
    "TF32: the second slice takes the first one's place": ("maps.outputs, k + slice * SLICE,", "maps.outputs, k,"),
    "TF32: the first residual comes twice": ("maps.added, full, k + slice * SLICE,", "maps.added, full, k,"),
    "TF32: the second filter's first depth comes twice": ("column + i * SLICE", "i * SLICE"),
    "TF32: sums of neighbours": ("sums[matrix % 2 * 2 + matrix / 2]", "sums[matrix]"),
    "TF32: biases of neighbours": ("make_float2(first[0], first[4])", "make_float2(first[0], first[1])"),
}  # fmt: skip


def form_for(mistake: str) -> Defines:
    if "resident" in mistake:
        return NARROW
    name, stages = ("TF32 64x128", 4) if "TF32" in mistake else ("128x128", 3)
    return {**FORMS[name], "PIXEL_STAGES": 3, "FILTER_STAGES": stages}


wrong = wrong_programs(host_source, MISTAKES, form_for)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program = wrong(mistake)
    cases = [(in_precision_of(form_for(mistake), first), K) for first, K in SHAPES.values()]
    assert is_right(program.without_mistake, *cases[0], seed=0)
    assert not all(is_right(program, first, K, seed) for seed in range(4) for first, K in cases)
