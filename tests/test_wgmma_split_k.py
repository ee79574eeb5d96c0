"""conv2d_wgmma_split_k without a GPU: where it is offered, its names, and what its file and the launch agree on."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tuning_support import assert_split_k_is_expected_to_win, assert_tables_tell_split_k_apart
from wgmma_support import STATIC_SHARED, assert_constants, operands, parameters

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, tensor_core_variants, tensor_maps
from cupy_resnet.conv2d.configs import WGMMA, WGMMA_SPLIT_K, WgmmaConfig
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.tensor_core_variants import tile_count
from cupy_resnet.jit.sources import find_kernel
from cupy_resnet.kernels import configurations

VARIANT = VARIANTS["conv2d_wgmma"]
KERNEL = "conv2d_wgmma_split_k"
DEEP = Conv2dProblem(N=8, H=7, W=7, C=512, K=512, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")


def split(problem: Conv2dProblem) -> list[WgmmaConfig]:
    candidates = VARIANT.candidates(problem, H100)
    return [config for config in candidates if isinstance(config, WgmmaConfig) and config.split_k_slices > 1]


def test_its_forms_are_those_of_its_own_file() -> None:
    assert VARIANT.configurations() == WGMMA + WGMMA_SPLIT_K
    assert configurations(KERNEL) == [config.defines() for config in WGMMA_SPLIT_K]
    assert configurations("conv2d_wgmma") == [config.defines() for config in WGMMA]
    assert {config.precision for config in WGMMA_SPLIT_K} == set(VARIANT.precisions)
    assert find_kernel(KERNEL).min_arch_of({}) == "sm_90a"
    for config in VARIANT.configurations():
        assert isinstance(config, WgmmaConfig)
        assert VARIANT.sources_of(config) == (config.source,) == (("conv2d_wgmma", KERNEL)[config.split_k_slices > 1],)
        assert ("split-K" in str(config)) == (config.split_k_slices > 1)


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_it_is_offered_where_there_are_few_tiles_and_a_large_depth(precision: str) -> None:
    deep = replace(DEEP, precision=precision)
    assert {config.split_k_slices for config in split(replace(deep, N=1))} == {2, 4, 8}
    assert {config.split_k_slices for config in split(deep)} >= {2, 4}
    assert not split(replace(deep, N=256))
    assert not split(replace(deep, R=1, S=1, pad_h=0, pad_w=0, C=64 if precision != "tf32" else 32))
    assert not split(replace(deep, K=508))
    for config in split(deep):
        assert tile_count(deep, config) * config.split_k_slices <= 2 * H100.sm_count
        assert deep.gemm_k // config.tile_k >= 2 * config.split_k_slices


def test_it_is_expected_to_win_where_tiles_are_few() -> None:
    for problem in (DEEP, replace(DEEP, N=32), replace(DEEP, H=14, W=14, C=256, K=256)):
        assert_split_k_is_expected_to_win("conv2d_wgmma", problem)


def test_tables_name_it_and_older_tables_mean_the_whole_depth() -> None:
    assert_tables_tell_split_k_apart("conv2d_wgmma", DEEP)


@pytest.mark.parametrize("config", WGMMA_SPLIT_K, ids=lambda config: f"{config.precision} {config}")
def test_the_launch_agrees_with_the_kernels_constants(config: WgmmaConfig) -> None:
    pytest.importorskip("cupy")
    fixed = {
        "THREADS": config.threads,
        "ROW_BYTES": config.ROW_BYTES,
        "SLICE_CHANNELS": config.tile_k,
        "NUM_STAGES * STAGE_BYTES + Received::BYTES": config.shared_memory,
        "STAGE_BYTES % 1024": 0,
        "PIXEL_BYTES % 1024": 0,
    }
    assert_constants(KERNEL, config.defines(), fixed, f"sizeof(Barriers) <= {STATIC_SHARED}")
    assert config.shared_memory + STATIC_SHARED <= H100.shared_memory_per_block


def test_two_blocks_of_the_smallest_form_fit_a_multiprocessor() -> None:
    smallest = min(WGMMA_SPLIT_K, key=lambda config: config.shared_memory)
    assert 2 * (smallest.shared_memory + STATIC_SHARED + 1024) <= 228 << 10


def test_the_kernel_takes_its_parameters_in_the_launches_order(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = parameters(KERNEL)
    names = ["pixels", "filters", "shortcut_pixels", "shortcut_filters", "bias", "residual", "y", "params"]
    assert [parameter.split()[-1] for parameter in declared] == names
    assert all(re.match(r"const __grid_constant__ TensorMap \w+$", parameter) for parameter in declared[:4])

    made: list[tuple[Any, ...]] = []
    jit = SimpleNamespace(
        get_function=lambda name, *, defines: (name, defines),
        launch=lambda kernel, grid, block, arguments, **options: made.append((kernel, grid, block, arguments, options)),
    )
    monkeypatch.setattr(tensor_core_variants, "jit", jit)
    for name in ("im2col_map", "matrix_map"):
        monkeypatch.setattr(tensor_maps, name, lambda *arguments, name=name: (name, *arguments))
    (config,) = [c for c in split(DEEP) if (c.tile_m, c.tile_n, c.split_k_slices) == (128, 64, 4)]
    VARIANT.launch(DEEP, operands(True, True), config)
    ((kernel, grid, block, arguments, options),) = made
    assert kernel == (KERNEL, config.defines())
    assert (grid, block) == ((4 * 8, 1, 4), (320,))  # 392 pixels, 512 filters
    assert options == {"shared": config.shared_memory, "waits": True}
    given = dict(zip(names, arguments, strict=True))
    assert given["pixels"] == ("im2col_map", DEEP, "x", 128)
    assert given["filters"] == ("matrix_map", DEEP, "weight", 9 * 512, 64)
    assert given["shortcut_pixels"] is given["shortcut_filters"] is tensor_maps.NONE
    assert [given[name] for name in names[4:7]] == ["bias", "residual", "y"]
    assert given["params"] is conv2d_params(DEEP, True)
