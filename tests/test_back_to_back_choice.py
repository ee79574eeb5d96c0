"""Whether two convolutions are one kernel: by the cost model, by tables, and by what tuning measures."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from back_to_back_support import FIRST, PAIR
from cli_support import run_here
from tuning_support import LAYER, FakeBench, entry, fresh_tables

from cupy_resnet.binding import bind_shapes
from cupy_resnet.conv2d import H100, VARIANTS, Conv2dPair, Conv2dProblem, back_to_back, choose, tuned
from cupy_resnet.conv2d.back_to_back import BackToBackOperands, back_to_back_candidates
from cupy_resnet.conv2d.back_to_back_choice import choose_back_to_back
from cupy_resnet.conv2d.configs import NoConfig
from cupy_resnet.conv2d.cost_model import back_to_back_microseconds
from cupy_resnet.conv2d.pieces import LEAST_SHARE
from cupy_resnet.conv2d.tuned import APART
from cupy_resnet.conv2d.variants import Filter
from cupy_resnet.networks import describe
from cupy_resnet.tuning import Candidate, Tuner, Workload, bench, candidates, network_problems, operands, remember, tune
from cupy_resnet.tuning.entrants import Apart
from cupy_resnet.tuning.workloads import counted_alone

A100 = replace(H100, name="A100", compute_capability=(8, 0), sm_count=108, shared_memory_per_block=163 << 10)
CONFIGS = back_to_back_candidates(PAIR, H100)
FUSED = [Candidate(back_to_back.name, config) for config in CONFIGS]
APART_ENTRY = Candidate(APART, NoConfig())


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


# The cost model -----------------------------------------------------------------------------------------------------


def test_large_maps_are_one_kernel_in_the_cheapest_configuration() -> None:
    choice = choose_back_to_back(PAIR, H100)
    assert choice.config == min(CONFIGS, key=lambda config: back_to_back_microseconds(PAIR, H100, config))
    assert " µs by the model, " in choice.reason
    assert choice.reason.endswith(" in pieces")


def test_no_faster_than_what_must_be_moved_and_multiplied() -> None:
    residual = 2 * PAIR.second.gemm_m * 256
    for config in CONFIGS:
        cost = back_to_back_microseconds(PAIR, H100, config)
        assert cost > (PAIR.bytes + residual) / 4.8e6
        assert back_to_back_microseconds(replace(PAIR, first=replace(FIRST, N=64)), H100, config) > cost


def test_a_single_image_is_two() -> None:
    choice = choose_back_to_back(Conv2dPair(replace(FIRST, N=1, H=14, W=14), 256), H100)
    assert choice.config is None
    assert choice.reason.endswith(" tiles are few for 132 multiprocessors")
    assert LEAST_SHARE < 1


@pytest.mark.parametrize(
    ("first", "device", "words"),
    [
        (
            replace(FIRST, precision="fp32-tc"),
            H100,
            f"{back_to_back.name} computes in fp16, bf16 or tf32, not in fp32-tc",
        ),
        (FIRST, A100, "compute capability 9.0"),
        (replace(FIRST, C=128, K=128, groups=32), H100, back_to_back.name),
        (replace(FIRST, N=0), H100, "there are no images"),
    ],
)
def test_what_the_kernel_does_not_compute_is_two_and_says_why(first: Conv2dProblem, device: Any, words: str) -> None:
    choice = choose_back_to_back(Conv2dPair(first, 256), device)
    assert choice.config is None
    assert words in choice.reason


# Tables -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(len(CONFIGS)))
def test_what_was_measured_is_followed(place: int) -> None:
    small = Conv2dPair(replace(FIRST, N=1), 256)  # which the cost model would not fuse
    for pair in (PAIR, small):
        remember(H100.name, [entry(FUSED[place], pair)])
        choice = choose_back_to_back(pair, H100, spread_nan=True)
        assert choice.config == CONFIGS[place]
        assert choice.reason == "fastest of 37 timed on this GPU, 12.3 µs (next best 12.9)"
        remember(H100.name, [entry(APART_ENTRY, pair)])
        choice = choose_back_to_back(pair, H100, spread_nan=True)
        assert choice.config is None
        assert choice.reason == "several kernels are faster: fastest of 37 timed on this GPU, 12.3 µs (next best 12.9)"
        by_model = choose_back_to_back(pair, H100, spread_nan=True, use_tables=False)
        assert (by_model.config is None) is (pair is small)


@pytest.mark.parametrize("changes", [{"config": {"tile_m": 77}}, {"variant": "conv2d_gone"}])
def test_an_entry_of_another_kernel_or_configuration_is_passed_over(changes: dict[str, Any]) -> None:
    remember(H100.name, [entry(FUSED[0], PAIR, **changes)])
    assert choose_back_to_back(PAIR, H100, spread_nan=True) == choose_back_to_back(PAIR, H100, use_tables=False)


def test_a_pair_and_its_first_convolution_are_known_apart() -> None:
    alone = candidates(FIRST, H100, spread_nan=True)[1]
    remember(H100.name, [entry(alone, FIRST), entry(APART_ENTRY, PAIR), entry(FUSED[0], replace(PAIR, K=512))])
    tuned.forget()
    assert choose(FIRST, H100, spread_nan=True).config == alone.config
    assert choose_back_to_back(PAIR, H100, spread_nan=True).config is None
    assert choose_back_to_back(replace(PAIR, K=512), H100, spread_nan=True).config == CONFIGS[0]
    assert choose(PAIR.second, H100, spread_nan=True) == choose(PAIR.second, H100, spread_nan=True, use_tables=False)


def test_a_table_holds_both_in_order_and_says_what_comes_second() -> None:
    of_pairs = [
        entry(FUSED[-1], replace(PAIR, K=512)),
        entry(FUSED[0], PAIR),
        entry(APART_ENTRY, PAIR, spread_nan=False),
    ]
    alone = [entry(candidates(problem, H100, spread_nan=True)[0], problem) for problem in (PAIR.second, FIRST, LAYER)]
    table = tuned.Table("x", "y").merged([*of_pairs, *alone])
    assert tuned.Table.parse(table.dump()) == table
    assert tuned.Table("x", "y").merged([*alone[::-1], *of_pairs[::-1]]).dump() == table.dump()
    problems = [written["problem"] for written in json.loads(table.dump())["entries"]]
    assert [problem.get("then") for problem in problems if problem["H"] == 56 and problem["R"] == 3] == [
        None,
        {"K": 256},
        {"K": 256},
        {"K": 512},
    ]


def test_a_table_without_pairs_is_written_as_it_always_was() -> None:
    """Byte for byte, also what was written before there were any."""
    for path in Path(tuned.__file__).parent.glob("tuned_*.json"):
        assert tuned.Table.parse(path.read_bytes()).dump() == path.read_bytes()
    one = entry(candidates(LAYER, H100)[0], LAYER)
    assert "then" not in tuned.Table("x", "y").merged([one]).dump().decode()


@pytest.mark.parametrize("then", [{}, {"K": 0}, {"K": "many"}, {"K": 256, "R": 3}, 256, [256]])
def test_a_second_convolution_that_means_nothing_leaves_the_others_alone(then: Any) -> None:
    good, bad = entry(FUSED[0], PAIR), entry(FUSED[0], PAIR).as_dict()
    bad["problem"] |= {"then": then}
    table = {"format": 1, "gpu": "x", "sources_digest": "y", "entries": [bad, good.as_dict()]}
    assert tuned.Table.parse(json.dumps(table).encode()).entries == {good.key: good}


def test_a_shipped_table_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tuned.Table(tuned.family(H100.name), tuned.kernels_digest()).merged([entry(FUSED[0], PAIR)])
    monkeypatch.setattr(tuned, "_shipped", cache(lambda: (shipped,)))
    choice = choose_back_to_back(PAIR, H100, spread_nan=True)
    assert (choice.config, choice.reason) == (CONFIGS[0], f"tuned on {shipped.gpu}")


# Tuning -------------------------------------------------------------------------------------------------------------


def test_a_networks_pairs_come_behind_its_convolutions() -> None:
    workloads = network_problems(describe("resnet50"), (32, 3, 224, 224), "fp16", H100)
    kinds = [isinstance(workload.problem, Conv2dPair) for workload in workloads]
    assert kinds == sorted(kinds)
    alone = {workload.problem: workload for workload in workloads}
    pairs = [workload for workload in workloads if isinstance(workload.problem, Conv2dPair)]
    assert Workload(PAIR, count=2, residual=True) in pairs
    for pair in pairs:
        assert all(alone[part].count >= pair.count for part in pair.problem.parts)  # type: ignore[union-attr]
    for options in (("resnet18", "fp16", H100), ("resnet50", "fp16", A100), ("resnet50", "fp32-tc", H100)):
        found = network_problems(describe(options[0]), (32, 3, 224, 224), *options[1:])
        assert not any(isinstance(workload.problem, Conv2dPair) for workload in found), options
    unfused = network_problems(describe("resnet50"), (32, 3, 224, 224), "fp16", H100, fuse=False)
    assert not any(isinstance(workload.problem, Conv2dPair) for workload in unfused)


def test_a_pairs_candidates_are_its_parts_and_every_configuration() -> None:
    apart, *fused = candidates(PAIR, H100, spread_nan=True)
    assert isinstance(apart, Apart)
    for part, alone in zip(PAIR.parts, (apart.first, apart.second), strict=True):
        choice = choose(part, H100, spread_nan=True)
        assert (alone.variant, alone.config) == (choice.variant, choice.config)
    assert {candidate.config for candidate in fused} == set(CONFIGS)
    assert str(apart) == f"{apart.first}; {apart.second}"


def times(pair_apart: float) -> Callable[[Workload, Candidate], float]:
    """Times by which the second candidate of a convolution is the fastest, and a pair's configurations take 10 µs."""

    def time(workload: Workload, candidate: Candidate) -> float:
        if isinstance(workload.problem, Conv2dPair):
            return pair_apart if isinstance(candidate, Apart) else 10.0 + list(CONFIGS).index(candidate.config)  # type: ignore[arg-type]
        return 3.0 if candidate == candidates(workload.problem, H100, spread_nan=True)[1] else 5.0

    return time


