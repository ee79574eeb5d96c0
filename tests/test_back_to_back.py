"""conv2d_wgmma_b2b without a GPU: what it solves, what the kernel's file and the launch must agree on, and the launch
itself with stand-ins for CuPy and for the maps (what it computes: test_back_to_back_run)."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from back_to_back_support import FIRST, PAIR
from wgmma_support import STATIC_SHARED, Gpus, assert_constants, collected_launches, parameters, two_gpus

from cupy_resnet.conv2d import H100, PRECISIONS, Conv2dPair, Conv2dProblem, back_to_back, tensor_maps
from cupy_resnet.conv2d.back_to_back import (
    BackToBackConfig,
    BackToBackOperands,
    back_to_back_candidates,
    configurations,
    in_order,
    interleaved,
    launch_back_to_back,
    supports_back_to_back,
)
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.variants import NULL, Filter
from cupy_resnet.jit import compile_kernel, list_kernels
from cupy_resnet.jit.sources import find_kernel, load_program
from cupy_resnet.kernels import configurations as forms_of

NAME = back_to_back.name
CONFIGS = configurations()
ALONE = [config for config in CONFIGS if not config.next_channels]
"""Those of two convolutions; with the next one: test_back_to_back_next."""
PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")

CHANNELS = "needs 64, 128 or 256 channels between the two and a multiple of 128 behind them"

# The pair, and what it solves ---------------------------------------------------------------------------------------


def test_the_second_convolution_is_pointwise_on_what_the_first_computes() -> None:
    first = replace(PLAIN, H=15, W=9, stride_h=2, stride_w=1)
    second = Conv2dPair(first, 256).second
    assert second.input_shape == first.output_shape
    assert second.output_shape == (2, 8, 9, 256)
    assert second.is_pointwise
    assert second.precision == "fp16"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, ""),
        ({"shortcut_channels": 64}, ", plus 1×1 of 64 channels"),
        ({"following": 128}, "; → 128, 1×1"),
        (
            {"shortcut_channels": 64, "shortcut_stride": 2, "following": 128},
            ", plus 1×1 of 64 channels, stride 2; → 128, 1×1",
        ),
    ],
)
def test_the_pair_describes_all(more: dict[str, int], text: str) -> None:
    pair = replace(PAIR, **more)
    first, second, *third = pair.parts
    assert (first, second, pair.third) == (FIRST, pair.second, third[0] if third else None)
    assert second.input_shape == FIRST.output_shape
    assert second.is_pointwise
    assert pair.output_shape == second.output_shape == (32, 56, 56, 256)
    assert second.shortcut_channels == more.get("shortcut_channels", 0)
    assert second.shortcut_stride == more.get("shortcut_stride", 1)
    assert [part.output_shape for part in third] == [(32, 56, 56, 128)] * ("following" in more)
    assert [part.input_shape for part in third] == [pair.output_shape] * ("following" in more)
    assert (pair.N, pair.precision) == (32, "fp16")
    assert pair.flops == sum(part.flops for part in pair.parts)
    pixels = 32 * 56 * 56
    not_moved = 2 * pixels * 64 + pixels * 256 * ("following" in more)
    assert pair.bytes == sum(part.bytes for part in pair.parts) - 2 * not_moved
    assert str(pair) == f"32×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1{text}, fp16"
    assert str(replace(pair, first=replace(FIRST, precision="fp32"))) == str(pair).removesuffix(", fp16")
    assert pair.without_following() == replace(pair, following=0)
    assert PAIR.without_following() == PAIR


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"K": 0}, "conv2d: K must be at least 1, got 0"),
        ({"shortcut_stride": 2}, "conv2d: there is no shortcut to have a stride of 2"),
        ({"shortcut_channels": -1}, "conv2d: shortcut_channels must not be negative, got -1"),
        ({"following": -1}, "conv2d_back_to_back: following must not be negative, got -1"),
    ],
)
def test_sizes_that_no_pair_can_have(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        replace(PAIR, **sizes)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize(
    "changes", [{}, {"C": 192, "K": 128}, {"K": 256, "stride_h": 2}, {"R": 1, "S": 1, "dilation_w": 2}]
)
@pytest.mark.parametrize("K", [128, 256, 2048])
def test_it_solves_bottlenecks(precision: str, changes: dict[str, int], K: int) -> None:
    first = replace(PLAIN, precision=precision, **changes)
    pair = Conv2dPair(first, K)
    assert supports_back_to_back(pair, H100) == (True, "")
    candidates = back_to_back_candidates(pair, H100)
    tiles = {64: (192, 64), 128: (192, 128, 64), 256: (128, 64)}[first.K]
    if first.K == 256 and K % 256 == 0 and precision != "tf32":
        tiles += (192,)  # of two blocks
    if precision == "tf32" and first.K == 128:
        tiles = (128, 64)  # three consumers have room for as many with few columns only
    assert [c.tile_m for c in candidates if c.columns == 64] == list(tiles)
    few_columns = {64: [], 128: [192], 256: [128]}[first.K] if precision == "tf32" else []
    assert [c.tile_m for c in candidates if c.columns == 32] == few_columns
    assert {(c.precision, c.mid_channels, c.columns <= 64) for c in candidates} == {(precision, first.K, True)}


@pytest.mark.parametrize(
    ("changes", "K", "why_not"),
    [
        ({"precision": "fp32-tc"}, 256, "computes in fp16, bf16 or tf32, not in fp32-tc"),
        ({"precision": "tf32", "C": 48}, 256, "needs C a multiple of 32 and K of 4, not 48 and 64"),
        ({"C": 96}, 256, "needs C a multiple of 64 and K of 8, not 96 and 64"),
        ({"groups": 2}, 256, "needs groups 1, not 2"),
        ({"stride_h": 9}, 256, "needs strides up to 8, not 9×1"),
        ({"K": 512}, 256, f"{CHANNELS}, not 512 and 256"),
        ({}, 192, f"{CHANNELS}, not 64 and 192"),
        ({"N": 2**24}, 256, "output pixels N·P·Q = 3288335360 exceeds 2^31 − 1"),
    ],
)  # fmt: skip
def test_what_it_does_not_solve(changes: dict[str, Any], K: int, why_not: str) -> None:
    pair = Conv2dPair(replace(PLAIN, **changes), K)
    assert supports_back_to_back(pair, H100) == (False, why_not)
    assert not back_to_back_candidates(pair, H100)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_it_adds_a_shortcut(precision: str) -> None:
    pair = Conv2dPair(replace(PLAIN, precision=precision), 256, shortcut_channels=64, following=64)
    assert supports_back_to_back(pair, H100) == (True, "")
    candidates = back_to_back_candidates(pair, H100)
    assert {(config.precision, config.shortcut_channels, config.next_channels) for config in candidates} == {
        (precision, 64, 64)
    }


@pytest.mark.parametrize(
    ("changes", "shortcut", "why_not"),
    [
        ({}, {"shortcut_channels": 64}, "adds a shortcut where a third convolution follows, not without"),
        (
            {"K": 128},
            {"shortcut_channels": 256, "shortcut_stride": 2, "following": 128},
            "adds a shortcut of 64 channels behind 64, not one of 256 behind 128",
        ),
        (
            {},
            {"shortcut_channels": 128, "following": 64},
            "adds a shortcut of 64 channels behind 64, not one of 128 behind 64",
        ),
        ({}, {"shortcut_channels": 64, "following": 128}, "goes on with 64 filters behind 64 channels, not with 128"),
    ],
)
def test_shortcuts_that_it_does_not_add(changes: dict[str, Any], shortcut: dict[str, int], why_not: str) -> None:
    pair = Conv2dPair(replace(PLAIN, **changes), 256, **shortcut)
    assert supports_back_to_back(pair, H100) == (False, why_not)
    assert not back_to_back_candidates(pair, H100)


def test_it_needs_compute_capability_9_0() -> None:
    device = replace(H100, name="A100", compute_capability=(8, 0))
    supported, why_not = supports_back_to_back(Conv2dPair(PLAIN, 256), device)
    assert (supported, why_not) == (False, "needs compute capability 9.0, A100 has 8.0")


# What the kernel's file and the launch agree on -------------------------------------------------------------------


def test_it_is_compiled_in_every_form_for_nothing_but_sm_90a() -> None:
    (kernel,) = [kernel for kernel in list_kernels() if kernel.name == NAME]
    assert forms_of(NAME) == [config.defines() for config in CONFIGS]
    assert len(set(CONFIGS)) == len(CONFIGS)
    for defines in ({}, *forms_of(NAME)):
        assert kernel.min_arch_of(defines) == "sm_90a"


REGISTERS = (
    "CONSUMERS == 1 || (24 <= PRODUCER_REGISTERS && (PRODUCER_REGISTERS | CONSUMER_REGISTERS) % 8 == 0 && "
    "PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * (65536 / THREADS / 8 * 8))"
)
"""One consumer has enough, and nothing is given back. Of several a block is given what all its threads begin with."""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.precision} {config}")
def test_the_launch_agrees_with_the_kernels_constants(config: BackToBackConfig) -> None:
    """By NVRTC, which is given the kernel's declarations with assertions in place of the kernel."""
    pytest.importorskip("cupy")
    fixed: dict[str, Any] = {
        "THREADS": config.threads,
        "CONSUMERS": config.consumers,
        "ROW_BYTES": config.ROW_BYTES,
        "SLICE * sizeof(ELEMENT)": config.ROW_BYTES,
        "COLUMNS": config.columns,
        "SLICES * SLICE": config.columns,
        "(PIXEL_STAGES + STAYING / SLICE) * PIXEL_BYTES + FILTER_STAGES * FILTER_BYTES": config.shared_memory,
        "SECOND_BOXES * SECOND_BOX_BYTES": "FILTER_BYTES",
        "CONSUMERS * CONSUMER_BYTES": "PIXEL_BYTES",
        "sizeof(TensorMap)": tensor_maps.BYTES,
        "CONSUMER_BYTES % 1024": 0,  # where a box begins, the swizzle begins anew
        "SECOND_BOX_BYTES % 1024": 0,
        "FILTER_BYTES % 1024": 0,
    }
    assert_constants(NAME, config.defines(), fixed, f"sizeof(Barriers) <= {STATIC_SHARED}", REGISTERS)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.precision} {config}")
