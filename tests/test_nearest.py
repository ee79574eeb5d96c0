"""Batch sizes that were not tuned: which one that was speaks for them, and where the cost model does."""

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fusion_support import BASIC, RESIDUAL, RESIDUAL_ON
from tuning_support import LAYER, PLAIN, FakeBench, entry, fresh_tables

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dPair, Conv2dProblem, back_to_back, choose, choose_shortcut, tuned
from cupy_resnet.conv2d.back_to_back import back_to_back_candidates
from cupy_resnet.conv2d.back_to_back_choice import choose_back_to_back
from cupy_resnet.conv2d.configs import NoConfig, WgmmaPatchConfig
from cupy_resnet.conv2d.nearest import FACTOR, FACTOR_OF_FEW, FEW, by_batch_size, nearest, with_batch_size
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.conv2d.tuned import APART, Entry
from cupy_resnet.explanation import explain
from cupy_resnet.networks import describe
from cupy_resnet.tuning import Candidate, Tuner, candidates, in_network, network_problems, remember
from cupy_resnet.tuning.workloads import running

GPU = replace(H100, name="NVIDIA Imaginary 100")
"""No shipped table is for it."""

H200 = replace(H100, name="NVIDIA H200")
SHIPPED = tuned._shipped
SIZES = sorted({problem.N for table in SHIPPED() for problem, _ in table.entries})
BETWEEN = [N for N in (2, 3, 4, 6, 12, 24, 48, 96) if N not in SIZES]
APART_ENTRY = Candidate(APART, NoConfig())


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


def ship(monkeypatch: pytest.MonkeyPatch, entries: Iterable[Entry]) -> None:
    """Makes a table for the family of `GPU` one that comes with the package, and the only one."""
    table = tuned.Table(tuned.family(GPU.name), tuned.kernels_digest()).merged(entries)
    monkeypatch.setattr(tuned, "_shipped", cache(lambda: (table,)))
    tuned.forget(GPU.name)


def of(N: int, problem: Conv2dProblem = LAYER) -> Conv2dProblem:
    return replace(problem, N=N)


def chosen(N: int, problem: Conv2dProblem = LAYER) -> tuple[Any, str]:
    choice = choose(of(N, problem), GPU, spread_nan=True)
    return choice.config, choice.reason


def by_model(N: int, problem: Conv2dProblem = LAYER) -> tuple[Any, str]:
    choice = choose(of(N, problem), GPU, spread_nan=True, use_tables=False)
    return choice.config, choice.reason


FAVOURITES = {by_model(N)[0] for N in range(1, 101)}
FOUR = [
    candidate
    for candidate in candidates(of(100), GPU, spread_nan=True)
    if candidate.config not in FAVOURITES and getattr(candidate.config, "split_k_slices", 1) == 1
][:4]
"""Some that solve the layer for any number of images, none of them the model's choice for any here."""


# Which is nearest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "sizes", "size"),
    [
        (2, {1, 8}, 1),
        (3, {1, 8}, 8),
        (4, {1, 8}, 8),
        (12, {8, 32}, 8),
        (24, {16, 36}, 36),  # as near
        (15, {10, 20}, 20),  # the nearer, by ratios that are not whole
        (8, {8, 16}, 16),  # itself is not near, but itself
        (8, {8}, None),
        (3, {1}, 1),
        (4, {1}, None),
        (8, {24}, 24),
        (8, {25}, None),
        (9, {6, 14}, 6),  # more than a few
        (9, {5, 14}, None),
        (16, {8, 32}, None),
        (1, {0}, None),
        (0, {0, 1}, None),
        (5, set(), None),
    ],
)
def test_the_nearest_is_that_by_ratio(N: int, sizes: set[int], size: int | None) -> None:
    assert nearest(N, sizes) == size


def test_of_the_sizes_of_a_shipped_table_it_is_the_best_that_is_near_enough() -> None:
    for N in range(1, 2 * SIZES[-1]):
        if N not in SIZES:
            best = min(Fraction(max(N, size), min(N, size)) for size in SIZES)
            near = nearest(N, SIZES)
            assert (near is None) == (best > (FACTOR_OF_FEW if N <= FEW else FACTOR))
            assert near is None or Fraction(max(N, near), min(N, near)) == best
    assert all(nearest(N, SIZES) for N in range(2, FEW))


def test_keys_are_found_by_what_they_have_beside_the_batch_size() -> None:
    problems: list[Problem] = [LAYER, PLAIN, of(2), RESIDUAL, with_batch_size(RESIDUAL, 7), RESIDUAL_ON]
    keys = [*((problem, True) for problem in problems), (of(3), False)]
    assert by_batch_size(keys) == {
        (of(0), True): {8, 2},
        (of(0), False): {3},
        (of(0, PLAIN), True): {8},
        (with_batch_size(RESIDUAL, 0), True): {32, 7},
        (with_batch_size(RESIDUAL_ON, 0), True): {32},
    }


# Single convolutions --------------------------------------------------------------------------------------------------


