"""What conv2d_wgmma_b2b computes where two blocks share a tile: its own text, run on the host in many orders (see
`back_to_back_host`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from back_to_back_host import host_source
from test_back_to_back_run import PLAIN, is_right
from wgmma_host import COMPILER, Program, programs, wrong_programs

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.back_to_back import configurations

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FORMS: dict[str, dict[str, Any]] = {
    str(config): config.defines()
    for config in configurations()
    if config.precision != "fp16" and config.cluster_size > 1
}
WIDE = FORMS["192×256, 4 and 5 stages, 2 blocks a tile"]
FORMS["few stages"] = {**WIDE, "TILE_M": 128, "PIXEL_STAGES": 2, "FILTER_STAGES": 4}
FORMS["64 channels each"] = {**WIDE, "TILE_M": 128, "MIDDLE": 64, "FILTER_STAGES": 6}
FORMS["one consumer"] = {**FORMS["64 channels each"], "TILE_M": 64}
FORMS["TF32"] = {**FORMS["one consumer"], "ELEMENT": "float", "FILTER_STAGES": 8}

SHAPES = {
    "3×3": (PLAIN, 256),
    "1×1": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0), 768),
    "one slice, many tiles": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, N=9), 256),
    "strides": (replace(PLAIN, stride_h=2, stride_w=3, N=11), 256),
    "one pixel": (replace(PLAIN, N=1, H=1, W=1), 512),
    "full tiles": (replace(PLAIN, N=2, H=8, W=16), 256),
}


program = programs(host_source, FORMS)


def of_form(form: dict[str, Any], first: Conv2dProblem) -> Conv2dProblem:
    """With as many filters as both blocks have."""
    precision = "tf32" if form["ELEMENT"] == "float" else "bf16"
    return replace(first, K=form["CLUSTER"] * form["MIDDLE"], precision=precision)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_exact_on_integers(program: Callable[[str], Program], form: str, shape: str) -> None:
    first, K = SHAPES[shape]
    for seed in range(2):
        assert is_right(program(form), of_form(FORMS[form], first), K, seed=2 * list(SHAPES).index(shape) + seed)


# Of the kernel's text.
WRITTEN = "            written_for_storing();\n            warpgroup_sync(1 + number);\n            if"
ACKNOWLEDGED = "i < MIDDLE / SLICE; ++i) {\n                const int stage"

MISTAKES = {
    "what comes is not waited for": ("        barrier_wait(received, sent);\n", ""),
    "what comes is looked for in the phase before": ("sent ^= 1;", ""),
    "it is sent before the other has read": ("barrier_wait(shared_address(&barriers.may_send[number]), sent ^ 1);", ""),
    "the other is never let go on": ("consumer.end_exchange();", "consumer.sent ^= 1;"),
    "the other's stages are given back too early": ("        if (elected) {  // what has", "        {  // what has"),
    "one's own are never given back": (ACKNOWLEDGED, ACKNOWLEDGED.replace("MIDDLE / SLICE", "0")),
    "too few bytes are expected": ("MIDDLE / SLICE * CONSUMER_BYTES);", "CONSUMER_BYTES);"),
    "sent before all have written": (WRITTEN, WRITTEN.replace("warpgroup_sync(1 + number);", "")),
    "sent before it is visible": (WRITTEN, WRITTEN.replace("written_for_storing();", "")),
    "the wrong slice is sent": ("work.staying + slice * PIXEL_BYTES + number", "work.staying + number"),
    "the other consumer's place": ("slice * PIXEL_BYTES + number * CONSUMER_BYTES;", "slice * PIXEL_BYTES;"),
    "rows of what is sent are exchanged": (
        "static_cast<unsigned>(operand[0]), static_cast<unsigned>(operand[0] >> 32)",
        "static_cast<unsigned>(operand[0] >> 32), static_cast<unsigned>(operand[0])",
    ),
    "both blocks have the same filters": ("full, depth, work.rank() * MIDDLE);", "full, depth, 0);"),
    "both have the same columns": ("work.rank() * columns;\n            for", "0;\n            for"),
    "the second filter in the other's order": ("depth ^ work.rank() * MIDDLE", "depth"),
    "the other's biases": ("first_bias + work.rank() * MIDDLE", "first_bias"),
    "nothing is left empty for what is sent": ("CLUSTER > 1 && i < MIDDLE / SLICE", "false"),
    "the other block is written to before it has begun": ("if (CLUSTER > 1) cluster_wait();", ""),
    "shared memory ends before the other block's": ("    if constexpr (CLUSTER > 1) end_cluster();\n}", "}"),
}  # fmt: skip


def form_for(mistake: str) -> dict[str, Any]:
    if "before the other has read" in mistake:
        return FORMS["one consumer"]
    return FORMS["few stages" if "slice" in mistake or "bytes" in mistake else "64 channels each"]


wrong = wrong_programs(host_source, MISTAKES, form_for)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    """So that what is found right means something."""
    program = wrong(mistake)
    cases = [(of_form(form_for(mistake), first), K) for first, K in SHAPES.values()]
    assert is_right(program.without_mistake, *cases[0], seed=0)
    assert not all(is_right(program, first, K, seed) for seed in range(4) for first, K in cases)