def test_a_block_fits_an_h100_and_has_no_room_for_more_pixels(config: BackToBackConfig) -> None:
    used = config.shared_memory + STATIC_SHARED
    assert used <= H100.shared_memory_per_block
    assert H100.shared_memory_per_block < used + config.tile_m * config.ROW_BYTES
    assert config.mid_channels <= 256  # rows of a box
    assert min(config.pixel_stages, config.filter_stages) >= 4  # two that are multiplied, two on their way


def test_filters_of_the_narrowest_bottleneck_stay() -> None:
    for config in ALONE:
        channels = config.ROW_BYTES // PRECISIONS[config.precision].element_size
        steps = 9 * PLAIN.C // channels + 4 * PLAIN.K // channels
        assert (config.filter_stages >= steps) == (config.mid_channels == 64 and config.precision != "tf32")


@pytest.fixture(scope="module")
def compiled() -> dict[BackToBackConfig, Any]:
    pytest.importorskip("cupy")
    return {config: compile_kernel(NAME, defines=config.defines(), arch="sm_90a") for config in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.precision} {config}")
def test_the_compiler_lets_instructions_overlap(
    compiled: dict[BackToBackConfig, Any], config: BackToBackConfig
) -> None:
    """It says so where it waits for each of them, which costs half of the speed."""
    log = compiled[config].entry.log
    assert "serialized" not in log
    assert "injected" not in log
    assert "spill" in log


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.precision} {config}")
def test_a_block_has_the_registers_that_its_warpgroups_share(
    compiled: dict[BackToBackConfig, Any], config: BackToBackConfig
) -> None:
    used = compiled[config].resources[NAME]
    assert not used.spills
    assert used.shared_memory <= STATIC_SHARED
    assert used.registers * config.threads <= 65536


