"""What is timed, how often, and what is made of it: on a bench that takes its times from a function."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_support import LAYER, PLAIN, FakeBench, fresh_tables, rank

from cupy_resnet.conv2d import H100, PRECISIONS, Conv2dProblem, Device, choose, tuned
from cupy_resnet.conv2d.cost_model import cost
from cupy_resnet.errors import EngineUnavailableError
from cupy_resnet.networks import describe, list_models
from cupy_resnet.tuning import Candidate, Tuner, Workload, candidates, network_problems, possible_precision, tune
from cupy_resnet.tuning import bench as gpu_bench
from cupy_resnet.tuning.entrants import HOPELESS

T4 = Device(name="T4", compute_capability=(7, 5), sm_count=40, shared_memory_per_block=64 << 10)
A100 = Device(name="A100", compute_capability=(8, 0), sm_count=108, shared_memory_per_block=163 << 10)
B200 = Device(name="B200", compute_capability=(10, 0), sm_count=148, shared_memory_per_block=227 << 10)
OLD = Device(name="old", compute_capability=(6, 1), sm_count=20, shared_memory_per_block=48 << 10)
SMALL = replace(LAYER, N=1)
GROUPED = replace(LAYER, groups=32)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


def by_model(problem: Conv2dProblem, spread_nan: bool = True) -> Candidate:
    choice = choose(problem, H100, spread_nan=spread_nan, use_tables=False)
    return Candidate(choice.variant, choice.config)


def favouring(favourites: Mapping[Conv2dProblem, Candidate]) -> Callable[[Workload, Candidate], float]:
    """Times by which one candidate for each problem is the fastest, the others behind it as listed."""

    def time(workload: Workload, candidate: Candidate) -> float:
        return 5.0 if candidate == favourites.get(workload.problem) else 10.0 + rank(workload.problem, candidate)

    return time


# Candidates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("spread_nan", [False, True])
@pytest.mark.parametrize("problem", [LAYER, SMALL, GROUPED, replace(LAYER, C=3, K=17)], ids=str)
def test_candidates_begin_with_the_models_choice_and_leave_out_the_hopeless(
    problem: Conv2dProblem, spread_nan: bool, precision: str
) -> None:
    problem = replace(problem, precision=precision)
    found = candidates(problem, H100, spread_nan=spread_nan)
    costs = [cost(problem, H100, candidate.config) for candidate in found]
    assert found[0] == by_model(problem, spread_nan)
    assert costs == sorted(costs)
    assert costs[-1] <= HOPELESS * costs[0]
    assert len(set(found)) == len(found) > 1
    names = {candidate.variant for candidate in found}
    tensor_cores, cuda_cores = {"conv2d_mma", "conv2d_mma_patch"}, {"conv2d_implicit_gemm", "conv2d_winograd"}
    if precision in ("fp16", "bf16", "tf32") and problem.groups == 1 and problem.C == 256:
        tensor_cores |= {"conv2d_wgmma", "conv2d_wgmma_patch"}
        assert {"conv2d_wgmma", "conv2d_wgmma_patch"} <= names
    if precision == "fp32-tc" and problem == replace(LAYER, precision=precision):  # for a single image it is hopeless
        tensor_cores |= {"conv2d_wgmma_3xtf32"}
        assert "conv2d_wgmma_3xtf32" in names
    assert names <= (tensor_cores if PRECISIONS[precision].tensor_cores else cuda_cores)
    if not spread_nan:
        assert "conv2d_winograd" not in names
        assert all(getattr(candidate.config, "merged_groups", 1) == 1 for candidate in found)


def test_split_k_winograd_merged_groups_wgmma_and_wmma_take_part_where_they_apply() -> None:
    small = replace(LAYER, N=1, H=7, W=7, C=512, K=512)
    assert len({getattr(candidate.config, "split_k_slices", 1) for candidate in candidates(small, H100)}) > 3
    assert "conv2d_winograd" in {candidate.variant for candidate in candidates(PLAIN, H100, spread_nan=True)}
    merged = {candidate.config.merged_groups for candidate in candidates(GROUPED, H100, spread_nan=True)}  # type: ignore[attr-defined]
    assert merged > {1}
    for device, fastest in ((H100, {"conv2d_wgmma", "conv2d_wgmma_patch"}), (A100, set()), (B200, set())):
        names = {candidate.variant for candidate in candidates(LAYER, device)}
        assert names == {"conv2d_mma", "conv2d_mma_patch", *fastest}, device.name
    assert {candidate.variant for candidate in candidates(LAYER, T4)} == {"conv2d_wmma"}


def test_every_precision_has_a_tolerance() -> None:
    assert gpu_bench.TOLERANCES.keys() == PRECISIONS.keys()


# Networks -----------------------------------------------------------------------------------------------------------


def test_the_convolutions_of_a_network() -> None:
    workloads = network_problems(describe("resnet18"), (8, 3, 224, 224), "fp16", H100)
    joint = [workload for workload in workloads if workload.problem.shortcut_channels]
    assert [workload.count for workload in joint] == [1, 1, 1]
    # Of 20: the stem is an operation of its own. What may be one kernel counts apart as well.
    assert sum(workload.count for workload in workloads) - 3 == 19
    first = Conv2dProblem(N=8, H=56, W=56, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
    assert workloads[0] == Workload(first, count=4, residual=True)
    assert len({workload.problem for workload in workloads}) == len(workloads)
    assert {workload.problem.precision for workload in workloads} == {"fp16"}
    assert not any(workload.residual for workload in workloads if workload.problem.stride_h == 2)


def test_a_stem_that_is_an_ordinary_convolution_is_among_them() -> None:
    stem = network_problems(describe("resnet20"), (2, 3, 32, 32), "tf32", H100)[0].problem
    assert (stem.C, stem.K, stem.R) == (3, 16, 3)
    unfused = network_problems(describe("resnet18"), (1, 3, 64, 64), "fp32", H100, fuse=False)[0].problem
    assert (unfused.C, unfused.R) == (3, 7)


@pytest.mark.parametrize("model", list_models())
def test_every_network_can_be_tuned(model: str) -> None:
    for workload in network_problems(describe(model), (1, 3, 64, 64), "bf16", H100):
        assert candidates(workload.problem, H100, spread_nan=True)


def test_the_stem_is_among_them_where_its_own_kernel_does_not_apply() -> None:
    network = describe("resnet18")
    for precision, device in (("fp32", H100), ("fp16", T4)):
        stem = network_problems(network, (1, 3, 64, 64), precision, device)[0].problem
        assert (stem.C, stem.R, stem.stride_h) == (3, 7, 2)
    five_channels = network_problems(describe("resnet18", in_channels=5), (1, 5, 64, 64), "fp16", H100)
    assert five_channels[0].problem.R == 7


def test_the_classifier_is_among_them_where_it_runs_as_a_convolution() -> None:
    listed = network_problems(describe("resnet50"), (32, 3, 64, 64), "fp16", H100)
    (many,) = (workload.problem for workload in listed if workload.problem.K == 1000)
    assert isinstance(many, Conv2dProblem)
    assert (many.N, many.C, many.K, many.R, many.precision) == (32, 2048, 1000, 1, "tf32")
    few = network_problems(describe("resnet50"), (1, 3, 64, 64), "fp16", H100)
    assert all(workload.problem.K != 1000 for workload in few)


@pytest.mark.parametrize(
    ("precision", "device", "resolved"),
    [
        ("auto", H100, "fp16"),
        ("auto", T4, "fp16"),
        ("auto", OLD, "fp32"),
        ("tf32", H100, "tf32"),
        ("fp32", T4, "fp32"),
    ],
)
def test_precisions(precision: str, device: Device, resolved: str) -> None:
    assert possible_precision(precision, device) == resolved


def test_a_precision_that_the_gpu_does_not_know_is_an_error() -> None:
    with pytest.raises(
        EngineUnavailableError, match=r"precision bf16 needs .* T4 has 7\.5; it can run in fp32 and fp16"
    ):
        possible_precision("bf16", T4)


def test_an_empty_batch_has_nothing_to_tune_and_a_wrong_shape_is_an_error() -> None:
    assert network_problems(describe("resnet20"), (0, 3, 32, 32), "fp16", H100) == []
    with pytest.raises(ValueError, match="resnet20"):
        network_problems(describe("resnet20"), (1, 4, 32, 32), "fp16", H100)


# Tuning -------------------------------------------------------------------------------------------------------------


def test_the_fastest_is_found_and_compared_with_the_models_choice() -> None:
    favourites = {problem: candidates(problem, H100, spread_nan=True)[2] for problem in (LAYER, PLAIN)}
    bench = FakeBench(favouring(favourites))
    workloads = [Workload(SMALL), Workload(LAYER, 3, residual=True), Workload(PLAIN)]
    report = tune(workloads, bench, clock=bench.clock)
    assert report.device == H100
    assert not report.skipped
    assert [result.workload for result in report.results] == workloads
    small, layer, plain = report.results
    assert small.best == small.model == by_model(SMALL)
    assert (layer.best, layer.model) == (favourites[LAYER], by_model(LAYER))
    assert (layer.microseconds, layer.model_microseconds) == (5.0, 10.0)
    assert plain.best == favourites[PLAIN]
    assert report.seconds == pytest.approx(0.001 * len(bench.samples))
    for result, entry in zip(report.results, report.entries, strict=True):
        assert entry.key == (result.workload.problem, True)
        assert entry.config_among([result.best.config]) == result.best.config
        assert entry.candidates == len(candidates(entry.problem, H100, spread_nan=True))
    assert (report.entries[1].microseconds, report.entries[1].next_microseconds) == (5.0, 10.0)


def test_the_choice_does_not_depend_on_what_was_remembered_before() -> None:
    bench = FakeBench(favouring({LAYER: candidates(LAYER, H100, spread_nan=True)[1]}))
    first = tune([Workload(LAYER)], bench, clock=bench.clock)
    tuned.keep(H100.name, first.entries)
    assert tune([Workload(LAYER)], bench, clock=bench.clock).results == first.results


def test_what_is_wrong_is_neither_timed_nor_chosen(caplog: pytest.LogCaptureFixture) -> None:
    def first_is_wrong(workload: Workload, entrants: Sequence[Candidate]) -> dict[Candidate, str]:
        return {entrants[0]: "its output differs"}

    bench = FakeBench(favouring({LAYER: by_model(LAYER)}), rejected=first_is_wrong)
    (result,) = tune([Workload(LAYER)], bench, clock=bench.clock).results
    assert result.model == by_model(LAYER) != result.best
    assert result.model_microseconds is None
    assert result.entry.candidates == len(candidates(LAYER, H100, spread_nan=True)) - 1
    assert f"{by_model(LAYER)} is not considered: its output differs" in caplog.text


def test_where_most_disagree_nothing_is_concluded() -> None:
    def most_are_wrong(workload: Workload, entrants: Sequence[Candidate]) -> dict[Candidate, str]:
        return dict.fromkeys(entrants[1:] if workload.problem == LAYER else [], "its output differs")

    bench = FakeBench(favouring({}), rejected=most_are_wrong)
    report = tune([Workload(LAYER), Workload(SMALL)], bench, clock=bench.clock)
    number = len(candidates(LAYER, H100, spread_nan=True))
    assert report.skipped == {Workload(LAYER): f"only 1 of {number} candidates agree"}
    assert [result.workload.problem for result in report.results] == [SMALL]


def test_what_does_not_fit_into_memory_or_has_no_kernel_is_skipped_by_name() -> None:
    def no_room(workload: Workload, entrants: Sequence[Candidate]) -> dict[Candidate, str]:
        if workload.problem == LAYER:
            raise MemoryError("operands take 99.0 GB, and 1.0 GB are free")
        return {}

    bench = FakeBench(favouring({}), rejected=no_room)
    huge = replace(LAYER, N=2**24)
    report = tune([Workload(LAYER), Workload(huge), Workload(SMALL)], bench, clock=bench.clock)
    assert [result.workload.problem for result in report.results] == [SMALL]
    assert report.skipped[Workload(LAYER)] == "operands take 99.0 GB, and 1.0 GB are free"
    assert "output pixels" in report.skipped[Workload(huge)]


def test_the_budget_is_kept_and_spent_on_the_heaviest_first() -> None:
    problems = [replace(LAYER, N=N) for N in (1, 8, 64, 256)]
    bench = FakeBench(favouring({}), seconds_per_sample=0.1)
    seen: list[tuple[int, int, int]] = []
    report = tune(
        [Workload(problem) for problem in problems],
        bench,
        budget_s=3.0,
        progress=lambda done, total, workload: seen.append((done, total, workload.problem.N)),
        clock=bench.clock,
    )
    assert seen == [(0, 4, 256), (1, 4, 64), (2, 4, 8), (3, 4, 1)]
    assert bench.raced[0].problem.N == 256
    # Each begun has one turn of all its candidates, at least: that may overrun, what is left then is not begun.
    timed = [result.workload.problem.N for result in report.results]
    assert timed == sorted(timed)
    assert 256 in timed
    assert {workload.problem.N for workload in report.skipped} == {1, 8, 64, 256} - set(timed)
    assert set(report.skipped.values()) == {"the budget of 3 s was spent"}
    assert report.seconds == pytest.approx(0.1 * len(bench.samples))
    last = bench.raced[-1].problem
    assert report.seconds < 3.0 + 0.1 * len(candidates(last, H100, spread_nan=True))


def test_results_are_handed_over_as_soon_as_they_are_there() -> None:
    found: list[Conv2dProblem] = []

    def interrupted(workload: Workload, entrants: Sequence[Candidate]) -> dict[Candidate, str]:
        if workload.problem == SMALL:
            raise KeyboardInterrupt
        return {}

    bench = FakeBench(favouring({}), rejected=interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune([Workload(LAYER), Workload(SMALL)], bench, found=lambda result: found.append(result.workload.problem))
    assert found == [LAYER]


def test_a_problem_given_twice_is_timed_once() -> None:
    bench = FakeBench(favouring({}))
    report = tune([Workload(LAYER, 2), Workload(SMALL), Workload(LAYER, 5)], bench, clock=bench.clock)
    assert [result.workload for result in report.results] == [Workload(LAYER, 2), Workload(SMALL)]
    assert len(bench.raced) == 2


# At the first call --------------------------------------------------------------------------------------------------


def test_a_tuner_measures_at_the_first_call_of_a_shape_and_remembers(caplog: pytest.LogCaptureFixture) -> None:
    network = describe("resnet20")
    first_layer = network_problems(network, (4, 3, 32, 32), "fp16", H100, fuse=False)[0].problem
    favourite = candidates(first_layer, H100, spread_nan=True)[1]
    bench = FakeBench(favouring({first_layer: favourite}))
    made: list[int] = []

    def make_bench(device_id: int) -> FakeBench:
        made.append(device_id)
        return bench

    tuner = Tuner(network, "fp16", 3, make_bench=make_bench)
    assert made == []
    with caplog.at_level(logging.INFO, "cupy_resnet"):
        tuner(4, 32, 32)
    raced = len(bench.raced)
    assert raced > 3
    assert f"resnet20: timing {raced} convolutions for (4, 3, 32, 32)" in caplog.text
    choice = choose(first_layer, H100, spread_nan=True)
    assert choice.config == favourite.config
    assert "timed on this GPU, 5.0 µs" in choice.reason
    tuner(4, 32, 32)
    Tuner(describe("resnet20"), "fp16", 3, make_bench=make_bench)(4, 32, 32)  # another model, the same layers
    tuned.forget()
    Tuner(describe("resnet20"), "fp16", 3, make_bench=make_bench)(4, 32, 32)  # another process
    assert len(bench.raced) == raced
    tuner(5, 32, 32)
    assert len(bench.raced) == 2 * raced
    assert set(made) == {3}


def test_threads_that_need_the_same_shape_wait_for_the_one_that_measures() -> None:
    measuring, threads = threading.Barrier(2), []

    def time(workload: Workload, candidate: Candidate) -> float:
        if not bench.samples[1:]:
            measuring.wait(10)
        return 1.0

    bench = FakeBench(time)
    tuner = Tuner(describe("resnet20"), "fp16", 0, make_bench=lambda device_id: bench)
    for _ in range(3):
        threads.append(threading.Thread(target=tuner, args=(1, 32, 32)))
        threads[-1].start()
    measuring.wait(10)
    for thread in threads:
        thread.join(60)
    assert len(bench.raced) == len({workload.problem for workload in bench.raced})
