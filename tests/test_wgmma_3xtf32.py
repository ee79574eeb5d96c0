"""conv2d_wgmma_3xtf32 without a GPU: what it solves, the filter's two parts, what the kernel's file and the launch must
agree on, and the launch itself with stand-ins for CuPy and for the maps (what it computes: test_wgmma_3xtf32_run)."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wgmma_support import STATIC_SHARED, Gpus, assert_constants, collected_launches, operands, parameters, two_gpus

from cupy_resnet.conv2d import (
    H100,
    VARIANTS,
    Conv2dProblem,
    heuristics,
    tensor_maps,
    wgmma_3xtf32,
)
from cupy_resnet.conv2d.configs import WGMMA_3XTF32, Wgmma3xTf32Config
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.tf32_parts import TRUNCATION, split_tf32
from cupy_resnet.conv2d.variants import NULL, Filter
from cupy_resnet.conv2d.wgmma_3xtf32 import split_filter
from cupy_resnet.jit import compile_kernel, list_kernels
from cupy_resnet.jit.sources import find_kernel, load_program
from cupy_resnet.kernels import configurations

NAME = "conv2d_wgmma_3xtf32"
VARIANT = VARIANTS[NAME]
PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp32-tc")

# What it solves ---------------------------------------------------------------------------------------------------


def test_it_solves_what_conv2d_wgmma_solves_in_tf32() -> None:
    for changes in (
        *({}, {"C": 96}, {"C": 48}, {"K": 68}, {"K": 66}, {"groups": 2}, {"N": 0}, {"N": 2**24}),
        *({"stride_h": 8, "H": 300}, {"stride_w": 9, "W": 300}, {"pad_h": 128}, {"dilation_w": 64, "W": 300}),
    ):
        problem = replace(PLAIN, **changes)
        wgmma = VARIANTS["conv2d_wgmma"].supports(replace(problem, precision="tf32"), H100)
        assert VARIANT.supports(problem, H100) == wgmma, changes


def test_it_computes_in_fp32_tc_only() -> None:
    assert VARIANT.supports(replace(PLAIN, precision="tf32"), H100) == (False, "computes in fp32-tc, not in tf32")


@pytest.mark.parametrize(("K", "widest"), [(4, 64), (64, 64), (68, 128), (128, 128), (2048, 128)])
def test_no_tile_is_twice_as_wide_as_there_are_filters(K: int, widest: int) -> None:
    candidates = VARIANT.candidates(replace(PLAIN, K=K), H100)
    assert set(candidates) == {config for config in WGMMA_3XTF32 if config.tile_n <= widest}
    assert max(config.tile_n for config in candidates) == widest


def test_nothing_is_derived_from_the_weights_of_a_fully_connected_layer() -> None:
    """They are not kept as a filter: each call would derive it anew, in the middle of a capture perhaps."""
    assert [name for name in VARIANTS if VARIANTS[name].derives_filter] == ["conv2d_winograd", "conv2d_wgmma_3xtf32"]
    layer = Conv2dProblem(N=1024, H=1, W=1, C=2048, K=1000, R=1, S=1, precision="fp32-tc")
    assert VARIANTS["conv2d_wgmma_3xtf32"].supports(layer, H100)[0]
    for spread_nan in (False, True):
        assert heuristics.automatic(layer, H100, spread_nan) == ["conv2d_mma"]
    for image in (replace(layer, W=2), replace(layer, H=2), replace(layer, R=3, pad_h=1), replace(layer, S=3, pad_w=1)):
        assert "conv2d_wgmma_3xtf32" in heuristics.automatic(image, H100)


# The filter's two parts ---------------------------------------------------------------------------------------------


def as_on_the_gpu(value: np.float32) -> tuple[np.float32, np.float32]:
    """tensor_core.cuh, line by line, in the integers and floats of C; fmaf by way of exact fractions."""
    bits = int(value.view(np.uint32))
    high = np.uint32((bits + 0x1000) & 0xFFFFE000).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        low = np.float32(value - high)
    if not np.isfinite(high) or not np.isfinite(low):
        return high, np.float32(np.nan)
    # In float64 the product has 27 bits at most, and the sum is exact: the difference of the exponents is at most 38.
    return high, np.float32(np.float64(high) * float.fromhex("0x1.4p-25") + np.float64(low))


def values_of_all_kinds() -> np.ndarray:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 3000, dtype=np.uint64).astype(np.uint32)
    normal = random.standard_normal(3000).astype(np.float32)
    halfway = (bits[:200] & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    special = np.array([0, -0.0, 1, -1, 3, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-38, 1e-45, 2**-126], np.float32)
    return np.concatenate([bits.view(np.float32), normal, halfway.view(np.float32), special])


def test_the_parts_are_bit_by_bit_those_of_the_kernels_that_split_on_the_gpu() -> None:
    values = values_of_all_kinds()
    high, low = split_tf32(values)
    assert high.dtype == low.dtype == np.float32
    for value, *parts in zip(values, high, low, strict=True):
        for part, expected in zip(parts, as_on_the_gpu(value), strict=True):
            same = part.view(np.uint32) == expected.view(np.uint32)
            assert same or (np.isnan(part) and np.isnan(expected)), value


def test_that_arithmetic_is_the_headers() -> None:
    text = (find_kernel(NAME).path.parent / "include" / "tensor_core.cuh").read_text(encoding="utf-8")
    assert "high[i] = (high[i] + 0x1000u) & 0xffffe000u;" in text
    assert "low[i] = __float_as_uint(value - __uint_as_float(high[i]));" in text
    (constant,) = re.findall(r"fmaf\(__uint_as_float\(high\[i\]\), (\S+)f, __uint_as_float\(low\[i\]\)\)", text)
    assert float.fromhex(constant) == TRUNCATION


def test_the_parts_together_have_21_bits() -> None:
    values = np.random.default_rng(1).standard_normal(10000).astype(np.float32)
    high, low = split_tf32(values)
    seen = (low.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # what the hardware takes of it
    assert not (high.view(np.uint32) & np.uint32(0x1FFF)).any()
    error = np.abs(high.astype(np.float64) + seen - values) / np.abs(values)
    assert error.max() < 2.0**-21
    assert np.abs(low / values).max() <= 2.0**-11 * 1.01


def test_a_filter_is_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=np.empty, float32=np.float32, cuda=cuda))
    weight = np.random.default_rng(2).standard_normal((8, 3, 2, 32)).astype(np.float32)
    filter: Any = Filter(weight)
    parts = split_filter(filter)
    assert split_filter(filter) is parts
    assert parts.shape == (2, 8, 3, 2, 32)
    assert parts.flags.c_contiguous
    high, low = split_tf32(weight)
    np.testing.assert_array_equal(parts[0], high)
    np.testing.assert_array_equal(parts[1].view(np.uint32), low.view(np.uint32) >> 13 << 13)
    assert waits == [1]  # before it is published


# What the kernel's file and the launch agree on -------------------------------------------------------------------


def test_it_is_compiled_in_every_tile_for_nothing_but_sm_90a() -> None:
    (kernel,) = [kernel for kernel in list_kernels() if kernel.name == NAME]
    assert configurations(NAME) == [config.defines() for config in WGMMA_3XTF32]
    assert len(set(WGMMA_3XTF32)) == len(WGMMA_3XTF32)
    for defines in ({}, *configurations(NAME)):
        assert kernel.min_arch_of(defines) == "sm_90a"


@pytest.mark.parametrize("config", WGMMA_3XTF32, ids=str)
def test_the_launch_agrees_with_the_kernels_constants(config: Wgmma3xTf32Config) -> None:
    """By NVRTC, which is given the kernel's declarations with assertions in place of the kernel."""
    pytest.importorskip("cupy")
    fixed = {
        "THREADS": config.threads,
        "CONSUMERS": config.CONSUMERS,
        "ROW_BYTES": config.ROW_BYTES,
        "SLICE_CHANNELS": config.tile_k,
        "NUM_STAGES * STAGE_BYTES + (STAGED ? CONSUMERS * PLACES * PIECE_BYTES : 0)": config.shared_memory,
        "STAGED": int(config.staged),
        "sizeof(TensorMap)": tensor_maps.BYTES,
        "STAGE_BYTES % 1024": 0,  # where a stage begins, the swizzle begins anew
        "PIXEL_BYTES % 1024": 0,
        "FILTER_BYTES % 1024": 0,
        "CONSUMER_M": config.consumer_m,
        "CONSUMER_M * ROW_BYTES % 1024": 0,
        "STEPS": 4,  # of 8 in a slice, as many as conv2d_mma adds up before it adds them to its sums
    }
    assert_constants(NAME, config.defines(), fixed, f"sizeof(Barriers) <= {STATIC_SHARED}")


