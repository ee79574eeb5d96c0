"""conv2d_wgmma without a GPU: its limits, its candidates, what the kernel's file and the launch must agree on, and the
launch itself, with stand-ins for CuPy and for the maps (which test_tensor_maps.py looks into)."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from wgmma_support import STATIC_SHARED, Gpus, assert_constants, collected_launches, operands, parameters, two_gpus

from cupy_resnet.conv2d import H100, PRECISIONS, VARIANTS, Conv2dProblem, tensor_core_variants, tensor_maps
from cupy_resnet.conv2d.configs import WGMMA, WgmmaConfig
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.variants import NULL
from cupy_resnet.jit import launching, list_kernels
from cupy_resnet.jit.report import compile_reports
from cupy_resnet.kernels import configurations

VARIANT = VARIANTS["conv2d_wgmma"]
PRECISION_NAMES = ("fp16", "bf16", "tf32")
PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")

# What it solves ---------------------------------------------------------------------------------------------------

ROOMY = replace(PLAIN, H=300, W=300)
"""So large that a filter of any size below fits."""

TOO_FAR = "needs filters and padding up to 127 pixels wide"


@pytest.mark.parametrize(
    ("problem", "reasons"),
    [
        (replace(PLAIN, C=96), {2: "needs C a multiple of 64 and K of 8, not 96 and 64", 4: ""}),
        (replace(PLAIN, C=48), {2: "needs C a multiple of 64 and K of 8, not 48 and 64"}),
        (replace(PLAIN, C=48), {4: "needs C a multiple of 32 and K of 4, not 48 and 64"}),
        (replace(PLAIN, K=68), {2: "needs C a multiple of 64 and K of 8, not 64 and 68", 4: ""}),
        (replace(PLAIN, K=66), {4: "needs C a multiple of 32 and K of 4, not 64 and 66"}),
        (replace(PLAIN, K=8), {2: "", 4: ""}),
        (replace(PLAIN, C=4096, K=1000), {2: "", 4: ""}),
        (replace(PLAIN, shortcut_channels=96), {2: "needs the shortcut's C a multiple of 64, not 96", 4: ""}),
        (replace(PLAIN, shortcut_channels=64, shortcut_stride=8), {2: "", 4: ""}),
        (
            replace(PLAIN, shortcut_channels=64, shortcut_stride=9),
            {2: "needs the shortcut's stride up to 8, not 9", 4: "needs the shortcut's stride up to 8, not 9"},
        ),
        (replace(PLAIN, groups=2), {2: "needs groups 1, not 2", 4: "needs groups 1, not 2"}),
        (replace(ROOMY, stride_h=8, stride_w=8), {2: "", 4: ""}),
        (replace(ROOMY, stride_h=9), {2: "needs strides up to 8, not 9×1", 4: "needs strides up to 8, not 9×1"}),
        (replace(ROOMY, stride_w=9), {2: "needs strides up to 8, not 1×9"}),
        (replace(ROOMY, R=128, S=128, pad_h=127, pad_w=127), {2: "", 4: ""}),
        (replace(ROOMY, R=129), {2: TOO_FAR, 4: TOO_FAR}),
        (replace(ROOMY, S=129), {2: TOO_FAR}),
        (replace(ROOMY, dilation_h=63, dilation_w=63), {2: "", 4: ""}),  # 2 · 63 pixels
        (replace(ROOMY, dilation_h=64), {2: TOO_FAR}),
        (replace(ROOMY, dilation_w=64), {2: TOO_FAR}),
        (replace(ROOMY, R=2, dilation_h=127), {2: "", 4: ""}),
        (replace(ROOMY, pad_h=128), {2: TOO_FAR}),
        (replace(ROOMY, pad_w=128), {2: TOO_FAR, 4: TOO_FAR}),
    ],
    ids=str,
)
def test_its_limits(problem: Conv2dProblem, reasons: dict[int, str]) -> None:
    """Slices of 128 bytes, rows of the output in steps of 16 bytes, and what a tensor map can say of windows.

    Args:
        problem: what is asked for.
        reasons: element size → why not, or nothing.
    """
    for precision in PRECISION_NAMES:
        reason = reasons.get(PRECISIONS[precision].element_size)
        if reason is not None:
            assert VARIANT.supports(replace(problem, precision=precision), H100) == (not reason, reason)


@pytest.mark.parametrize("precision", PRECISION_NAMES)
@pytest.mark.parametrize(
    ("K", "widest"), [(8, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256), (264, 256), (2048, 256)]
)
def test_no_tile_is_twice_as_wide_as_there_are_filters(K: int, widest: int, precision: str) -> None:
    candidates = VARIANT.candidates(replace(PLAIN, K=K, precision=precision), H100)
    assert {c for c in candidates if c.split_k_slices == 1} == {
        c for c in WGMMA if c.precision == precision and c.tile_n <= widest
    }
    assert max(config.tile_n for config in candidates) == widest


# What the kernel's file and the launch agree on -------------------------------------------------------------------


def test_it_is_compiled_in_every_precision_alike() -> None:
    forms = configurations("conv2d_wgmma")
    assert forms == [dict(config.defines()) for config in WGMMA]
    assert {config.precision for config in WGMMA} == set(VARIANT.precisions) == set(PRECISION_NAMES)
    tiles = [[(c.tile_m, c.tile_n, c.stages, c.buffers) for c in WGMMA if c.precision == p] for p in PRECISION_NAMES]
    assert tiles[0] == tiles[1]
    assert {tile[:2] for tile in tiles[2]} == {tile[:2] for tile in tiles[0]}
    assert len(set(WGMMA)) == len(forms) == sum(map(len, tiles))


def test_it_is_compiled_for_nothing_but_sm_90a() -> None:
    (kernel,) = [kernel for kernel in list_kernels() if kernel.name == "conv2d_wgmma"]
    assert kernel.min_arch_of({}) == "sm_90a"
    others = ["sm_75", "sm_80", "sm_89", "sm_100", "sm_120"]
    reports = list(compile_reports([kernel], others, configurations, jobs=1))
    assert [(report.arch, report.status, report.detail) for report in reports] == [
        (arch, "skipped", "needs sm_90a") for _ in WGMMA for arch in others
    ]
    for config in WGMMA:
        assert kernel.min_arch_of(config.defines()) == "sm_90a"


@pytest.mark.parametrize("config", WGMMA, ids=lambda config: f"{config.precision} {config}")
def test_the_launch_agrees_with_the_kernels_constants(config: WgmmaConfig) -> None:
    """By NVRTC, which is given the kernel's declarations with assertions in place of the kernel."""
    pytest.importorskip("cupy")
    fixed = {
        "THREADS": config.threads,
        "CONSUMERS": config.CONSUMERS,
        "ROW_BYTES": config.ROW_BYTES,
        "SLICE_CHANNELS": config.tile_k,
        "NUM_STAGES * STAGE_BYTES + (STAGED ? CONSUMERS * BUFFERS * PIECE_BYTES : 0)": config.shared_memory,
        "PIECES * PIECE_N": config.tile_n,
        "sizeof(TensorMap)": tensor_maps.BYTES,
        "alignof(TensorMap)": 64,
        "STAGE_BYTES % 1024": 0,  # where a stage begins, the swizzle begins anew
        "PIXEL_BYTES % 1024": 0,
        "BOX_BYTES % 1024": 0,
    }
    assert_constants("conv2d_wgmma", config.defines(), fixed, f"sizeof(Barriers) <= {STATIC_SHARED}")


