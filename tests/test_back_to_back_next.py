"""conv2d_wgmma_b2b with a third convolution, the next bottleneck's first, without a GPU: what is solved, what the
kernel's file and the launch must agree on, and the launch itself (what it computes: test_back_to_back_next_run)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_back_to_back import PARAMETERS, PLAIN, named_operands
from wgmma_support import STATIC_SHARED, Gpus, assert_constants, collected_launches, two_gpus

from cupy_resnet.conv2d import H100, Conv2dPair, back_to_back
from cupy_resnet.conv2d.back_to_back import (
    BackToBackConfig,
    Following,
    back_to_back_candidates,
    configurations,
    launch_back_to_back,
    supports_back_to_back,
)
from cupy_resnet.conv2d.variants import NULL, Filter
from cupy_resnet.jit import compile_kernel

NAME = back_to_back.name
CONFIGS = [config for config in configurations() if config.next_channels and not config.shortcut_channels]
NAMES = [f"{config.precision} {config}" for config in CONFIGS]


def three(next_channels: int, **changes: Any) -> Conv2dPair:
    return Conv2dPair(replace(PLAIN, **changes), 256, following=next_channels)


@pytest.mark.parametrize(
    ("precision", "K", "next_channels"),
    [(precision, *sizes) for precision in ("fp16", "bf16", "tf32") for sizes in ((64, 64), (64, 128), (128, 128))],
)
def test_it_solves_what_begins_the_next_bottleneck(precision: str, K: int, next_channels: int) -> None:
    pair = three(next_channels, K=K, precision=precision)
    assert supports_back_to_back(pair, H100) == (True, "")
    candidates = back_to_back_candidates(pair, H100)
    assert candidates
    for config in candidates:
        assert (config.precision, config.mid_channels, config.next_channels) == (precision, K, next_channels)


@pytest.mark.parametrize(
    ("K", "next_channels", "precision", "why_not"),
    [
        (64, 256, "fp16", "goes on with 64 or 128 filters behind 64 channels, not with 256"),
        (128, 64, "fp16", "goes on with 128 filters behind 128 channels, not with 64"),
        (128, 256, "fp16", "goes on with 128 filters behind 128 channels, not with 256"),
        (256, 256, "fp16", "goes on with a third convolution behind 64 or 128 channels, not behind 256"),
        (64, 256, "tf32", "goes on with 64 or 128 filters behind 64 channels, not with 256"),
        (256, 128, "tf32", "goes on with a third convolution behind 64 or 128 channels, not behind 256"),
    ],
)
def test_what_it_does_not_solve(K: int, next_channels: int, precision: str, why_not: str) -> None:
    pair = three(next_channels, K=K, precision=precision)
    assert supports_back_to_back(pair, H100) == (False, why_not)
    assert not back_to_back_candidates(pair, H100)
    assert back_to_back_candidates(pair.without_following(), H100)


def test_what_the_first_two_lack_is_said_first() -> None:
    pair = three(64, C=96)
    assert supports_back_to_back(pair, H100) == supports_back_to_back(pair.without_following(), H100)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_the_launch_agrees_with_the_kernels_constants(config: BackToBackConfig) -> None:
    pytest.importorskip("cupy")
    fixed: dict[str, Any] = {
        "THREADS": config.threads,
        "PIXEL_STAGES * PIXEL_BYTES + FILTER_STAGES * FILTER_BYTES": config.shared_memory,
        "PARTS * MIDDLE": config.next_channels,
        "FILTER_BYTES % 1024": 0,  # where a part of the next filter begins, the swizzle begins anew
    }
    assert_constants(NAME, config.defines(), fixed, f"sizeof(Barriers) <= {STATIC_SHARED}")


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_block_fits_an_h100(config: BackToBackConfig) -> None:
    assert config.shared_memory + STATIC_SHARED <= H100.shared_memory_per_block
    assert min(config.pixel_stages, config.filter_stages) >= 4
    steps = 9 + 4 * (1 + config.next_channels // config.mid_channels)  # of the narrowest bottleneck: its filters stay
    resident = config.filter_stages >= steps
    assert resident == (config.mid_channels == config.tile_m == 64 and config.precision != "tf32")


@pytest.fixture(scope="module")
def compiled() -> dict[BackToBackConfig, Any]:
    pytest.importorskip("cupy")
    return {config: compile_kernel(NAME, defines=config.defines(), arch="sm_90a") for config in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_instructions_overlap_and_registers_suffice(
    compiled: dict[BackToBackConfig, Any], config: BackToBackConfig
) -> None:
    log, used = compiled[config].entry.log, compiled[config].resources[NAME]
    assert "serialized" not in log
    assert "injected" not in log
    assert not used.spills
    assert used.shared_memory <= STATIC_SHARED
    assert used.registers * config.threads <= 65536


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with two_gpus(monkeypatch) as fake:
        yield fake


@pytest.fixture
def launches(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return collected_launches(monkeypatch, back_to_back, ("im2col_map", "matrix_map"))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize(("bias", "relu"), [("c", True), (None, False)])
def test_the_launch(launches: list[tuple[Any, ...]], config: BackToBackConfig, bias: Any, relu: bool) -> None:
    pair = three(config.next_channels, K=config.mid_channels, precision=config.precision)
    following = Following(Filter("next", {NAME: "next"}), bias, relu, "z")  # type: ignore[arg-type]
    operands = named_operands(("a", "b"), (True, False))._replace(following=following)
    launch_back_to_back(pair, operands, config)
    ((kernel, _, block, arguments, options),) = launches
    assert kernel == (NAME, config.defines())
    assert block == (config.threads,)
    assert options == {"shared": config.shared_memory, "waits": True}
    given = dict(zip(PARAMETERS, arguments, strict=True))
    assert given["next_filters"] == ("matrix_map", pair.third, "next", 256, config.mid_channels)
    assert given["next_outputs"] == ("matrix_map", pair.third, "z", config.next_channels, 64, ("factor", False))
    assert given["outputs"] == ("matrix_map", pair.second, "y", 256, 64, ("factor", False))
    assert (given["first_bias"], given["second_bias"]) == ("a", "b")
    assert given["next_bias"] == (NULL if bias is None else bias)
    assert isinstance(given["next_relu"], np.int32)
    assert given["next_relu"] == relu
