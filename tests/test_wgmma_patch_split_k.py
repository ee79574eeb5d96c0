"""conv2d_wgmma_patch_split_k without a GPU: where it is offered, and what its file and the launch agree on."""

import re
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np
import pytest
from tuning_support import assert_split_k_is_expected_to_win, assert_tables_tell_split_k_apart
from wgmma_support import STATIC_SHARED, assert_constants, collected_launches, operands, parameters, two_gpus

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, wgmma_patch
from cupy_resnet.conv2d.configs import WGMMA_PATCH, WGMMA_PATCH_SPLIT_K, WgmmaPatchConfig
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.wgmma_patch import PatchTile, patch_tile
from cupy_resnet.jit import launching
from cupy_resnet.jit.sources import find_kernel
from cupy_resnet.kernels import configurations

VARIANT = VARIANTS["conv2d_wgmma_patch"]
KERNEL = "conv2d_wgmma_patch_split_k"
DEEP = Conv2dProblem(N=8, H=7, W=7, C=512, K=512, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
LIMIT = H100.shared_memory_per_block


def split(problem: Conv2dProblem) -> list[WgmmaPatchConfig]:
    candidates = VARIANT.candidates(problem, H100)
    return [config for config in candidates if isinstance(config, WgmmaPatchConfig) and config.cluster]


def tile_in(problem: Conv2dProblem, config: WgmmaPatchConfig) -> PatchTile:
    tile = patch_tile(problem, config.pixels, LIMIT, config.split_k_slices)
    assert tile is not None
    return tile


def test_its_forms_are_those_of_its_own_file() -> None:
    assert VARIANT.configurations() == WGMMA_PATCH + WGMMA_PATCH_SPLIT_K
    assert configurations(KERNEL) == [config.defines() for config in WGMMA_PATCH_SPLIT_K]
    assert {config.precision for config in WGMMA_PATCH_SPLIT_K} == set(VARIANT.precisions)
    assert find_kernel(KERNEL).min_arch_of({}) == "sm_90a"
    for config in VARIANT.configurations():
        assert isinstance(config, WgmmaPatchConfig)
        shared = config in WGMMA_PATCH_SPLIT_K
        assert VARIANT.sources_of(config) == (config.source,) == (("conv2d_wgmma_patch", KERNEL)[shared],)
        assert ("split-K" in str(config)) == config.cluster == shared


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_it_is_offered_where_there_are_few_tiles(precision: str) -> None:
    deep, channels = replace(DEEP, precision=precision), WgmmaPatchConfig(precision, 64).channels
    assert {config.split_k_slices for config in split(deep)} == {2, 4, 8}
    assert {config.split_k_slices for config in split(replace(deep, C=3 * channels))} == {2}
    assert not split(replace(deep, C=channels))
    assert not split(replace(deep, N=256))
    assert not split(replace(deep, K=508))
    for problem in (deep, replace(deep, N=1), replace(deep, N=32), replace(deep, H=56, W=56, C=128, K=128, N=1)):
        assert split(problem)
        for config in split(problem):
            tiles = tile_in(problem, config).pixel_tiles * -(-problem.K // 64)
            assert tiles * config.split_k_slices <= H100.sm_count
            assert config.split_k_slices <= problem.C // channels


def test_it_is_expected_to_win_where_tiles_are_few() -> None:
    for problem in (DEEP, replace(DEEP, N=1), replace(DEEP, N=1, H=14, W=14, C=256, K=256)):
        assert_split_k_is_expected_to_win("conv2d_wgmma_patch", problem)


def test_tables_name_it_and_older_tables_mean_the_other_kernel() -> None:
    assert_tables_tell_split_k_apart("conv2d_wgmma_patch", DEEP)


@pytest.mark.parametrize("config", WGMMA_PATCH_SPLIT_K, ids=lambda config: f"{config.precision} {config}")
def test_the_launch_agrees_with_the_kernels_constants(config: WgmmaPatchConfig) -> None:
    pytest.importorskip("cupy")
    fixed = {
        "THREADS": config.threads,
        "CONSUMERS": config.CONSUMERS,
        "PATCHES": config.PATCHES,
        "MAX_STAGES": config.max_stages,
        "ROW_BYTES": config.ROW_BYTES,
        "FILTERS": config.FILTERS,
        "SLICE_CHANNELS": config.channels,
        "Received::BYTES": tile_in(replace(DEEP, N=64, precision=config.precision), config).sum_bytes,
        "SHARE * SPLIT_K_CLUSTER": config.pixels,
        "sizeof(PatchTile)": 4 * len(fields(PatchTile)),
    }
    assert_constants(KERNEL, config.defines(), fixed, f"sizeof(Barriers) <= {STATIC_SHARED}")


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_a_block_has_room_for_what_it_needs_and_no_more(precision: str) -> None:
    for size in (1, 7, 14, 28, 56):
        for taps in (1, 3, 5):
            for C in (64, 128, 512):
                shape = {"H": size, "W": size, "C": C, "precision": precision, "K": 64, "R": taps, "S": taps}
                problem = replace(DEEP, **shape, pad_h=taps // 2, pad_w=taps // 2)
                for config in split(problem):
                    tile = tile_in(problem, config)
                    needed = -(-C // config.channels // config.split_k_slices) * taps**2
                    assert min(3, needed) <= tile.num_stages <= min(needed, config.max_stages)
                    assert tile.sum_bytes == 64 * 4 * config.pixels
                    places = 2 * tile.patch_bytes + tile.num_stages * 64 * 128 + tile.sum_bytes
                    assert tile.shared_memory == places <= LIMIT - STATIC_SHARED
                    assert tile.box_bytes < tile.patch_bytes or taps == 1
                    # What the last tap reads, some of it for nobody, ends before shared memory does.
                    read = ((taps - 1) * (tile.columns + 1) + config.pixels) * 128
                    assert tile.patch_bytes + read <= tile.shared_memory


def test_the_kernel_takes_its_parameters_in_the_launches_order(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = parameters(KERNEL)
    names = ["pixels", "filters", "bias", "residual", "y", "shape", "params"]
    assert [parameter.split()[-1] for parameter in declared] == names
    assert all(re.match(r"const __grid_constant__ TensorMap \w+$", parameter) for parameter in declared[:2])
    made: list[tuple[Any, ...]] = collected_launches(monkeypatch, wgmma_patch, ("tensor_map", "matrix_map"))
    (config,) = [c for c in split(DEEP) if (c.pixels, c.split_k_slices) == (256, 8)]
    with two_gpus(monkeypatch, wgmma_patch._shared_limit_of):
        VARIANT.launch(DEEP, operands(True, True), config)
    ((kernel, grid, block, arguments, options),) = made
    tile = tile_in(DEEP, config)
    assert (tile.images, tile.rows, tile.pixel_tiles, tile.num_stages) == (4, 7, 2, 9)
    assert kernel == (KERNEL, config.defines())
    assert (grid, block) == ((2 * 8, 1, 8), (320,))  # 8 images, 512 filters
    assert options == {"shared": tile.shared_memory, "waits": True}
    given = dict(zip(names, arguments, strict=True))
    assert given["pixels"] == ("tensor_map", DEEP, "x", (8, 8, 4))
    assert given["filters"] == ("matrix_map", DEEP, "weight", 9 * 512, 64)
    assert [given[name] for name in names[2:5]] == ["bias", "residual", "y"]
    assert given["params"] is conv2d_params(DEEP, True)
    assert bytes(launching._as_bytes(given["shape"])) == np.array(astuple(tile), np.int32).tobytes()
