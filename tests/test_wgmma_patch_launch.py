"""conv2d_wgmma_patch without a GPU: its limits, what the kernel's file and the launch must agree on, how a finished
tile lies in shared memory, and the launch itself, with stand-ins for CuPy and for the maps."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np
import pytest
from wgmma_support import STATIC_SHARED, Gpus, assert_constants, collected_launches, operands, parameters, two_gpus

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, tensor_maps, wgmma_patch
from cupy_resnet.conv2d.configs import WGMMA_PATCH, WGMMA_PATCH_PIXELS, WGMMA_PATCH_TF32_PIXELS, WgmmaPatchConfig
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.conv2d.variants import NULL
from cupy_resnet.conv2d.wgmma_patch import PatchTile, patch_tile
from cupy_resnet.jit import compile_kernel, launching, list_kernels
from cupy_resnet.jit.report import compile_reports
from cupy_resnet.jit.sources import find_kernel, load_program
from cupy_resnet.kernels import configurations

NAME = "conv2d_wgmma_patch"
VARIANT = VARIANTS[NAME]
PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
TF32 = replace(PLAIN, precision="tf32")
LIMIT = H100.shared_memory_per_block
TEXT = load_program(find_kernel(NAME)).text
EPILOGUE = (find_kernel(NAME).path.parent / "include/pair_epilogue.cuh").read_text(encoding="utf-8")

# What it solves ---------------------------------------------------------------------------------------------------

KEEPS = "needs a padding that keeps the size with a filter of "
ONE = "needs stride 1 and dilation 1"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PLAIN, ""),
        (replace(PLAIN, N=0), ""),
        (replace(PLAIN, N=2**20, H=7, W=7), ""),
        (replace(PLAIN, C=4096, K=1000), ""),
        (replace(PLAIN, K=8), ""),
        (replace(PLAIN, C=96), "needs C a multiple of 64 and K of 8, not 96 and 64"),
        (replace(PLAIN, C=32), "needs C a multiple of 64 and K of 8, not 32 and 64"),
        (replace(PLAIN, K=68), "needs C a multiple of 64 and K of 8, not 64 and 68"),
        (replace(PLAIN, groups=2), "needs groups 1, not 2"),
        (replace(PLAIN, stride_h=2), ONE),
        (replace(PLAIN, stride_w=2), ONE),
        (replace(PLAIN, dilation_h=2, pad_h=2), ONE),
        (replace(PLAIN, dilation_w=2, pad_w=2), ONE),
        (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0), ""),
        (replace(PLAIN, R=7, S=5, pad_h=3, pad_w=2), ""),
        (replace(PLAIN, R=2, S=2), KEEPS + "2×2"),
        (replace(PLAIN, pad_w=0), KEEPS + "3×3"),
        (replace(PLAIN, pad_h=2), KEEPS + "3×3"),
        (replace(PLAIN, S=1), KEEPS + "3×1"),
        (replace(PLAIN, H=3000, W=198), ""),
        (TF32, ""),
        (replace(TF32, C=32, K=4), ""),
        (replace(TF32, C=48), "needs C a multiple of 32 and K of 4, not 48 and 64"),
        (replace(TF32, K=6), "needs C a multiple of 32 and K of 4, not 64 and 6"),
        (replace(TF32, stride_h=2), ONE),
        (replace(TF32, pad_w=0), KEEPS + "3×3"),
        (replace(TF32, H=3000, W=248), ""),
        (replace(PLAIN, precision="fp32-tc"), "computes in fp16 or bf16 or tf32, not in fp32-tc"),
    ],
    ids=str,
)
def test_its_limits(problem: Conv2dProblem, reason: str) -> None:
    assert VARIANT.supports(problem, H100) == (not reason, reason)


@pytest.mark.parametrize(
    ("precision", "S", "widest"),
    [
        ("fp16", 1, 256),  # a box is no wider, nor an instruction
        # Two patches of 3 rows of 199 pixels and a zero take 150 KiB, beside two tiles of 208 and three slices.
        ("fp16", 3, 198),
        ("tf32", 1, 248),  # nor any instruction here
        ("tf32", 3, 248),  # there is room without such tiles
        ("tf32", 5, 159),  # not for 5 rows of 162 pixels
    ],
)
def test_the_widest_rows(precision: str, S: int, widest: int) -> None:
    channels = WgmmaPatchConfig(precision, 64).channels  # a slice: the wider tiles of several blocks need more
    problem = replace(PLAIN, C=channels, R=S, S=S, pad_h=S // 2, pad_w=S // 2, precision=precision)
    assert VARIANT.supports(replace(problem, W=widest), H100) == (True, "")
    for wider in (widest + 1, 3000):
        supported, reason = VARIANT.supports(replace(problem, W=wider), H100)
        assert supported is False
        assert f"rows of {wider} pixels" in reason
    small = replace(H100, name="a small one", shared_memory_per_block=100 << 10)
    reason = "has no tile on a small one for rows of 198 pixels and a filter of 3×3"
    assert VARIANT.supports(replace(PLAIN, W=198), small) == (False, reason)


@pytest.mark.parametrize(
    ("precision", "size", "pixels", "expected"),
    [
        # 4 rows of 57: 6 are fetched, and a zero is behind them
        ("fp16", 56, 232, PatchTile(1, 4, 57, 6, 14, 3584, 342 * 128, 344 * 128, 228 * 128, 232 * 128, 0, 10)),
        # 4 images of 7 rows of 8, a row of zeros above each and one and a zero behind them
        ("fp16", 7, 248, PatchTile(4, 7, 8, 8, 1, 64, 256 * 128, 272 * 128, 256 * 128, 256 * 128, 0, 11)),
        # The same without tiles on their way out
        ("tf32", 56, 232, PatchTile(1, 4, 57, 6, 14, 3584, 342 * 128, 344 * 128, 0, 0, 0, 17)),
        ("tf32", 7, 248, PatchTile(4, 7, 8, 8, 1, 64, 256 * 128, 272 * 128, 0, 0, 0, 18)),
        # 3 rows, of which the last tile has 2
        ("tf32", 56, 176, PatchTile(1, 3, 57, 5, 19, 4864, 285 * 128, 288 * 128, 0, 0, 0, 18)),
    ],
)
def test_tiles_worked_out_by_hand(precision: str, size: int, pixels: int, expected: PatchTile) -> None:
    assert patch_tile(replace(PLAIN, N=256, H=size, W=size, precision=precision), pixels, LIMIT) == expected


def test_in_tf32_a_whole_filter_over_64_channels_has_room_beside_patches_of_three_rows() -> None:
    problem = replace(TF32, N=256, H=56, W=56)
    slices = problem.R * problem.S * problem.C // WgmmaPatchConfig("tf32", 176).channels
    for pixels, stays in ((176, True), (232, False)):
        tile = patch_tile(problem, pixels, LIMIT)
        assert tile is not None
        assert (slices <= tile.num_stages) is stays


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_of_forms_with_the_same_tile_the_narrowest_is_a_candidate(precision: str) -> None:
    for size in (7, 14, 28, 56, 100):
        for N in (1, 2, 64):
            problem = replace(PLAIN, N=N, H=size, W=size, precision=precision)
            by_tile: dict[tuple[int, int], list[int]] = {}
            for config in WGMMA_PATCH:
                tile = patch_tile(problem, config.pixels, LIMIT)
                if config.precision == precision and tile is not None:
                    by_tile.setdefault((tile.images, tile.rows), []).append(config.pixels)
            candidates = [c for c in VARIANT.candidates(problem, H100) if not c.cluster]
            narrowest = {WgmmaPatchConfig(precision, min(pixels)) for pixels in by_tile.values()}
            assert set(candidates) == narrowest
            assert len(candidates) == len(narrowest)


# What the kernel's file and the launch agree on -------------------------------------------------------------------


PIXELS = {"fp16": WGMMA_PATCH_PIXELS, "bf16": WGMMA_PATCH_PIXELS, "tf32": WGMMA_PATCH_TF32_PIXELS}


def test_it_is_compiled_for_2_bytes_alike_and_for_tf32() -> None:
    assert configurations(NAME) == [dict(config.defines()) for config in WGMMA_PATCH]
    assert {config.precision for config in WGMMA_PATCH} == set(VARIANT.precisions) == PIXELS.keys()
    for precision in VARIANT.precisions:
        assert tuple(c.pixels for c in WGMMA_PATCH if c.precision == precision) == PIXELS[precision]
        assert all(pixels % 8 == 0 and 8 <= pixels <= 256 for pixels in PIXELS[precision])


@pytest.fixture(scope="module")
def compile_log() -> str:
    """What the compiler says of all forms."""
    pytest.importorskip("cupy")
    logs = [compile_kernel(NAME, defines=config.defines(), arch="sm_90a").entry.log for config in WGMMA_PATCH]
    return "\n".join(logs)


def test_the_compiler_lets_instructions_overlap(compile_log: str) -> None:
    """It says so where it waits for each of them, which costs half of the speed."""
    assert "serialized" not in compile_log
    assert "spill" in compile_log


def test_it_is_compiled_for_nothing_but_sm_90a() -> None:
    (kernel,) = [kernel for kernel in list_kernels() if kernel.name == NAME]
    assert kernel.min_arch_of({}) == "sm_90a"
    others = ["sm_75", "sm_80", "sm_89", "sm_100", "sm_120"]
    reports = list(compile_reports([kernel], others, configurations, jobs=1))
    assert [(report.arch, report.status, report.detail) for report in reports] == [
        (arch, "skipped", "needs sm_90a") for _ in WGMMA_PATCH for arch in others
    ]


def test_the_tile_is_described_field_by_field() -> None:
    header = (find_kernel(NAME).path.parent / "include/patch_tile.cuh").read_text(encoding="utf-8")
    (body,) = re.findall(r"struct PatchTile \{(.*?)\n\};", header, re.DOTALL)
    members = [line.split("//")[0].strip() for line in body.strip().splitlines()]
    assert members == [f"int {field.name};" for field in fields(PatchTile)]
    assert all(field.type in (int, "int") for field in fields(PatchTile))


@pytest.mark.parametrize("config", WGMMA_PATCH, ids=lambda config: f"{config.precision} {config}")
def test_the_launch_agrees_with_the_kernels_constants(config: WgmmaPatchConfig) -> None:
    pytest.importorskip("cupy")
    expected = {
        "THREADS": config.threads,
        "CONSUMERS": config.consumers,
        "PATCHES": config.PATCHES,
        "MAX_STAGES": config.max_stages,
        "ROW_BYTES": config.ROW_BYTES,
        "FILTERS": config.FILTERS,
        "SLICE_CHANNELS": config.channels,
        "STAGED": int(config.staged),
        "STAGE_BYTES": config.FILTERS * config.ROW_BYTES,
        "PIXELS": config.pixels,
        "2 * ACCUMULATORS": config.pixels,
        "8 * BLOCKS": config.pixels,
        "sizeof(ELEMENT)": {"tf32": 4}.get(config.precision, 2),
        "sizeof(TensorMap)": tensor_maps.BYTES,
        "alignof(TensorMap)": 64,
        "sizeof(PatchTile)": 4 * len(fields(PatchTile)),
        "STAGE_BYTES % 1024": 0,  # where a stage begins, the swizzle begins anew
    }
    pixel_of = "PIXELS * sizeof(unsigned short)"
    assert_constants(NAME, config.defines(), expected, f"sizeof(Barriers) + {pixel_of} <= {STATIC_SHARED}")


# A finished tile in shared memory ---------------------------------------------------------------------------------


def expression(pattern: str, text: str = TEXT) -> str:
    """A C expression of the kernel's file, or of `text`, found once, as one of Python. All values are ints from 0."""
    (found,) = re.findall(pattern, text)
    return found.replace("/", "//").replace("threadIdx.x", "thread")


