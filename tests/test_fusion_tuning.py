"""What of a network may be one kernel, in which order that is timed, and against what."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import run_here
from fusion_support import BASIC, FIRST, PAIRS, RESIDUAL, RESIDUAL_ON, SHORTCUT, SHORTCUT_ON, kernel_for_all
from tuning_support import FakeBench, fresh_tables

from cupy_resnet.binding import bind_shapes
from cupy_resnet.conv2d import H100, Conv2dPair, Conv2dProblem, back_to_back, choose, choose_shortcut, tuned
from cupy_resnet.conv2d.back_to_back_choice import choose_back_to_back
from cupy_resnet.conv2d.configs import NoConfig
from cupy_resnet.conv2d.pieces import halves, steps
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.conv2d.tuned import APART
from cupy_resnet.engines.base import Fusions
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine
from cupy_resnet.networks import describe
from cupy_resnet.tuning import Candidate, Tuner, Workload, bench, candidates, network_problems, remember, tune
from cupy_resnet.tuning.entrants import Apart, expected
from cupy_resnet.tuning.workloads import counted_alone, workloads


@pytest.fixture(autouse=True)
def everything_may_be_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fresh_tables(tmp_path, monkeypatch)
    kernel_for_all(monkeypatch)
    yield
    kernel_for_all(monkeypatch)  # forgets what was decided


def counts_of(model: str, N: int = 32, size: int = 224) -> dict[Problem, int]:
    listed = network_problems(describe(model), (N, 3, size, size), "fp16", H100)
    return {workload.problem: workload.count for workload in listed}


# What a network has ---------------------------------------------------------------------------------------------------


def test_everything_that_may_be_one_kernel_is_listed_behind_its_parts() -> None:
    for model in ("resnet18", "resnet50", "resnet101", "wide_resnet50_2"):
        problems = list(counts_of(model))
        for place, problem in enumerate(problems):
            assert set(halves(problem) or ()) <= set(problems[:place]), problem
        assert [steps(problem) for problem in problems] == sorted(steps(problem) for problem in problems)


def test_a_bottlenecks_end_counts_alone_and_with_what_follows() -> None:
    counts = counts_of("resnet50")
    assert {pair: counts[pair] for pair in PAIRS} == {RESIDUAL: 3, SHORTCUT: 1, RESIDUAL_ON: 2, SHORTCUT_ON: 1}
    assert counts[replace(RESIDUAL, following=256)] == 1  # the next stage begins with a 1×1 of twice the filters
    assert counts[SHORTCUT.second] == counts[SHORTCUT.second.shortcut_alone()] == 1
    assert counts[RESIDUAL.second] == 4
    assert not any(isinstance(problem, Conv2dPair) and problem.first.K == 512 for problem in counts)


def test_resnet18_has_shortcuts() -> None:
    counts = counts_of("resnet18")
    assert counts[BASIC] == counts[BASIC.shortcut_alone()] == 1
    assert counts[BASIC.without_shortcut()] == 4 - 1
    assert not any(isinstance(problem, Conv2dPair) for problem in counts)


def test_residuals() -> None:
    listed = network_problems(describe("resnet50"), (32, 3, 224, 224), "fp16", H100)
    residual = {workload.problem: workload.residual for workload in listed}
    for pair in PAIRS:
        assert residual[pair] == (not pair.shortcut_channels)
    assert residual[RESIDUAL.second]
    for problem in (FIRST, SHORTCUT.second, SHORTCUT.second.shortcut_alone()):
        assert not residual[problem]


@pytest.mark.parametrize("size", [224, 200])
@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_nothing_of_a_pass_counts_twice(model: str, size: int) -> None:
    """Where sides are even. With 200 pixels a side becomes odd, and a shortcut alone would read a larger image."""
    counts = counts_of(model, size=size)
    alone = counted_alone(counts)
    flops = sum(count * problem.flops for problem, count in alone.items())
    ops = ShapeEngine("fp16", fusions=Fusions(stem=True))
    bind_shapes(describe(model))(ops, ShapeArray((32, size, size, 3)))
    plain = sum(workload.count * workload.problem.flops for workload in workloads([ops.records]))
    assert flops == pytest.approx(plain, rel=1e-9 if size == 224 else 0.1)
    largest = {problem for problem in counts if alone[problem] and steps(problem) > 1}
    assert largest
    # What has no result counts with its parts.
    kept = {problem: count for problem, count in counts.items() if steps(problem) != 2}
    assert sum(count * problem.flops for problem, count in counted_alone(kept).items()) == pytest.approx(flops, rel=0.1)


def test_other_arithmetic_has_no_pairs() -> None:
    for precision in ("fp32", "fp32-tc"):
        listed = network_problems(describe("resnet50"), (32, 3, 224, 224), precision, H100)
        assert not any(isinstance(workload.problem, Conv2dPair) for workload in listed)


# What races -----------------------------------------------------------------------------------------------------------


def variants_of(candidate: Candidate) -> Any:
    """A candidate's kernels as nested pairs of names."""
    if isinstance(candidate, Apart):
        return variants_of(candidate.first), variants_of(candidate.second)
    return candidate.variant