def test_a_size_that_was_not_tuned_follows_the_nearest_that_was_and_says_so() -> None:
    one, eight = FOUR[:2]
    remember(GPU.name, [entry(one, of(1)), entry(eight, of(8), next_microseconds=None)])
    for N in (2, 3, 4, 6, 12):
        found, which, words = (one, 1, "fastest") if N == 2 else (eight, 8, "best in the network")
        assert chosen(N) == (found.config, f"{words} of 37 timed on this GPU for N = {which}, the nearest")
    for N in (13, 100):
        assert chosen(N) == by_model(N)
    for other in ({"precision": "bf16"}, {"C": 128}, {"K": 128}, {"stride_h": 2}, {"H": 15}):
        problem = replace(LAYER, **other)
        assert chosen(4, problem) == by_model(4, problem)
    assert chosen(8)[1] == "best in the network of 37 timed on this GPU, 12.3 µs alone"
    assert choose(of(0), GPU, spread_nan=True) == choose(of(0), GPU, spread_nan=True, use_tables=False)


def test_what_was_measured_comes_first_then_the_nearest_then_whose_table_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, c, d = FOUR
    ship(monkeypatch, [entry(a, of(4)), entry(b, of(8))])
    near = "the nearest"
    assert chosen(4) == (a.config, "tuned on NVIDIA Imaginary 100")
    assert chosen(5) == (a.config, f"tuned on NVIDIA Imaginary 100 for N = 4, {near}")
    remember(GPU.name, [entry(c, of(8))])
    assert chosen(4) == (a.config, "tuned on NVIDIA Imaginary 100")  # not the user's own of another size
    assert chosen(5) == (a.config, f"tuned on NVIDIA Imaginary 100 for N = 4, {near}")  # nearer than the user's own
    assert chosen(7) == (c.config, f"fastest of 37 timed on this GPU for N = 8, {near}")  # where both are as near
    remember(GPU.name, [entry(d, of(5))])
    assert chosen(5)[0] == d.config
    assert chosen(4)[0] == a.config
    # Other kernels: the user's own does not count any more, the shipped one does, and says so.
    monkeypatch.setattr(tuned, "sources_digest", lambda: "1" * 64)
    tuned.forget(GPU.name)
    tuned.kernels_digest.cache_clear()
    assert chosen(7) == (b.config, f"tuned on NVIDIA Imaginary 100 for N = 8, {near}, before its kernels changed")


def test_all_that_is_found_is_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, [entry(FOUR[0], of(N)) for N in (4, 6, 8)])
    remember(GPU.name, [entry(FOUR[1], of(N)) for N in (5, 6, 8)])
    known = tuned.lookup(GPU.name)

    def sizes(N: int) -> list[tuple[int, bool]]:
        return [(found.problem.N, "on this GPU" in reason) for found, reason in known.found(of(N), True)]

    assert sizes(6) == [(6, True), (6, False), (5, True)]
    assert sizes(4) == [(4, False), (5, True)]
    assert sizes(7) == [(8, True), (8, False)]
    assert [[found.problem.N for found, _ in known.exact(of(N), True)] for N in (4, 6, 7)] == [[4], [6, 6], []]


def test_a_configuration_that_does_not_solve_it_for_as_many_images_is_passed_over() -> None:
    """Blocks that share a tile are compiled for any number of images, but for many the GPU has no room."""
    wgmma = VARIANTS["conv2d_wgmma"]
    allowed = {N: set(wgmma.candidates(of(N), GPU)) for N in (2, 3, 6)}
    config = next(c for c in allowed[2] & allowed[3] if c not in allowed[6])
    remember(GPU.name, [entry(Candidate("conv2d_wgmma", config), of(2))])
    assert chosen(3) == (config, "fastest of 37 timed on this GPU for N = 2, the nearest")
    assert chosen(6) == by_model(6)
    # So is one for the very size; then another size may be of use.
    remember(GPU.name, [entry(FOUR[0], of(3), config={"tile_m": 77})])
    assert chosen(3) == (config, "fastest of 37 timed on this GPU for N = 2, the nearest")


def test_kernels_that_spread_a_nan_stay_where_they_are_allowed() -> None:
    winograd = Candidate("conv2d_winograd", VARIANTS["conv2d_winograd"].candidates(PLAIN, GPU)[0])
    remember(GPU.name, [entry(winograd, PLAIN)])
    assert choose(of(6, PLAIN), GPU, spread_nan=True).config == winograd.config
    assert choose(of(6, PLAIN), GPU) == choose(of(6, PLAIN), GPU, use_tables=False)
    # What was timed without them is no answer where they may be faster, however near.
    remember(GPU.name, [entry(FOUR[0], of(8)), entry(FOUR[1], of(5), spread_nan=False)])
    assert chosen(6)[0] == FOUR[0].config
    assert choose(of(6), GPU).config == FOUR[1].config
    assert choose(of(7), GPU).config == FOUR[0].config


def test_a_kernel_asked_for_by_name_takes_its_configuration_from_the_nearest() -> None:
    fastest = FOUR[0]
    remember(GPU.name, [entry(fastest, of(8))])
    choice = choose(of(4), GPU, fastest.variant, spread_nan=True)
    assert (choice.variant, choice.config) == (fastest.variant, fastest.config)
    assert choice.reason == "asked for by name; fastest of 37 timed on this GPU for N = 8, the nearest"