@pytest.mark.parametrize("config", WGMMA_3XTF32, ids=str)
def test_a_block_fits_an_h100_and_has_no_room_for_another_stage(config: Wgmma3xTf32Config) -> None:
    used = config.shared_memory + STATIC_SHARED
    stage = (config.tile_m + 2 * config.tile_n) * config.ROW_BYTES
    assert used <= H100.shared_memory_per_block < used + stage
    assert config.tile_m <= 256  # rows of a box


def test_the_compiler_lets_instructions_overlap(compile_log: str) -> None:
    """It says so where it waits for each of them, which costs half of the speed."""
    assert "serialized" not in compile_log
    assert "spill" in compile_log


@pytest.fixture(scope="module")
def compile_log() -> str:
    """What the compiler says of all forms."""
    pytest.importorskip("cupy")
    logs = [compile_kernel(NAME, defines=config.defines(), arch="sm_90a").entry.log for config in WGMMA_3XTF32]
    return "\n".join(logs)


# The launch ---------------------------------------------------------------------------------------------------------

PARAMETERS = ["pixels", "filters", "residuals", "outputs", "bias", "residual", "y", "params"]


def test_the_kernel_takes_its_parameters_in_the_launches_order() -> None:
    declared = parameters(NAME)
    assert [parameter.split()[-1].lstrip("*") for parameter in declared] == PARAMETERS
    maps = [parameter for parameter in declared if "TensorMap" in parameter]
    assert len(maps) == 4
    assert all(re.match(r"const __grid_constant__ TensorMap \w+$", parameter) for parameter in maps)
    assert load_program(find_kernel(NAME)).text.count("wait_for_earlier_kernels();") == 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with two_gpus(monkeypatch) as fake:
        yield fake


