"""What conv2d_mma and its relatives do with groups, depth and rows: no GPU is needed to know."""

from dataclasses import replace
from functools import partial

import pytest

from cupy_resnet.conv2d import H100, PRECISIONS, VARIANTS, Conv2dProblem, heuristics
from cupy_resnet.conv2d.configs import MmaConfig
from cupy_resnet.conv2d.tensor_core_variants import (
    MERGED_CHANNELS,
    as_merged,
    is_aligned,
    merged_groups,
    patch_rows,
    tile_count,
)

TENSOR_CORES = VARIANTS["conv2d_mma"].precisions
A100 = replace(H100, name="A100", compute_capability=(8, 0), sm_count=108, shared_memory_per_block=163 << 10)
A10 = replace(H100, name="A10", compute_capability=(8, 6), sm_count=72, shared_memory_per_block=99 << 10)

PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
LARGE = replace(PLAIN, N=256, H=56, W=56)
SHAPES = (
    PLAIN,
    LARGE,
    replace(PLAIN, C=3, K=17),
    replace(PLAIN, C=1, K=1),
    replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0),
    replace(PLAIN, groups=4),
    replace(PLAIN, groups=64),
    replace(PLAIN, H=7, W=7, C=512, K=512),
    replace(PLAIN, C=4096, R=5, S=5),
)

choose = partial(heuristics.choose, use_tables=False)


def tile_of(config: MmaConfig) -> MmaConfig:
    """The configuration with its depth in one piece."""
    return replace(config, split_k_slices=1, merged_groups=1, cluster=False)


RESNEXT = replace(LARGE, C=128, K=128, groups=32)
"""The 3×3 of resnext50_32x4d's first stage."""


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_groups_are_merged_only_where_a_nan_may_spread(precision: str) -> None:
    for N in (1, 256):
        problem = replace(RESNEXT, N=N, precision=precision)
        for gpu in (A100, A10, H100):
            merged = choose(problem, gpu, spread_nan=True)
            assert isinstance(merged.config, MmaConfig)
            assert merged.config.merged_groups == 8, merged
            assert merged.config.aligned
            for kernel in ("auto", "conv2d_mma"):
                alone = choose(problem, gpu, kernel)
                assert isinstance(alone.config, MmaConfig)
                assert alone.config.merged_groups == 1, alone
    plain = choose(replace(LARGE, precision=precision), H100, "conv2d_mma", spread_nan=True).config
    assert isinstance(plain, MmaConfig)
    assert plain.merged_groups == 1


@pytest.mark.parametrize(
    ("C", "K", "groups", "half", "single"),
    [
        (128, 128, 32, 8, 8),  # ResNeXt, 4 channels a group
        (256, 256, 32, 4, 4),  # 8 channels
        (1024, 1024, 32, 1, 1),  # 32 channels: enough for tensor cores
        (64, 64, 64, 32, 32),  # depthwise
        (64, 64, 1, 1, 1),
        (17, 17, 17, 1, 1),  # no number of groups gives aligned chunks
        (12, 24, 3, 1, 3),  # 12 channels are 48 bytes in fp32, 24 in fp16
        (20, 20, 4, 1, 1),  # 20 filters are no multiple of 8
    ],
)
def test_how_many_groups_are_merged(C: int, K: int, groups: int, half: int, single: int) -> None:
    for precision in TENSOR_CORES:
        problem = replace(PLAIN, C=C, K=K, groups=groups, precision=precision)
        count = merged_groups(problem)
        assert count == (half if PRECISIONS[precision].element_size == 2 else single), precision
        if count > 1:
            seen = as_merged(problem, count)
            assert is_aligned(seen)
            assert seen.group_channels == count * problem.group_channels
            assert problem.group_channels < MERGED_CHANNELS
            assert (seen.filter_shape[0], seen.output_shape) == (K, problem.output_shape)


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_the_depth_is_cut_into_parts_that_all_have_work(precision: str) -> None:
    seen = set()
    for shape in (*SHAPES, RESNEXT):
        for N in (0, 1, 2, 256):
            problem = replace(shape, N=N, precision=precision)
            by_tile: dict[object, list[int]] = {}
            patch = VARIANTS["conv2d_mma_patch"]
            candidates = list(VARIANTS["conv2d_mma"].candidates(problem, H100))
            candidates += patch.candidates(problem, H100) if patch.supports(problem, H100)[0] else []
            for config in candidates:
                merged = as_merged(problem, config.merged_groups)
                if config.split_k_slices > 1:
                    assert config.split_k_slices * config.tile_k < merged.gemm_k + config.tile_k, config
                    assert tile_count(merged, config) * config.split_k_slices <= 4 * H100.sm_count, config
                by_tile.setdefault((tile_of(config), config.merged_groups), []).append(config.split_k_slices)
                seen.add(config.split_k_slices)
            assert all(slices[0] == 1 and slices == sorted(set(slices)) for slices in by_tile.values())
    assert seen == {1, 2, 3, 4, 6, 8, 12, 16}


@pytest.mark.parametrize("R", [1, 2, 3, 7])
@pytest.mark.parametrize("tile_m", [64, 128, 256])
def test_a_patch_has_room_for_every_tiles_rows(R: int, tile_m: int) -> None:
    """Counted as the kernel does it: padded images lie below each other, P + R − 1 rows each."""
    for N in (1, 2, 3, 9):
        for P in (1, 2, 5, 7, 14):
            for Q in (1, 3, 7, 14, 30, 64, 100):
                problem = replace(PLAIN, N=N, H=P + R - 1, W=Q, R=R, S=1, pad_h=0, pad_w=0)
                assert (problem.P, problem.Q) == (P, Q)
                first = [m // (P * Q) * (P + R - 1) + m % (P * Q) // Q for m in range(problem.gemm_m)]
                touched = max(
                    first[min(m + tile_m, problem.gemm_m) - 1] + R - first[m] for m in range(0, problem.gemm_m, tile_m)
                )
                assert touched <= patch_rows(problem, tile_m), problem


@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_a_patchs_next_channels_arrive_in_time(precision: str) -> None:
    """They are fetched with the slice of the filter that is needed `stages − 1` slices later, and for the tap after the
    last: a filter with fewer taps would read them before they are waited for. The first two need no waiting.
    """
    for R, S in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 3)):
        for C in (64, 128, 1024):
            problem = replace(PLAIN, C=C, R=R, S=S, pad_h=R // 2, pad_w=S // 2, precision=precision)
            if not VARIANTS["conv2d_mma_patch"].supports(problem, H100)[0]:
                continue
            for config in VARIANTS["conv2d_mma_patch"].candidates(problem, H100):
                assert config.stages - 1 <= R * S or 2 * config.tile_k >= C, f"{problem}: {config}"


def test_a_patch_of_many_channels_needs_taps_enough_to_arrive() -> None:
    deep = replace(PLAIN, C=72, R=1, S=1, pad_h=0, pad_w=0)
    reason = (False, "needs more taps than 1×1 for as many channels as 72")
    assert VARIANTS["conv2d_mma_patch"].supports(replace(deep, precision="fp32-tc"), H100) == reason
    for problem in (replace(deep, C=64), replace(deep, S=2)):
        assert VARIANTS["conv2d_mma_patch"].supports(replace(problem, precision="fp32-tc"), H100)[0]