@pytest.mark.parametrize("problem", [*PAIRS, BASIC, SHORTCUT.second], ids=str)
def test_the_first_candidate_is_the_best_way_in_pieces(problem: Problem) -> None:
    apart, *fused = candidates(problem, H100, spread_nan=True)
    parts = halves(problem)
    assert parts is not None
    assert isinstance(apart, Apart)
    assert apart.variant == APART
    assert fused
    assert not any(isinstance(candidate, Apart) for candidate in fused)
    assert expected(problem, H100, apart) == sum(
        expected(part, H100, half) for part, half in zip(parts, (apart.first, apart.second), strict=True)
    )
    assert str(apart) == "; ".join(map(str, apart.kernels()))
    for part, half in zip(parts, (apart.first, apart.second), strict=True):
        if isinstance(part, Conv2dProblem) and halves(part) is None:
            assert half.config == choose(part, H100, spread_nan=True).config
    forms = [form for kernel in apart.kernels() for form in bench._sources(kernel)]
    assert list(bench._sources(apart)) == forms


def test_what_is_known_to_be_fastest_takes_part_however_deep() -> None:
    parts = (FIRST, *(halves(SHORTCUT.second) or ()), SHORTCUT_ON.third)
    names = {part: Candidate(f"kernel {n}", NoConfig()) for n, part in enumerate(parts)}
    fastest: dict[Any, Candidate] = dict(names)
    apart = Apart.of(*(names[part] for part in halves(SHORTCUT.second) or ()))
    fastest[SHORTCUT.second] = apart
    two = candidates(SHORTCUT, H100, fastest=fastest)[0]
    assert variants_of(two) == ("kernel 0", ("kernel 1", "kernel 2"))
    fastest[SHORTCUT] = two
    assert variants_of(candidates(SHORTCUT_ON, H100, fastest=fastest)[0]) == (variants_of(two), "kernel 3")
    fastest[SHORTCUT] = Candidate(back_to_back.name, apart.config)
    assert variants_of(candidates(SHORTCUT_ON, H100, fastest=fastest)[0]) == (back_to_back.name, "kernel 3")


def everything() -> list[Workload]:
    """The largest first."""
    problems: list[Problem | None] = [SHORTCUT_ON, SHORTCUT, SHORTCUT.second, SHORTCUT_ON.third, FIRST]
    problems += [SHORTCUT.second.shortcut_alone(), SHORTCUT.second.without_shortcut()]
    return [Workload(problem) for problem in problems if problem is not None]