@pytest.mark.parametrize("config", WGMMA, ids=lambda config: f"{config.precision} {config}")
def test_a_block_fits_an_h100(config: WgmmaConfig) -> None:
    assert config.shared_memory % 1024 == 0
    assert config.shared_memory + STATIC_SHARED <= H100.shared_memory_per_block
    assert (config.tile_m % 64, config.threads % 128) == (0, 0)
    assert config.tile_n in (64, 128, 256)  # what include/warpgroup.cuh has instructions for
    sums = config.tile_m * config.tile_n // 128
    assert sums <= 192, "the accumulators alone would leave no registers"
    assert config.stages >= 3
    # Of whole tiles one may be ahead; of pieces one is finished while another is on its way, unless a tile is so large
    # that its products take as long as all of its pieces one by one.
    assert config.buffers in (1, 2) if config.piece_n == config.tile_n or sums > 128 else config.buffers >= 2


# The launch ---------------------------------------------------------------------------------------------------------

FACTORS = ["pixels", "filters", "shortcut_pixels", "shortcut_filters"]
PARAMETERS = [*FACTORS, "residuals", "outputs", "bias", "residual", "y", "params"]


def test_the_kernel_takes_its_parameters_in_the_launches_order() -> None:
    declared = parameters("conv2d_wgmma")
    assert [parameter.split()[-1] for parameter in declared] == PARAMETERS
    maps = [parameter for parameter in declared if "TensorMap" in parameter]
    assert len(maps) == 6
    assert all(re.match(r"const __grid_constant__ TensorMap \w+$", parameter) for parameter in maps)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with two_gpus(monkeypatch) as fake:
        yield fake