@pytest.mark.parametrize(("apart", "fuses"), [(10.1, True), (9.9, False)])
def test_a_pair_races_the_two_that_were_the_fastest_alone(apart: float, fuses: bool) -> None:
    fake = FakeBench(times(apart))
    workloads = [Workload(PAIR, residual=True), Workload(PAIR.second), Workload(FIRST)]
    report = tune(workloads, fake, clock=fake.clock)
    assert not report.skipped
    assert [result.workload for result in report.results] == workloads
    assert fake.raced[-1].problem == PAIR
    raced = next(candidate for candidate in fake.samples if isinstance(candidate, Apart))
    for part, alone in zip(PAIR.parts, (raced.first, raced.second), strict=True):
        assert alone == candidates(part, H100, spread_nan=True)[1]
    pair = report.results[0]
    assert pair.best == (FUSED[0] if fuses else raced)
    assert pair.model.variant == back_to_back.name
    (written, *_) = report.entries
    assert written.variant == (back_to_back.name if fuses else APART)
    assert written.candidates == 1 + len(CONFIGS)
    remember(H100.name, report.entries)
    tuned.forget()
    choice = choose_back_to_back(PAIR, H100, spread_nan=True)
    assert choice.config == (CONFIGS[0] if fuses else None)
    assert "timed on this GPU" in choice.reason


