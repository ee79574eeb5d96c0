"""What a configuration is expected to cost: more for more work, and least where experience says."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cupy_resnet.conv2d import H100, PRECISIONS, VARIANTS, Conv2dProblem, choose
from cupy_resnet.conv2d.configs import (
    WGMMA,
    WGMMA_3XTF32,
    WGMMA_PATCH,
    ImplicitGemmConfig,
    MmaConfig,
    Wgmma3xTf32Config,
    WgmmaConfig,
    WgmmaPatchConfig,
)
from cupy_resnet.conv2d.cost_model import cost
from cupy_resnet.conv2d.heuristics import fastest

PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
LARGE = replace(PLAIN, N=256, H=56, W=56)
DEEP = replace(PLAIN, H=7, W=7, C=512, K=512)
"""ResNet's last stage: few pixels, gemm_k = 4608."""

TENSOR_CORES = [name for name, precision in PRECISIONS.items() if precision.tensor_cores]
FEWER = replace(H100, name="fewer multiprocessors", sm_count=72)
ALL = [
    (variant.name, precision)
    for variant in VARIANTS.values()
    for precision in variant.precisions
    if len(variant.configurations()) > 1 and variant.name != "im2col_sgemm"
]
"""Kernels with something to choose."""


OnHopper = WgmmaConfig | WgmmaPatchConfig | Wgmma3xTf32Config


def tile(problem: Conv2dProblem, kernel: str = "auto") -> ImplicitGemmConfig | MmaConfig | OnHopper:
    config = choose(problem, H100, kernel, use_tables=False).config
    assert isinstance(config, ImplicitGemmConfig | MmaConfig | OnHopper)
    return config


def area(problem: Conv2dProblem) -> int:
    """Outputs of a tile of the fastest kernel."""
    config = tile(problem)
    return config.pixels * config.FILTERS if isinstance(config, WgmmaPatchConfig) else config.tile_m * config.tile_n


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("size", "channels"), [(56, 64), (28, 128), (14, 256), (7, 512)])
def test_bigger_batches_get_bigger_tiles(size: int, channels: int, precision: str) -> None:
    layer = replace(PLAIN, H=size, W=size, C=channels, K=channels, precision=precision)
    areas = [area(replace(layer, N=N)) for N in (1, 16, 256)]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


@pytest.mark.parametrize(("variant", "precision"), ALL)
def test_the_predicted_time_is_positive_and_grows_with_the_work(variant: str, precision: str) -> None:
    for K in (64, 512):  # the latter for tiles of all widths
        large = replace(LARGE, K=K, precision=precision)
        for config in VARIANTS[variant].candidates(large, H100):
            costs = [cost(replace(large, N=N), H100, config) for N in (1, 64, 512)]
            assert 0 < costs[0] < costs[1] < costs[2], config
            assert cost(large, H100, config) < cost(replace(large, C=128), H100, config)
            assert cost(large, H100, config) <= cost(large, FEWER, config)


def costs_that_never_fall(config: Any, precision: str) -> Iterator[tuple[int, str, list[float]]]:
    """Yields (size of the image, what grows, costs as it does), all checked: for the batch, the filters, the depth."""
    problem = replace(PLAIN, C=256, K=256, precision=precision)
    for size in (1, 7, 14, 56):
        for changed, values in (("N", range(1, 66)), ("K", range(64, 1088, 64)), ("C", range(64, 1088, 64))):
            layer = replace(problem, H=size, W=size)
            costs = [cost(replace(layer, **{changed: value}), H100, config) for value in values]
            assert all(math.isfinite(value) and value > 0 for value in costs)
            assert costs == sorted(costs), (size, changed)
            yield size, changed, costs


@pytest.mark.parametrize("config", WGMMA, ids=lambda config: f"{config.precision} {config}")
def test_wgmmas_cost_is_finite_and_never_falls_with_the_batch_the_filters_or_the_depth(config: WgmmaConfig) -> None:
    for size, changed, costs in costs_that_never_fall(config, config.precision):
        assert costs[0] < costs[-1] or size < 56, changed  # there may be fewer tiles than multiprocessors