@pytest.mark.parametrize("pixels", WGMMA_PATCH_PIXELS)
def test_every_sum_is_staged_once_and_where_the_accelerator_expects_it(pixels: int) -> None:
    """The kernel's own expressions, in the hands of `ldmatrix.trans` and `stmatrix.trans` as the PTX ISA tells them.

    Lane l has of matrix i the elements (2·(l % 4), l / 4) and (2·(l % 4) + 1, l / 4); row r begins where lane 8·i + r
    says.
    """
    row_of = expression(r"const int row = (.+?), chunk = ")
    chunk_of = expression(r"chunk = (.+?);\n")
    place_of = expression(r"const unsigned address = staged \+ (.+?);\n")
    (ending,) = re.findall(r"void finish_matrices_of_rows\(.+?\n}\n", EPILOGUE, re.DOTALL)
    block_of = expression(r"finish_matrices_of_rows<Element, ADD>\(words, sums \+ (.+?), ")
    matrix_of = expression(r"const float\* const pair = sums \+ (.+?);\n", ending)
    filter_of = expression(r"filter0 = warp_filter \+ \(STAGED \? (.+?) : ")
    warp_filter_of = expression(r"warp_filter = (.+?);\n")
    assert "k = tile.k + filter0 + i * (STAGED ? 8 : 1);" in TEXT
    assert "const float bias = matrix % 2 ? biases.y : biases.x;" in ending
    blocks = pixels // 8
    calls = [(j, 4) for j in range(0, blocks - 1, 2)] + ([(blocks - 1, 2)] if blocks % 2 else [])
    written: Counter[int] = Counter()
    known = {"WARPGROUP": 128, "ROW_BYTES": 128}
    for thread in range(128):
        lane, warp = thread % 32, thread // 32
        for j, count in calls:
            for i in range(count):
                first = eval(block_of, {"j": j}) + eval(matrix_of, {"matrix": i})
                # What of the product the thread has there, as warpgroup.cuh tells.
                column, place = first // 4 * 8 + lane % 4 * 2, first % 4
                filter = warp * 16 + lane // 4 + 8 * (place // 2)
                assert place in (0, 2)
                first_filter = eval(warp_filter_of, {"thread": thread, **known}) + eval(filter_of, {"lane": lane})
                assert first_filter + i % 2 * 8 == filter
                for half in range(2):
                    values = {"lane": 8 * i + 2 * (lane % 4) + half, "warp": warp, "j": j, "COUNT": count}
                    values |= known
                    values |= {"row": eval(row_of, values), "chunk": eval(chunk_of, values)}
                    address = eval(place_of, values) + 2 * (lane // 4)
                    pixel = column + half
                    assert address == pixel * 128 + ((filter // 8) ^ (pixel % 8)) * 16 + filter % 8 * 2
                    written[address] += 1
    assert written == Counter(range(0, pixels * 128, 2))


# The launch ---------------------------------------------------------------------------------------------------------

PARAMETERS = ["pixels", "filters", "residuals", "outputs", "bias", "residual", "y", "shape", "params"]


def test_the_kernel_takes_its_parameters_in_the_launches_order() -> None:
    declared = parameters(NAME)
    assert [parameter.split()[-1] for parameter in declared] == PARAMETERS
    assert declared[:4] == [f"const __grid_constant__ TensorMap {name}" for name in PARAMETERS[:4]]
    assert declared[6:] == ["ELEMENT* y", "const PatchTile shape", "const Conv2dParams params"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    with two_gpus(monkeypatch, wgmma_patch._shared_limit_of) as fake:
        yield fake


@pytest.fixture
def launches(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return collected_launches(monkeypatch, wgmma_patch, ("tensor_map", "matrix_map"))


def config_of(pixels: int, precision: str = "fp16") -> WgmmaPatchConfig:
    return WgmmaPatchConfig(precision, pixels)


@pytest.mark.parametrize("precision", VARIANT.precisions)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("changes", "pixels", "patch", "stored"),
    [
        ({"N": 9, "H": 7, "W": 6, "R": 5, "S": 3, "pad_h": 2}, 248, (7, 9, 4), (7, 9, 4)),  # whole images
        ({"N": 9, "H": 56, "W": 30, "R": 5, "S": 3, "pad_h": 2}, 256, (31, 12, 1), (31, 8, 1)),  # rows of one image
    ],
)
def test_the_launch(
    launches: list[tuple[Any, ...]],
    precision: str,
    bias: bool,
    residual: bool,
    relu: bool,
    changes: dict[str, Any],
    pixels: int,
    patch: tuple[int, int, int],
    stored: tuple[int, int, int],
) -> None:
    problem = replace(PLAIN, C=128, K=192, precision=precision, **changes)
    config = config_of(pixels, precision)
    VARIANT.launch(problem, operands(bias, residual, relu), config)
    ((kernel, _, block, arguments, options),) = launches
    tile = patch_tile(problem, pixels, LIMIT)
    assert tile is not None
    assert kernel == (NAME, config.defines())
    assert block == (384,)
    assert options == {"shared": tile.shared_memory, "waits": True}

    given = dict(zip(PARAMETERS, arguments, strict=True))
    assert given["pixels"] == ("tensor_map", problem, "x", patch)  # width, height, images
    assert given["filters"] == ("matrix_map", problem, "weight", 5 * 3 * 128, 64)  # K rows of R·S·C, a tile's filters
    assert given["residuals"] == (("tensor_map", problem, "residual", stored) if residual else tensor_maps.NONE)
    # In TF32 neither residual nor output passes through the accelerator, which would round them.
    assert given["outputs"] == (("tensor_map", problem, "y", stored) if config.staged else tensor_maps.NONE)
    assert given["y"] == "y"
    assert given["bias"] == ("bias" if bias else NULL)
    assert given["residual"] == ("residual" if residual else NULL)
    assert given["params"] is conv2d_params(problem, relu)
    # A kernel's parameter is what one element of an array is.
    assert given["shape"].shape == (1,)
    assert bytes(launching._as_bytes(given["shape"])) == np.array(astuple(tile), np.int32).tobytes()
    # The accelerator tells as many bytes as it fetches, and a box must be among those that a map can describe.
    assert tile.box_bytes == 128 * patch[0] * patch[1] * patch[2]
    assert tile.store_bytes == (128 * stored[0] * stored[1] * stored[2] if config.staged else 0)
    assert max(*patch, *stored) <= 256


def test_shared_memory_is_what_the_kernel_divides(launches: list[tuple[Any, ...]]) -> None:
    for size in (7, 14, 28, 56):
        for config in WGMMA_PATCH:
            problem = replace(PLAIN, N=64, H=size, W=size, precision=config.precision)
            tile = patch_tile(problem, config.pixels, LIMIT)
            if tile is None:
                continue
            assert tile.shared_memory == 2 * tile.patch_bytes + 2 * tile.staged_bytes + tile.num_stages * 64 * 128
            assert 3 <= tile.num_stages <= config.max_stages
            assert STATIC_SHARED + tile.shared_memory <= LIMIT
            assert tile.staged_bytes >= (max(tile.store_bytes, config.pixels * 128) if config.staged else 0)
            assert tile.box_bytes < 2**20, "more than a barrier counts"
            # What the last tap reads, some of it for nobody, ends before shared memory does, whichever patch it is in.
            read = (2 * tile.columns + 2 + config.pixels) * 128
            assert tile.patch_bytes + read <= tile.shared_memory


@pytest.mark.parametrize(
    ("changes", "pixels", "tiles"),
    [
        ({}, 256, 2),
        ({"K": 200}, 256, 8),
        ({"N": 1, "H": 1, "W": 1}, 64, 1),
        ({"N": 20, "H": 7, "W": 7}, 248, 5),
        ({"N": 21, "H": 7, "W": 7, "K": 72}, 248, 12),
        ({"N": 7, "H": 56, "W": 56}, 232, 98),
        ({"N": 256, "H": 56, "W": 56}, 232, 3584),
    ],
)
@pytest.mark.parametrize(("gpu", "multiprocessors"), [(0, 132), (1, 78)])
def test_a_block_per_tile_or_per_multiprocessor(
    launches: list[tuple[Any, ...]],
    gpus: Gpus,
    changes: dict[str, Any],
    pixels: int,
    tiles: int,
    gpu: int,
    multiprocessors: int,
) -> None:
    gpus.current = gpu
    VARIANT.launch(replace(PLAIN, **changes), operands(True, True), config_of(pixels))
    ((_, grid, *_),) = launches
    assert grid == (min(tiles, multiprocessors),)


def test_a_tile_has_as_many_stages_as_the_current_gpu_has_room_for(launches: list[tuple[Any, ...]], gpus: Gpus) -> None:
    shared = []
    for gpus.current in (0, 1, 0, 1):
        VARIANT.launch(replace(PLAIN, N=1), operands(True, True), config_of(256))
        shared.append(launches[-1][-1]["shared"])
    assert shared[0] == shared[2] > shared[1] == shared[3]
    for limit, used in zip((227 << 10, 180 << 10), shared, strict=False):
        assert used <= limit - STATIC_SHARED
    assert sorted(gpus.asked) == [0, 0, 1, 1]  # once for its multiprocessors, once for its shared memory
