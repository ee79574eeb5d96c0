"""Split-K in a cluster: who sends which partial sum where, who finishes which output, and where such forms are offered.

The index arithmetic of `ClusterReduction` and `PartialSums`, in mma_tile.cuh and partial_sums.cuh of
kernels_cu/include, is done here as the kernel does it, thread by thread.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tuning_support import entry

from cupy_resnet import jit
from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem
from cupy_resnet.conv2d.configs import (
    CLUSTER_SIZES,
    MMA,
    MMA_IN_CLUSTERS,
    MMA_PATCH,
    MMA_PATCH_IN_CLUSTERS,
    MmaConfig,
)
from cupy_resnet.conv2d.cost_model import cost
from cupy_resnet.conv2d.tensor_core_variants import SPLIT_K_SLICES, shared_memory
from cupy_resnet.conv2d.tuned import config_fields
from cupy_resnet.errors import CompileError
from cupy_resnet.jit.sources import find_kernel
from cupy_resnet.kernels import configurations
from cupy_resnet.tuning import Candidate

A100 = replace(H100, name="A100", compute_capability=(8, 0), sm_count=108, shared_memory_per_block=163 << 10)
RTX_5090 = replace(H100, name="RTX 5090", compute_capability=(12, 0), sm_count=170, shared_memory_per_block=99 << 10)

FORMS = {"conv2d_mma": (MMA, MMA_IN_CLUSTERS), "conv2d_mma_patch": (MMA_PATCH, MMA_PATCH_IN_CLUSTERS)}
SHAPES = sorted(
    {(c.tile_m, c.tile_n, c.warp_m, c.warp_n, c.split_k_slices) for _, forms in FORMS.values() for c in forms}
)
"""Tiles, warps and sizes of the clusters."""

DEEP = Conv2dProblem(N=1, H=7, W=7, C=512, K=512, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")

Shape = tuple[int, int, int, int, int]


def swizzled_quad(row: int, quad: int) -> int:
    return (quad ^ row % 4 * 2) * 16


def sent(shape: Shape, slice_: int) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int, int, int]]]]:
    """For each store of each warp: (rank, byte address, row, column) of its 32 lanes' pairs."""
    tile_m, tile_n, warp_tile_m, warp_tile_n, size = shape
    rows, row_size, warps_m = tile_m // size, tile_n * 4, tile_m // warp_tile_m
    for warp in range(warps_m * (tile_n // warp_tile_n)):
        warp_m, warp_n = warp % warps_m * warp_tile_m, warp // warps_m * warp_tile_n
        for half in range(2 * (warp_tile_m // 16)):
            for j in range(warp_tile_n // 8):
                stores = []
                for lane in range(32):
                    row = warp_m + half * 8 + lane // 4
                    start = (slice_ * rows + row % rows) * row_size + lane % 2 * 8
                    address = start + swizzled_quad(row % rows, warp_n // 4 + j * 2 + lane % 4 // 2)
                    # mma's layout of sums: rows lane / 4 and lane / 4 + 8 of 16, columns 2 · (lane % 4) and its next.
                    stores.append((row // rows, address, row, warp_n + j * 8 + lane % 4 * 2))
                yield (warp, half, j), stores


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_output_is_finished_once_from_the_partial_sums_of_all_slices_in_their_order(shape: Shape) -> None:
    tile_m, tile_n, warp_m, warp_n, size = shape
    threads, eights, rows = 32 * (tile_m // warp_m) * (tile_n // warp_n), tile_n // 8, tile_m // size
    received = np.full((size, tile_m * tile_n, 3), -1)  # of each rank, each float: its slice, row and column
    for slice_ in range(size):
        for _, stores in sent(shape, slice_):
            for rank, address, row, column in stores:
                assert address % 8 == 0
                for v in range(2):
                    assert (received[rank, address // 4 + v] == -1).all()
                    received[rank, address // 4 + v] = slice_, row, column + v
    assert (received >= 0).all()  # as many bytes as a block's barrier may expect
    finished: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        for done in range(-(-rows * eights // threads)):
            for thread in range(threads):
                eight, row = thread % eights, thread // eights + done * (threads // eights)
                if row >= rows:
                    continue
                first, sums = thread // 4 % 2, [[], []]  # type: ignore[var-annotated]
                for slice_ in range(size):
                    for i in range(2):
                        start = (slice_ * rows + row) * tile_n * 4
                        address = start + swizzled_quad(row, eight * 2 + (i ^ first))
                        sums[i].append(received[rank, address // 4 : address // 4 + 4])
                low, high = (sums[1], sums[0]) if first else (sums[0], sums[1])
                outputs = np.concatenate([low, high], axis=1)  # [slice][column][what]
                assert (outputs[:, :, 0] == np.arange(size)[:, None]).all()
                assert (outputs[:, :, 1] == rank * rows + row).all()
                assert (outputs[:, :, 2] == eight * 8 + np.arange(8)).all()
                finished.update((rank * rows + row, eight * 8 + c) for c in range(8))
    assert finished == Counter({(row, column): 1 for row in range(tile_m) for column in range(tile_n)})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_two_lanes_meet_at_a_bank(shape: Shape) -> None:
    """8 bytes are stored by 16 lanes at once, 16 bytes loaded by 8, of 32 banks of 4 bytes."""
    for _, stores in sent(shape, 1):
        for group in (stores[:16], stores[16:]):
            banks = [(rank, address // 4 % 32 + v) for rank, address, _, _ in group for v in range(2)]
            assert len(set(banks)) == 32
    tile_n, eights = shape[1], shape[1] // 8
    for begin in range(0, 64, 8):
        for i in range(2):
            addresses = [
                thread // eights * tile_n * 4
                + swizzled_quad(thread // eights, thread % eights * 2 + (i ^ thread // 4 % 2))
                for thread in range(begin, begin + 8)
            ]
            assert len({address // 16 % 8 for address in addresses}) == 8


@pytest.mark.parametrize("variant", FORMS)
def test_such_forms_are_the_aligned_small_tiles_and_need_sm_90(variant: str) -> None:
    tiles, clusters = FORMS[variant]
    kernel = find_kernel(variant)
    assert kernel.min_arch == "sm_80"
    for form in clusters:
        assert replace(form, cluster=False, split_k_slices=1) in tiles
        assert form.cluster
        assert form.aligned
        assert form.defines()["SPLIT_K_CLUSTER"] == form.split_k_slices
        assert kernel.min_arch_of(form.defines()) == "sm_90"
        assert f"{form.stages} stages, split-K {form.split_k_slices} in a cluster" in str(form)
    assert {form.split_k_slices for form in clusters} == set(CLUSTER_SIZES)
    assert {form.precision for form in clusters} == set(VARIANTS[variant].precisions)
    for tile in tiles:
        assert tile.defines()["SPLIT_K_CLUSTER"] == replace(tile, split_k_slices=4).defines()["SPLIT_K_CLUSTER"] == 1
        assert kernel.min_arch_of(tile.defines()) == "sm_80"
    assert configurations(variant) == [form.defines() for form in (*tiles, *clusters)]
    conditions = {(macro, value) for macro, value, _ in kernel.conditions}
    assert conditions == {("SPLIT_K_CLUSTER", str(size)) for size in CLUSTER_SIZES}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32-tc"])
def test_slices_meet_in_a_cluster_wherever_they_can(precision: str) -> None:
    problem = replace(DEEP, precision=precision)
    for variant, (tiles, clusters) in FORMS.items():
        of_h100 = VARIANTS[variant].candidates(problem, H100)
        assert any(config.cluster for config in of_h100)
        assert any(config.split_k_slices == 16 and not config.cluster for config in of_h100)
        for config in of_h100:
            together = replace(config, cluster=True)
            assert config.cluster == (together in clusters), config
            assert shared_memory(problem, config) <= H100.shared_memory_per_block
        on_both = {replace(config, cluster=False) for config in of_h100}
        assert len(on_both) == len(of_h100)
        for config in VARIANTS[variant].candidates(problem, A100):
            assert not config.cluster
            assert replace(config, split_k_slices=1) in tiles
        for config in VARIANTS[variant].candidates(problem, RTX_5090):  # less shared memory: not everywhere is room
            assert shared_memory(problem, config) <= RTX_5090.shared_memory_per_block
    slices = {config.split_k_slices for config in VARIANTS["conv2d_mma"].candidates(problem, H100)}
    assert slices == {1, *SPLIT_K_SLICES}


def test_two_blocks_in_clusters_fit_a_multiprocessor_as_their_registers_promise() -> None:
    """A block of the next kernel may then begin beside one of this. The largest tile lacks the bytes of its barrier."""
    for config in MMA_IN_CLUSTERS:
        used = shared_memory(replace(DEEP, precision=config.precision), config) + 128 + 1024  # the barrier, the system
        assert (2 * used <= 228 << 10) == ((config.tile_m, config.tile_n, config.stages) != (64, 64, 6)), config


def test_room_for_the_partial_sums_lies_behind_the_stages() -> None:
    for forms in (MMA_IN_CLUSTERS, MMA_PATCH_IN_CLUSTERS):
        for config in forms:
            problem = replace(DEEP, precision=config.precision)
            without = shared_memory(problem, replace(config, cluster=False))
            assert shared_memory(problem, config) == without + 4 * config.tile_m * config.tile_n


def test_a_cluster_is_expected_to_be_faster_than_the_workspace() -> None:
    for config in MMA_IN_CLUSTERS:
        problem = replace(DEEP, precision=config.precision)
        assert cost(problem, H100, config) < cost(problem, H100, replace(config, cluster=False))


def test_tables_name_it_and_older_tables_mean_whichever_there_is() -> None:
    here, before = (
        [config for config in VARIANTS["conv2d_mma"].candidates(DEEP, gpu) if config.split_k_slices == 8]
        for gpu in (H100, A100)
    )
    together = next(config for config in here if config.cluster)
    alone = replace(together, cluster=False)
    assert alone in before
    named = entry(Candidate("conv2d_mma", together), DEEP)
    written = type(named).from_dict(json.loads(json.dumps(named.as_dict())))
    assert written == named
    assert written.config_among(here) == together
    assert written.config_among(before) is None
    older = {name: value for name, value in config_fields(together).items() if name != "cluster"}
    found = replace(named, config=older)
    assert found.config_among(here) == together
    assert found.config_among(before) == alone
    assert replace(named, config=older | {"stages": 99}).config_among(here) is None
    assert replace(named, config=older | {"unheard_of": 1}).config_among(here) is None
    assert replace(named, config={"cluster": True}).config_among(here) is None


def test_a_form_in_clusters_is_not_compiled_for_older_gpus() -> None:
    pytest.importorskip("cupy")
    form = MMA_IN_CLUSTERS[0]
    assert isinstance(form, MmaConfig)
    with pytest.raises(CompileError, match=r"^kernel conv2d_mma needs at least sm_90, but sm_80 was asked for$"):
        jit.compile_kernel("conv2d_mma", defines=form.defines(), arch="sm_80")