def test_a_kernel_that_is_wrong_is_not_chosen_however_many_are() -> None:
    def fused_are_wrong(workload: Workload, entrants: Sequence[Candidate]) -> dict[Candidate, str]:
        pair = isinstance(workload.problem, Conv2dPair)
        return {c: "its output differs" for c in entrants if pair and not isinstance(c, Apart)}

    fake = FakeBench(times(50.0), rejected=fused_are_wrong)
    (result,) = tune([Workload(PAIR)], fake, clock=fake.clock).results
    assert isinstance(result.best, Apart)
    assert result.entry.variant == APART
    assert result.model_microseconds is None


def test_a_model_that_tunes_itself_times_its_pairs_once() -> None:
    network = bind_shapes(describe("resnet50"))
    fake = FakeBench(lambda workload, candidate: 1.0)
    Tuner(network, "fp16", 0, make_bench=lambda device_id: fake)(2, 64, 64)
    pairs = [workload for workload in fake.raced if isinstance(workload.problem, Conv2dPair)]
    assert pairs
    raced = len(fake.raced)
    tuned.forget()
    Tuner(network, "fp16", 0, make_bench=lambda device_id: fake)(2, 64, 64)
    assert len(fake.raced) == raced


def test_the_command_counts_no_convolution_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cupy_resnet.tuning.GpuBench", lambda cold_l2: FakeBench(lambda workload, candidate: 1.0))
    done = run_here(monkeypatch, capsys, "tune", "resnet50", "--batch", "2", "--size", "64", "--no-in-network")
    workloads = network_problems(describe("resnet50"), (2, 3, 64, 64), "fp16", H100)
    assert any(isinstance(workload.problem, Conv2dPair) for workload in workloads)
    total = sum(counted_alone({workload.problem: workload.count for workload in workloads}).values())
    assert f"N = 2: {total:.1f} → {total:.1f} µs for those of one forward pass, 1.00×" in done.out
    assert tuned.own_path(H100.name).is_file()


def test_what_is_launched_to_time_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    def noting(name: str) -> Any:
        return SimpleNamespace(
            launch=lambda problem, operands, config: log.append((name, problem, operands, config)),
            sources_of=lambda config: (name,),
        )

    monkeypatch.setattr(operands, "VARIANTS", {name: noting(name) for name in VARIANTS})
    monkeypatch.setattr(
        operands,
        "launch_back_to_back",
        lambda pair, arrays, config: log.append(("two", pair, arrays)),
    )
    x, between, residual, y = (np.zeros(1) for _ in range(4))
    filters, biases = (Filter(x), Filter(x)), (np.zeros(1), np.zeros(1))
    whole = BackToBackOperands(x, filters, biases, residual, y, (True, True))
    arrays = operands.Arrays(whole, between)
    apart, fused = candidates(PAIR, H100)[:2]
    operands.launch(PAIR, fused, arrays)
    assert log.pop() == ("two", PAIR, whole)
    operands.launch(PAIR, apart, arrays)
    assert isinstance(apart, Apart)
    for (name, problem, given, config), part, alone in zip(log, PAIR.parts, (apart.first, apart.second), strict=True):
        assert (name, problem, config) == (alone.variant, part, alone.config)
        assert given.relu
    first, second = (given for _, _, given, _ in log)
    assert first.x is x
    assert first.residual is None
    assert first.y is second.x is between
    assert second.residual is residual
    assert second.y is y is arrays.outputs[0]
    forms = [form for alone in (apart.first, apart.second) for form in bench._sources(alone)]
    assert list(bench._sources(apart)) == forms
    assert list(bench._sources(fused)) == [(back_to_back.name, fused.config.defines())]