@pytest.mark.parametrize("config", WGMMA_PATCH, ids=lambda config: f"{config.precision} {config}")
def test_wgmma_patchs_cost_never_falls_with_the_batch_the_filters_or_the_depth(config: WgmmaPatchConfig) -> None:
    assert len(list(costs_that_never_fall(config, config.precision))) == 12


@pytest.mark.parametrize("config", WGMMA_3XTF32, ids=str)
def test_wgmma_3xtf32s_cost_never_falls_with_the_batch_the_filters_or_the_depth(config: Wgmma3xTf32Config) -> None:
    assert len(list(costs_that_never_fall(config, "fp32-tc"))) == 12


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_wgmma_is_expected_to_win_where_there_is_much_to_multiply(precision: str) -> None:
    for size, channels in ((28, 128), (14, 256), (7, 512)):
        layer = replace(PLAIN, H=size, W=size, C=channels, K=channels, precision=precision)
        assert isinstance(tile(replace(layer, N=256)), OnHopper)
        if precision == "fp32-tc":
            assert isinstance(tile(replace(layer, N=32)), Wgmma3xTf32Config)
        if size < 28 or precision == "fp32-tc":  # no patches
            # A single image has fewer tiles than there are multiprocessors: split-K keeps them busy.
            assert getattr(tile(replace(layer, N=1)), "split_k_slices", 1) > 1


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_a_patch_is_expected_to_win_on_large_maps_with_64_filters(precision: str) -> None:
    """There an instruction of conv2d_wgmma asks as much of shared memory as that can give."""
    layer = replace(LARGE, precision=precision)
    for N in (8, 32, 256):
        assert isinstance(tile(replace(layer, N=N)), WgmmaPatchConfig)


def test_kernels_with_a_single_form_cost_nothing_to_choose() -> None:
    for variant in ("conv2d_direct", "conv2d_shared"):
        (config,) = VARIANTS[variant].candidates(PLAIN, H100)
        assert cost(PLAIN, H100, config) == 0


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_the_depth_is_split_where_there_are_few_pixels(precision: str) -> None:
    """At N = 1 the last stage has 49 pixels: without split-K a handful of multiprocessors would do all the work."""
    one = tile(replace(DEEP, N=1, precision=precision))
    assert isinstance(one, MmaConfig | WgmmaConfig | WgmmaPatchConfig)
    assert one.split_k_slices >= 4
    many = tile(replace(DEEP, N=256, precision=precision), "conv2d_mma")
    assert isinstance(many, MmaConfig)
    assert many.split_k_slices <= 2  # two rounds of which the second is half empty may be worse
    first_stage = tile(replace(LARGE, precision=precision), "conv2d_mma")
    assert isinstance(first_stage, MmaConfig)
    assert first_stage.split_k_slices == 1


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_element_by_element_is_expected_to_be_slower(precision: str) -> None:
    aligned = fastest("conv2d_mma", replace(LARGE, precision=precision), H100)[1]
    for odd in (replace(LARGE, C=63), replace(LARGE, K=63)):
        assert fastest("conv2d_mma", replace(odd, precision=precision), H100)[1] > aligned


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_mma_is_expected_to_be_no_slower_than_wmma(precision: str) -> None:
    for problem in (LARGE, DEEP, replace(DEEP, N=256), replace(LARGE, R=1, S=1, pad_h=0, pad_w=0)):
        typed = replace(problem, precision=precision)
        assert fastest("conv2d_mma", typed, H100)[1] <= fastest("conv2d_wmma", typed, H100)[1]
    many = replace(DEEP, N=256, precision=precision)  # bound by arithmetic, so that memory does not make them equal
    assert fastest("conv2d_mma", many, H100)[1] < fastest("conv2d_wmma", many, H100)[1]