# What may be one kernel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [RESIDUAL, RESIDUAL_ON], ids=str)
def test_pairs_follow_the_nearest_too(pair: Conv2dPair) -> None:
    none, fewer, few, many = (replace(pair, first=replace(pair.first, N=N)) for N in (0, 2, 4, 48))
    fused = back_to_back_candidates(pair, GPU)[0]
    assert choose_back_to_back(fewer, GPU, spread_nan=True).config is None  # by the model
    remember(GPU.name, [entry(Candidate(back_to_back.name, fused), few)])
    choice = choose_back_to_back(fewer, GPU, spread_nan=True)
    assert (choice.config, choice.reason) == (fused, "fastest of 37 timed on this GPU for N = 4, the nearest")
    remember(GPU.name, [entry(APART_ENTRY, pair)])
    assert choose_back_to_back(many, GPU, spread_nan=True, use_tables=False).config is not None
    choice = choose_back_to_back(many, GPU, spread_nan=True)
    assert choice.config is None
    assert choice.reason == "several kernels are faster: fastest of 37 timed on this GPU for N = 32, the nearest"
    assert choose_back_to_back(none, GPU).reason == "there are no images"


@pytest.mark.parametrize("problem", [BASIC, RESIDUAL_ON.second], ids=str)
def test_shortcuts_follow_the_nearest_too(problem: Conv2dProblem) -> None:
    problem = replace(problem, shortcut_channels=64)
    near = of(problem.N * 3 // 2, problem)
    assert choose_shortcut(near, GPU, spread_nan=True, use_tables=False)[0]
    remember(GPU.name, [entry(APART_ENTRY, problem)])
    reason = "fastest of 37 timed on this GPU for N = 32, the nearest"
    assert choose_shortcut(near, GPU, spread_nan=True) == (False, f"two kernels are faster: {reason}")
    one = candidates(near, GPU, spread_nan=True)[-1]
    remember(GPU.name, [entry(one, problem)])
    assert choose_shortcut(near, GPU, spread_nan=True) == (True, reason)
    choice = choose(near, GPU, spread_nan=True)
    assert (choice.variant, choice.config, choice.reason) == (one.variant, one.config, reason)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("N", BETWEEN)
def test_a_whole_network_does_what_it_was_tuned_to_do_for_the_nearest(
    name: str, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the table that comes with the package: what is fused, and each configuration that there is for as many.

    Of most problems there is. The exception is a patch that blocks share, which they do only where there are few tiles.
    """
    monkeypatch.setattr(tuned, "_shipped", SHIPPED)
    near = nearest(N, SIZES)
    assert near is not None
    network = describe(name)
    here = running(network, (N, 3, 224, 224), "fp16", H200)
    there = running(network, (near, 3, 224, 224), "fp16", H200)
    of_nearest = {with_batch_size(problem, N): runs for problem, runs in there.items()}
    possible = {p: runs for p, runs in of_nearest.items() if runs.candidate in candidates(p, H200, spread_nan=True)}
    configs = {problem: of_nearest[problem].candidate.config for problem in of_nearest.keys() - possible.keys()}
    shared = [p for p, config in configs.items() if isinstance(config, WgmmaPatchConfig) and config.cluster]
    assert len(possible) + len(shared) > 0.8 * len(of_nearest)
    assert {problem: here.get(problem) for problem in possible} == possible
    steps = [step for step in explain(network, (N, 3, 224, 224), device=H200, precision="fp16") if step.config]
    told = sum(f"tuned on NVIDIA H200 for N = {near}, the nearest" in step.reason for step in steps)
    without = sum(step.problem in map(str, shared) for step in steps)
    assert told + without > 0.8 * len(steps)
    assert not any("the nearest" in s.reason for s in explain(network, (near, 3, 224, 224), device=H200))


# Tuning ---------------------------------------------------------------------------------------------------------------


def test_the_time_of_another_batch_size_is_not_taken_for_that_of_this_one() -> None:
    bench: Any = FakeBench(lambda workload, candidate: 1.0, GPU)
    remember(GPU.name, [entry(FOUR[0], of(8), microseconds=1e6)])
    known = tuned.lookup(GPU.name)
    assert in_network._alone(of(8), {}, known, bench) == 1e6
    assert 0 < in_network._alone(of(6), {}, known, bench) < 1e3


def test_what_was_timed_for_one_size_is_timed_for_another() -> None:
    network = describe("resnet20")
    bench: Any = FakeBench(lambda workload, candidate: 1.0, GPU)
    listed = [workload.problem for workload in network_problems(network, (4, 3, 32, 32), "fp16", GPU, fuse=False)]
    remember(GPU.name, [entry(FOUR[0], with_batch_size(problem, 8)) for problem in listed])
    Tuner(network, "fp16", 0, make_bench=lambda device_id: bench)(4, 32, 32)
    assert {workload.problem for workload in bench.raced} == set(listed)
    assert {problem.N for problem, _ in tuned.lookup(GPU.name).own} == {4, 8}