# The launch ---------------------------------------------------------------------------------------------------------

MAPS = [
    *("pixels", "first_filters", "second_filters", "added", "shortcut_filters", "outputs"),
    *("next_filters", "next_outputs"),
]
PARAMETERS = [*MAPS, "first_bias", "second_bias", "next_bias", "first", "second", "next_relu"]


def test_the_kernel_takes_its_parameters_in_the_launches_order() -> None:
    declared = parameters(NAME)
    assert [parameter.split()[-1].lstrip("*") for parameter in declared] == PARAMETERS
    maps = [parameter for parameter in declared if "TensorMap" in parameter]
    assert len(maps) == len(MAPS)
    assert all(re.match(r"const __grid_constant__ TensorMap \w+$", parameter) for parameter in maps)
    assert load_program(find_kernel(NAME)).text.count("wait_for_earlier_kernels();") == 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with two_gpus(monkeypatch) as fake:
        yield fake


@pytest.fixture
def launches(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return collected_launches(monkeypatch, back_to_back, ("im2col_map", "matrix_map"))


def named_operands(biases: tuple[Any, Any], relus: tuple[bool, bool]) -> BackToBackOperands:
    """Operands that are names, which stand for filters in any order."""
    filters: Any = (Filter("first", {NAME: "first"}), Filter("second", {NAME: "second"}))
    arrays: Any = {"x": "x", "residual": "residual", "y": "y"}
    return BackToBackOperands(filters=filters, biases=biases, relus=relus, **arrays)


@pytest.mark.parametrize("config", ALONE, ids=lambda config: f"{config.precision} {config}")
@pytest.mark.parametrize("biases", [("a", "b"), (None, "b"), ("a", None)])
@pytest.mark.parametrize("relus", [(True, True), (False, True), (True, False)])
def test_the_launch(
    launches: list[tuple[Any, ...]], config: BackToBackConfig, biases: tuple[Any, Any], relus: tuple[bool, bool]
) -> None:
    first = replace(PLAIN, C=128, K=config.mid_channels, S=2, stride_h=2, precision=config.precision)
    pair = Conv2dPair(first, 512)
    second = pair.second
    launch_back_to_back(pair, named_operands(biases, relus), config)
    ((kernel, grid, block, arguments, options),) = launches
    assert kernel == (NAME, config.defines())
    assert block == (config.threads,)
    assert grid[1:] == (1, config.cluster_size)
    assert options == {"shared": config.shared_memory, "waits": True}
    given = dict(zip(PARAMETERS, arguments, strict=True))
    assert given["pixels"] == ("im2col_map", first, "x", config.tile_m)
    assert given["first_filters"] == ("matrix_map", first, "first", 3 * 2 * 128, config.block_channels)
    assert given["second_filters"] == ("matrix_map", second, "second", config.mid_channels, config.columns)
    assert given["shortcut_filters"] is tensor_maps.NONE
    assert given["added"] == ("matrix_map", second, "residual", 512, config.tile_m, ("factor", False))
    assert given["outputs"] == ("matrix_map", second, "y", 512, 64, ("factor", False))
    assert (given["first_bias"], given["second_bias"]) == tuple(NULL if bias is None else bias for bias in biases)
    assert given["next_filters"] is given["next_outputs"] is tensor_maps.NONE
    assert (given["next_bias"], given["next_relu"]) == (NULL, 0)
    assert given["first"] is conv2d_params(first, relus[0])
    assert given["second"] is conv2d_params(second, relus[1])


@pytest.mark.parametrize(
    ("changes", "tiles"), [({}, (3, 7)), ({"N": 1, "H": 1, "W": 1}, (1, 1)), ({"N": 256, "H": 56, "W": 56}, None)]
)
@pytest.mark.parametrize(("gpu", "multiprocessors"), [(0, 132), (1, 78)])
def test_a_block_per_tile_or_per_multiprocessor(
    launches: list[tuple[Any, ...]],
    gpus: Gpus,
    changes: dict[str, Any],
    tiles: tuple[int, ...] | None,
    gpu: int,
    multiprocessors: int,
) -> None:
    gpus.current = gpu
    pair = Conv2dPair(replace(PLAIN, **changes), 256)
    for config in back_to_back_candidates(pair, H100):
        launch_back_to_back(pair, named_operands(("a", "b"), (True, True)), config)
    grids = tuple(grid[0] for _, grid, *_ in launches)
    assert grids == (tiles or (multiprocessors,) * 2)


def test_in_tf32_filters_are_interleaved_once_and_others_are_as_they_are() -> None:
    weight = np.arange(16 * 2).reshape(16, 1, 1, 2)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    np.testing.assert_array_equal(interleaved(weight), weight[order + [8 + place for place in order]])
    filter = Filter(weight)
    assert all(in_order(filter, precision) is weight for precision in ("fp16", "bf16"))
    filter.packed[NAME] = interleaved(weight)
    assert in_order(filter, "tf32") is filter.packed[NAME]
