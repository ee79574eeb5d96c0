"""How convolutions in fp32 cut their sums into parts, and what that saves, with NumPy in the place of the kernels."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wgmma_support import operands

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, fp32_variants
from cupy_resnet.conv2d.configs import IMPLICIT_GEMM, WINOGRAD, ImplicitGemmConfig, WinogradConfig
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.variants import NULL
from cupy_resnet.jit.sources import find_kernel

PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)


def implicit_gemm(problem: Conv2dProblem) -> list[ImplicitGemmConfig]:
    candidates = VARIANTS["conv2d_implicit_gemm"].candidates(problem, H100)
    return [config for config in candidates if isinstance(config, ImplicitGemmConfig)]


# Which configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("C", "in_parts"), [(4, False), (56, False), (60, True), (64, True), (512, True)])
def test_large_depths_are_summed_in_parts(C: int, in_parts: bool) -> None:
    assert {config.sum_slices > 0 for config in implicit_gemm(replace(PLAIN, C=C))} == {in_parts}


@pytest.mark.parametrize(("C", "K"), [(513, 64), (512, 66)])
def test_what_is_loaded_one_by_one_is_not(C: int, K: int) -> None:
    assert {(config.vector, config.sum_slices) for config in implicit_gemm(replace(PLAIN, C=C, K=K))} == {(1, 0)}


@pytest.mark.parametrize("config", [config for config in IMPLICIT_GEMM if config.sum_slices], ids=str)
def test_parts_take_registers_twice(config: ImplicitGemmConfig) -> None:
    assert config.thread_m * config.thread_n <= 64
    assert config.defines()["SUM_SLICES"] == config.sum_slices
    assert str(config).endswith(", summed by 128")
    assert str(replace(config, sum_slices=0)) == str(config).removesuffix(", summed by 128")


# Winograd's launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", WINOGRAD, ids=str)
@pytest.mark.parametrize("C", [1, 16, 128, 136, 144, 256, 512])
def test_each_channel_of_winograd_is_summed_in_one_launch(config: WinogradConfig, C: int) -> None:
    parts = config.channels_by_launch(C)
    assert [c for first, channels in parts for c in range(first, first + channels)] == list(range(C))
    if len(parts) > 1:
        assert all(first % config.chunk == channels % config.chunk == 0 for first, channels in parts)
        assert max(channels for _, channels in parts) == 128


def test_channels_that_fill_no_step_are_not_left_alone() -> None:
    assert WINOGRAD[0].channels_by_launch(520) == [(0, 520)]


@pytest.mark.parametrize(("C", "launches"), [(64, 1), (128, 1), (208, 2), (512, 4)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_later_launches_add_to_what_is_there(
    monkeypatch: pytest.MonkeyPatch, C: int, launches: int, residual: bool, relu: bool
) -> None:
    made: list[tuple[Any, ...]] = []
    jit = SimpleNamespace(
        get_function=lambda name, *, defines: name,
        launch=lambda kernel, grid, block, arguments, **options: made.append(arguments),
    )
    monkeypatch.setattr(fp32_variants, "jit", jit)
    variant, problem, config = VARIANTS["conv2d_winograd"], replace(PLAIN, C=C), WINOGRAD[0]
    x, transformed = np.zeros(problem.input_shape, np.float32), np.zeros(16 * 64 * C, np.float32)
    monkeypatch.setattr(variant, "transformed", lambda *_: transformed)
    variant.launch(problem, replace(operands(True, residual, relu), x=x), config)
    parts = config.channels_by_launch(C)
    assert len(made) == len(parts) == launches
    for (first, channels), arguments in zip(parts, made, strict=True):
        assert arguments[0].ctypes.data == x.ctypes.data + 4 * first
        assert arguments[1].ctypes.data == transformed.ctypes.data + 4 * 16 * 64 * first  # [C / 16][16][16][64]
        assert arguments[2:5] == ((NULL, "y", "y") if first else ("bias", "residual" if residual else NULL, "y"))
        assert arguments[5] == channels
        assert arguments[6].tobytes() == conv2d_params(problem, relu and first + channels == C).tobytes()
    text = find_kernel("conv2d_winograd").path.read_text(encoding="utf-8")
    declared = re.search(r"conv2d_winograd\((const float\*.*?)\) \{", text, re.S)
    assert declared
    names = [parameter.split()[-1].lstrip("*") for parameter in declared[1].split(",")]
    assert names == ["x", "transformed", "bias", "residual", "y", "channels", "params"]


# What it saves ------------------------------------------------------------------------------------------------------


def error(sums: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((sums - exact) ** 2) / np.mean(exact**2)))


def added_up(terms: np.ndarray, part: int) -> np.ndarray:
    """Sums of rows in float32, `part` terms apart before they are added to the total."""
    total = np.zeros(len(terms), np.float32)
    for first in range(0, terms.shape[1], part):
        partial = np.zeros(len(terms), np.float32)
        for i in range(first, min(first + part, terms.shape[1])):
            partial += terms[:, i]
        total += partial
    return total


@pytest.mark.parametrize(
    ("terms", "part", "gain"),
    [
        (4608, 128, 3.5),  # conv2d_implicit_gemm, 512 channels, 3×3
        (512, 128, 1.6),  # an element of Winograd's transformed tiles, of as many channels
        (576, 4, 1.8),  # products of 8 of the depth on tensor cores, four to a slice
    ],
)
def test_sums_in_parts_are_more_accurate(terms: int, part: int, gain: float) -> None:
    values = np.random.default_rng(0).standard_normal((1000, terms), np.float32)
    exact = values.astype(np.float64).sum(1)
    assert error(added_up(values, part), exact) * gain < error(added_up(values, terms), exact)
