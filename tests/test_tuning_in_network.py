"""The second phase of tuning: what makes a whole pass faster is found, the heaviest first, within a budget."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fusion_support import BASIC
from in_network_support import FEW, NETWORK, NOW, SHAPE, SHORTCUT, Pass, alone, favouring, kept, passes, place, tuned_in
from tuning_support import LAYER, FakeBench, FakePasses, entry, fresh_tables

from cupy_resnet.conv2d import H100, Conv2dPair, choose, choose_shortcut, tuned
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.conv2d.tuned import APART
from cupy_resnet.networks import describe
from cupy_resnet.tuning import (
    Tuner,
    Workload,
    candidates,
    network_problems,
    remember,
    tune,
)
from cupy_resnet.tuning.duels import FIRST_ROUNDS, NOISE_ROUNDS
from cupy_resnet.tuning.entrants import Apart
from cupy_resnet.tuning.workloads import running


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


# What a pass launches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnet20", "resnext50_32x4d"])
@pytest.mark.parametrize("N", [1, 64])
def test_what_runs_is_what_is_explained(model: str, N: int) -> None:
    from cupy_resnet.explanation import explain

    network = describe(model)
    shape = (N, 3, network.default_size, network.default_size)
    now = running(network, shape, "fp16", H100)
    told: dict[Problem, list[str]] = {}
    for step in explain(network, shape, device=H100, precision="fp16"):
        problem = step.record.pair or step.record.as_conv2d or (step.record.problem if step.op != "stem" else None)
        if problem is not None and step.record.op != "stem":
            told.setdefault(problem, []).append(f"{step.kernel}, {step.config}")
    assert {problem: [str(runs.candidate)] * runs.count for problem, runs in now.items()} == told
    assert now.keys() <= {workload.problem for workload in network_problems(network, shape, "fp16", H100)}


# What wins ------------------------------------------------------------------------------------------------------------


def test_what_is_slower_alone_and_faster_in_the_network_is_found() -> None:
    favourite = place(LAYER, 2)
    made = passes(favouring(LAYER, favourite))
    found = tuned_in(made, only={LAYER, BASIC})
    (change,) = found.changes
    assert (change.workload.problem, change.before, change.after) == (LAYER, place(LAYER, 0), favourite)
    assert change.ratio == pytest.approx(0.98)
    assert (found.before, found.after) == (1000.0, pytest.approx(980.0))
    (remembered,) = found.entries
    assert remembered.microseconds == pytest.approx(10.0 * 1.05**2, abs=0.01)  # alone
    assert tuned.Entry.from_dict(remembered.as_dict()) == remembered
    assert kept() == {}
    assert choose(LAYER, H100, spread_nan=True).config == place(LAYER, 0).config
    remember(H100.name, found.entries)
    assert choose(LAYER, H100, spread_nan=True).config == favourite.config


def test_what_is_much_slower_alone_is_not_tried() -> None:
    favourite = place(LAYER, 6)  # 1.05⁶ = 1.34
    made = passes(favouring(LAYER, favourite))
    assert not tuned_in(made, only={LAYER}).changes
    assert len(made.captured) > 3
    assert all(pass_.launched[LAYER].candidate != favourite for pass_ in made.captured)


def test_several_changes_are_decided_one_upon_the_other() -> None:
    other = replace(LAYER, H=28, W=28, C=128, K=128)
    first, second = place(LAYER, 1), place(LAYER, 3)
    favourite = place(other, 2)

    def time(pass_: Pass) -> float:
        now, beside = pass_[LAYER].candidate, pass_[other].candidate
        return 1000.0 - 20.0 * (now in (first, second)) - 30.0 * (now == second) - 10.0 * (beside == favourite)

    found = tuned_in(passes(time), only={LAYER, other})
    assert {(change.before, change.after) for change in found.changes} == {
        *((place(LAYER, 0), first), (first, second)),
        (place(other, 0), favourite),
    }
    assert {one.problem: one.config for one in found.entries} == {
        one.problem: one.config for one in (entry(second, LAYER), entry(favourite, other))
    }
    assert (found.before, found.after) == (1000.0, pytest.approx(940.0))


def test_the_results_of_the_first_phase_are_not_timed_again() -> None:
    bench = FakeBench(alone)
    report = tune(network_problems(NETWORK, SHAPE, "fp16", H100), bench, clock=bench.clock)
    remember(H100.name, report.entries)
    raced = len(bench.raced)
    favourite = place(LAYER, 1)
    made = FakePasses(NOW, favouring(LAYER, favourite), bench)
    found = tuned_in(made, results=report.results)
    assert [change.after for change in found.changes] == [favourite]
    assert found.entries[0].candidates == len(candidates(LAYER, H100, spread_nan=True))
    assert len(bench.raced) == raced
    assert kept() == {}


def test_the_heaviest_come_first_and_only_what_the_pass_launches_or_could() -> None:
    seen: list[Workload] = []
    made = passes(lambda pass_: 1000.0)
    tuned_in(made, progress=lambda done, total, workload: seen.append(workload))
    now = NOW()
    counts = [now[w.problem].count if w.problem in now else w.count for w in seen]
    assert len(seen) == len({workload.problem for workload in seen}) > 5
    again: list[Workload] = []
    tuned_in(passes(lambda pass_: 1000.0), progress=lambda done, total, workload: again.append(workload))
    assert again == seen
    weights = [count * place_cost(w) for count, w in zip(counts, seen, strict=True)]
    assert weights == sorted(weights, reverse=True)
    allowed = now.keys() | {w.problem for w in seen if w.problem.shortcut_channels or isinstance(w.problem, Conv2dPair)}
    assert {workload.problem for workload in seen} <= allowed


def place_cost(workload: Workload) -> float:
    from cupy_resnet.tuning.entrants import expected

    return expected(workload.problem, H100, candidates(workload.problem, H100, spread_nan=True)[0])


def test_only_what_may_change_does() -> None:
    made = passes(favouring(LAYER, place(LAYER, 2)))
    assert not tuned_in(made, only={BASIC}).changes
    assert tuned_in(made, only={LAYER}).changes


# Fused and apart ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_one_kernel_becomes_its_pieces_and_the_other_way_round(fused: bool) -> None:
    if fused:
        before = entry(place(SHORTCUT, 0), SHORTCUT)
    else:
        before = entry(candidates(SHORTCUT, H100, spread_nan=True)[0], SHORTCUT)
    remember(H100.name, [before])
    assert (SHORTCUT in NOW()) == fused
    made = passes(lambda pass_: 1000.0 + 20.0 * ((SHORTCUT in pass_) == fused))
    found = tuned_in(made, only={LAYER, SHORTCUT})
    assert SHORTCUT in {change.workload.problem for change in found.changes}
    assert (found.before, found.after) == (1020.0, pytest.approx(1000.0))
    remember(H100.name, found.entries)
    assert choose_shortcut(SHORTCUT, H100, spread_nan=True)[0] == (not fused)
    assert any((change.entry.variant == APART) == fused for change in found.changes)


def test_the_other_way_is_tried_however_slow_it_is_alone() -> None:
    remember(H100.name, [entry(place(SHORTCUT, 0), SHORTCUT)])
    bench = FakeBench(lambda workload, candidate: 100.0 if isinstance(candidate, Apart) else alone(workload, candidate))
    made = FakePasses(NOW, lambda pass_: 1000.0 + 20.0 * (SHORTCUT in pass_), bench)
    found = tuned_in(made, only={SHORTCUT})
    assert [change.after.variant for change in found.changes if change.workload.problem == SHORTCUT] == [APART]


# The budget -----------------------------------------------------------------------------------------------------------


def test_the_budget_is_kept() -> None:
    bench = FakeBench(alone)
    workloads = [workload for workload in network_problems(NETWORK, SHAPE, "fp16", H100) if workload.problem in FEW]
    results = tune(workloads, bench, clock=bench.clock).results
    bench.seconds_per_sample = 0.1
    duels = []
    for budget in (2.0, 2.9, 3.8, 60.0):
        found = tuned_in(FakePasses(NOW, lambda pass_: 1000.0, bench), budget_s=budget, only=FEW, results=results)
        duels.append(found.duels)
        assert found.seconds < budget + 0.1 * 2 * FIRST_ROUNDS + 1e-6  # a duel that is begun is finished
    assert 0 < duels[0] < duels[1] < duels[2] < duels[3]


def test_when_the_budget_is_spent_nothing_is_begun() -> None:
    made = passes(lambda pass_: 1000.0)
    made.bench.seconds_per_sample = 0.1
    found = tuned_in(made, budget_s=0.5)
    assert (found.duels, found.changes) == (0, ())
    assert made.samples == 2 * NOISE_ROUNDS
    assert not made.bench.raced


def test_without_room_for_two_it_says_so() -> None:
    made = passes(lambda pass_: 1000.0)

    def fail(pass_: Pass) -> None:
        if made.captured:
            raise MemoryError("no room")

    made.failure = fail
    with pytest.raises(MemoryError, match="no room"):
        tuned_in(made)
    assert made.open == 0


# At the first call ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [True, False])
def test_a_tuner_goes_on_in_the_network(room: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench = FakeBench(alone)
    favourite = place(LAYER, 1)
    ops: Any = object()
    made: list[tuple[object, ...]] = []

    def make_passes(*arguments: object) -> Any:
        made.append(arguments)

        def fail(pass_: Pass) -> None:
            if not room:
                raise MemoryError("no room")

        now = partial(running, NETWORK, SHAPE, "fp16", H100, fuse=False)
        return nullcontext(FakePasses(now, favouring(LAYER, favourite), bench, failure=fail))

    tuner = Tuner(NETWORK, "fp16", 0, ops=ops, make_bench=lambda device_id: bench, make_passes=make_passes)
    with caplog.at_level(logging.INFO, "cupy_resnet"):
        tuner(8, 224, 224)
        Tuner(NETWORK, "fp16", 0, ops=ops, make_bench=lambda device_id: bench, make_passes=make_passes)(8, 224, 224)
    assert made == [(NETWORK, ops, SHAPE)]  # known by then, it is not tried again
    assert choose(LAYER, H100, spread_nan=True).config == place(LAYER, 1 if room else 0).config
    assert ("in the network 1 choices changed" in caplog.text) == room
    assert ("resnet18 is not tuned in the network: no room" in caplog.text) != room
    assert kept() == {}