@pytest.fixture
def launches(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return collected_launches(monkeypatch, tensor_core_variants, ("im2col_map", "matrix_map"))


def config_of(precision: str, tile_m: int, tile_n: int) -> WgmmaConfig:
    return next(c for c in WGMMA if (c.precision, c.tile_m, c.tile_n) == (precision, tile_m, tile_n))


@pytest.mark.parametrize("precision", PRECISION_NAMES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_the_launch(launches: list[tuple[Any, ...]], precision: str, bias: bool, residual: bool, relu: bool) -> None:
    problem = replace(PLAIN, C=128, K=192, R=3, S=2, stride_h=2, precision=precision)
    config = config_of(precision, 128, 64)
    VARIANT.launch(problem, operands(bias, residual, relu), config)
    ((kernel, _, block, arguments, options),) = launches
    assert kernel == ("conv2d_wgmma", config.defines())
    assert block == (384,)
    assert options == {"shared": config.shared_memory, "waits": True}

    given = dict(zip(PARAMETERS, arguments, strict=True))
    assert given["pixels"] == ("im2col_map", problem, "x", 128)  # columns of a tile's pixels
    assert given["filters"] == ("matrix_map", problem, "weight", 3 * 2 * 128, 64)  # K rows of R·S·C, a tile's filters
    assert given["shortcut_pixels"] is given["shortcut_filters"] is tensor_maps.NONE
    if residual:
        assert given["residuals"] == ("matrix_map", problem, "residual", 192, 128, ("factor", False))
    else:
        assert given["residuals"] is tensor_maps.NONE
    assert given["outputs"] == ("matrix_map", problem, "y", 192, 128, ("factor", False))
    assert given["bias"] == ("bias" if bias else NULL)
    assert given["residual"] == ("residual" if residual else NULL)
    assert given["y"] == "y"
    assert given["params"] is conv2d_params(problem, relu)
    assert bool(given["params"]["relu"][0]) is relu


@pytest.mark.parametrize(
    ("changes", "tile", "tiles"),
    [
        ({}, (128, 64), 4),  # 392 pixels
        ({}, (64, 64), 7),
        ({"K": 200}, (128, 64), 16),
        ({"K": 200}, (64, 256), 7),
        ({"N": 1, "H": 1, "W": 1}, (128, 128), 1),
        ({"N": 43, "K": 128}, (64, 128), 132),  # 8428 pixels
        ({"N": 256, "H": 56, "W": 56}, (128, 64), 6272),
        ({"N": 256, "H": 56, "W": 56, "stride_h": 2, "stride_w": 2}, (128, 64), 1568),
    ],
)
@pytest.mark.parametrize(("gpu", "multiprocessors"), [(0, 132), (1, 78)])
def test_a_block_per_tile_or_per_multiprocessor(
    launches: list[tuple[Any, ...]],
    gpus: Gpus,
    changes: dict[str, int],
    tile: tuple[int, int],
    tiles: int,
    gpu: int,
    multiprocessors: int,
) -> None:
    gpus.current = gpu
    VARIANT.launch(replace(PLAIN, **changes), operands(True, True), config_of("fp16", *tile))
    ((_, grid, *_),) = launches
    assert grid == (min(tiles, multiprocessors),)


def test_a_gpu_is_asked_once_for_its_multiprocessors(gpus: Gpus) -> None:
    counts = []
    for gpus.current in (0, 1, 0, 1, 0):
        counts.append(tensor_core_variants.multiprocessors())
    assert counts == [132, 78, 132, 78, 132]
    assert gpus.asked == [0, 1]


def test_a_map_is_passed_by_value_and_taken_for_nobodys_array() -> None:
    """As every launch is recorded, and asked whether it reads the caller's array."""
    filled = np.frombuffer(bytes(range(128)), np.uint8).view(tensor_maps.NONE.dtype)
    assert bytes(launching._as_bytes(filled)) == bytes(range(128))
    assert bytes(launching._as_bytes(tensor_maps.NONE)) == bytes(128)
    launch = launching.Launch("kernel", (1,), (384,), (filled, filled), 0)
    assert not launch.reads(filled.ctypes.data)
