"""What conv2d_wgmma multiplies where there is a shortcut: its producer's own text (see `wgmma_producer_host`)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_wgmma_split_k_run import drawn, expected_of
from wgmma_host import COMPILER, Program, ask, build, wrong_programs
from wgmma_producer_host import host_source, tensors

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PLAIN = Conv2dProblem(N=3, H=9, W=7, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1, precision="tf32")
SHAPES = {
    "no shortcut": PLAIN,
    "stride 1": replace(PLAIN, shortcut_channels=96),
    "stride 2": replace(PLAIN, shortcut_channels=32, shortcut_stride=2),
    "both stride": replace(PLAIN, stride_h=2, stride_w=3, shortcut_channels=32, shortcut_stride=3),
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, K=264, shortcut_channels=64, shortcut_stride=2),
    "one pixel": replace(PLAIN, N=1, H=1, W=1, shortcut_channels=64, shortcut_stride=2),
    "an image more than a tile": replace(PLAIN, N=2, H=16, W=17, shortcut_channels=32, shortcut_stride=2),
}
CONFIGS = {f"{c.tile_m}x{c.tile_n}": c for c in WGMMA if c.precision == "tf32"}


def is_right(program: Program, problem: Conv2dProblem, blocks: int, seed: int) -> bool:
    arrays = drawn(problem, seed)
    head = (blocks, *arrays["x0"].shape[1:3])
    y = ask(program, problem, head, tensors(arrays), relu=False)
    expected = expected_of(problem, arrays, bias=False, residual=False, relu=False)
    return not isinstance(y, str) and np.array_equal(y, expected)


@pytest.mark.parametrize("form", CONFIGS)
def test_it_multiplies_both_inputs(tmp_path: Path, form: str) -> None:
    assert COMPILER is not None
    program = build(COMPILER, tmp_path, host_source().text(), "program", CONFIGS[form].defines())
    for seed, (name, problem) in enumerate(SHAPES.items()):
        for blocks in (1, 3):
            assert is_right(program, problem, blocks, seed), (name, blocks)


MISTAKES = {
    "it steps as the first one does": ("first.q * params.shortcut_stride", "first.q * params.stride_w"),
    "its filter goes on where the first one's ends": ("fetch(shortcut, c, c,", "fetch(shortcut, depth + c, c,"),
    "it is padded": ("first.p * params.shortcut_stride, 0, 0)", "first.p * params.shortcut_stride, 0, params.pad_h)"),
    "its slices are not counted": (" + params.shortcut_channels / SLICE_CHANNELS", ""),
    "it is the first input again": ("fetch(shortcut, c, c,", "fetch(factors, c, c,"),
}


wrong = wrong_programs(host_source, MISTAKES, lambda _: CONFIGS["64x64"].defines())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(wrong: Callable[[str], Program], mistake: str) -> None:
    program = wrong(mistake)
    assert is_right(program.without_mistake, PLAIN, 3, seed=0)
    assert not all(is_right(program, problem, 3, seed) for seed, problem in enumerate(SHAPES.values()))