@pytest.fixture
def launches(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(wgmma_3xtf32, "split_filter", lambda filter: (filter.weight, "in two parts"))
    return collected_launches(monkeypatch, wgmma_3xtf32, ("im2col_map", "matrix_map"))


@pytest.mark.parametrize("config", WGMMA_3XTF32, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_the_launch(
    launches: list[tuple[Any, ...]], config: Wgmma3xTf32Config, bias: bool, residual: bool, relu: bool
) -> None:
    problem = replace(PLAIN, C=96, K=192, R=3, S=2, stride_h=2)
    VARIANT.launch(problem, operands(bias, residual, relu), config)
    ((kernel, _, block, arguments, options),) = launches
    assert kernel == (NAME, config.defines())
    assert block == (384,)
    assert options == {"shared": config.shared_memory, "waits": True}
    given = dict(zip(PARAMETERS, arguments, strict=True))
    assert given["pixels"] == ("im2col_map", problem, "x", config.tile_m)
    assert given["filters"] == ("matrix_map", problem, ("weight", "in two parts"), 3 * 2 * 96, config.tile_n)
    if residual:
        assert given["residuals"] == ("matrix_map", problem, "residual", 192, config.consumer_m, ("factor", False))
    else:
        assert given["residuals"] is tensor_maps.NONE
    assert given["outputs"] == ("matrix_map", problem, "y", 192, config.consumer_m, ("factor", False))
    assert given["bias"] == ("bias" if bias else NULL)
    assert given["residual"] == ("residual" if residual else NULL)
    assert given["y"] == "y"
    assert given["params"] is conv2d_params(problem, relu)


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, (4, 2, 4)),
        ({"K": 200}, (8, 8, 16)),
        ({"N": 1, "H": 1, "W": 1}, (1, 1, 1)),
        ({"N": 256, "H": 56, "W": 56}, None),
    ],
)
@pytest.mark.parametrize(("gpu", "multiprocessors"), [(0, 132), (1, 78)])
def test_a_block_per_tile_or_per_multiprocessor(
    launches: list[tuple[Any, ...]],
    gpus: Gpus,
    changes: dict[str, int],
    tiles: tuple[int, ...] | None,
    gpu: int,
    multiprocessors: int,
) -> None:
    gpus.current = gpu
    for config in WGMMA_3XTF32:
        VARIANT.launch(replace(PLAIN, **changes), operands(True, True), config)
    grids = tuple(grid[0] for _, grid, *_ in launches)
    assert grids == (tiles or (multiprocessors,) * 3)