def by_kind(*slow: int) -> Callable[[Workload, Candidate], float]:
    """One kernel takes 10 µs and 30 for a number of steps in `slow`; apart it is 20."""

    def time(workload: Workload, candidate: Candidate) -> float:
        first = candidates(workload.problem, H100, spread_nan=True)[1]
        if isinstance(candidate, Apart):
            return 20.0
        return (30.0 if steps(workload.problem) in slow else 10.0) + (candidate != first)

    return time


@pytest.mark.parametrize(
    ("slow", "ways"),
    [
        ((), {2: "one", 3: "one", 4: "one"}),
        ((4,), {2: "one", 3: "one", 4: (back_to_back.name, "kernel")}),
        ((3, 4), {2: "one", 3: ("kernel", "kernel"), 4: (("kernel", "kernel"), "kernel")}),
        ((2, 3), {2: ("kernel", "kernel"), 3: ("kernel", ("kernel", "kernel")), 4: "one"}),
        ((2, 3, 4), {2: "x", 3: "x", 4: (("kernel", ("kernel", "kernel")), "kernel")}),
    ],
)
def test_a_race_against_the_best_known_way(slow: tuple[int, ...], ways: dict[int, Any]) -> None:
    fake = FakeBench(by_kind(*slow))
    report = tune(everything(), fake, clock=fake.clock)
    assert not report.skipped
    raced = [steps(workload.problem) for workload in fake.raced]
    assert raced == sorted(raced)
    best = {steps(result.workload.problem): result.best for result in report.results}

    def like(candidate: Candidate, way: Any) -> bool:
        if not isinstance(candidate, Apart):
            return way in ("one", "kernel") or candidate.variant == way
        return way == "x" or (like(candidate.first, way[0]) and like(candidate.second, way[1]))

    for number, way in ways.items():
        assert isinstance(best[number], Apart) == (number in slow)
        assert like(best[number], way), best[number]
    remember(H100.name, report.entries)
    tuned.forget()
    for pair in (SHORTCUT, SHORTCUT_ON):
        choice = choose_back_to_back(pair, H100, spread_nan=True)
        assert (choice.config is None) == (steps(pair) in slow)
        assert "timed on this GPU" in choice.reason
    fused, reason = choose_shortcut(SHORTCUT.second, H100, spread_nan=True)
    assert fused == (2 not in slow)
    assert "timed on this GPU" in reason
    # Later, for another network, what the table says takes part.
    again = candidates(SHORTCUT_ON, H100, spread_nan=True)[0]
    assert again in [standing.entrant for standing in report.results[0].standings]


def test_a_shortcut_that_is_wrong_is_computed_apart_however_many_are() -> None:
    fake = FakeBench(by_kind(), rejected=lambda workload, entrants: dict.fromkeys(entrants[1:], "its output differs"))
    report = tune([Workload(BASIC)], fake, clock=fake.clock)
    (result,) = report.results
    assert result.entry.variant == APART
    remember(H100.name, report.entries)
    assert not choose_shortcut(BASIC, H100, spread_nan=True)[0]


def test_a_model_that_tunes_itself_times_everything_once() -> None:
    network, fake = bind_shapes(describe("resnet18")), FakeBench(lambda workload, candidate: 1.0)
    for _ in range(2):
        Tuner(network, "fp16", 0, make_bench=lambda device_id: fake)(2, 64, 64)
        tuned.forget()
    assert len(fake.raced) == len({workload.problem for workload in fake.raced}) == len(counts_of("resnet18", 2, 64))


def test_the_command_adds_up_one_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything takes as many microseconds as it has convolutions: each of a pass counts once."""
    monkeypatch.setattr(
        "cupy_resnet.tuning.GpuBench", lambda cold_l2: FakeBench(lambda w, candidate: float(steps(w.problem)))
    )
    done = run_here(monkeypatch, capsys, "tune", "resnet50", "--batch", "2", "--size", "256", "--no-in-network")
    total = float(4 * 4 + 3 * 12)  # a downsample in 4 blocks, 3 in all
    assert f"N = 2: {total:.1f} → {total:.1f} µs for those of one forward pass, 1.00×" in done.out
