"""`cupy-resnet tune`, on a bench without a GPU."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_support import Outcome, run, run_here
from tuning_support import FakeBench, FakePasses, fresh_tables, rank

from cupy_resnet.conv2d import H100, choose, tuned
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.networks import Network, describe
from cupy_resnet.tuning import Candidate, Workload, candidates, network_problems
from cupy_resnet.tuning.workloads import Running, running

Tune = Callable[..., Outcome]
Pass = Mapping[Problem, Running]


def second_best(workload: Workload, candidate: Candidate) -> float:
    """Times by which the cost model is always wrong."""
    return {0: 20.0, 1: 10.0}.get(rank(workload.problem, candidate), 30.0)


def fake_passes(
    bench: FakeBench, time: Callable[[Pass], float], network: Network, ops: str, shape: tuple[int, int, int, int]
) -> AbstractContextManager[FakePasses]:
    """Passes of what `bind_at_random` was given: the precision is in the place of the engine."""
    return nullcontext(FakePasses(partial(running, network, shape, ops, H100), time, bench))


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fresh_tables(tmp_path, monkeypatch)


@pytest.fixture
def tune(cache_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    """Runs the command on a bench that takes its times from `second_best`, or another function."""

    def call(
        *arguments: str,
        time: Callable[[Workload, Candidate], float] = second_best,
        pass_time: Callable[[Pass], float] = lambda pass_: 1000.0,
    ) -> Outcome:
        bench = FakeBench(time)
        monkeypatch.setattr("cupy_resnet.tuning.GpuBench", lambda cold_l2: bench)
        monkeypatch.setattr(
            "cupy_resnet.tuning.bind_at_random", lambda network, precision, device_id: (network, precision)
        )
        monkeypatch.setattr("cupy_resnet.tuning.GpuPasses", partial(fake_passes, bench, pass_time))
        return run_here(monkeypatch, capsys, "tune", *arguments)

    return call


def test_what_changed_against_the_cost_model_and_what_that_gains(tune: Tune) -> None:
    done = tune("resnet20", "--batch", "1,8")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["convolution", "times", "by", "the", "cost", "model", "µs", "fastest", "µs", "gain"]
    workloads = network_problems(describe("resnet20"), (1, 3, 32, 32), "fp16", H100)
    first = next(line for line in lines if line.startswith(str(workloads[0].problem)))
    assert first.endswith(" 2.00×")
    assert " 20.0  conv2d_mma, " in first
    both = 2 * len(workloads)
    assert len([line for line in lines if line.endswith(" 2.00×") and "conv2d_mma" in line]) == both
    assert f"{both} convolutions timed on {H100.name} in " in done.out
    total = sum(workload.count for workload in workloads)
    assert f"N = 8: {20 * total:.1f} → {10 * total:.1f} µs for those of one forward pass, 2.00×" in lines
    assert done.err == f"wrote {tuned.own_path(H100.name)}\n"


FIRST = network_problems(describe("resnet20"), (8, 3, 32, 32), "fp16", H100)[0].problem


def first_in_the_network(pass_: Pass) -> float:
    """Passes by which the cost model's choice, which is not the fastest alone, would be better for one convolution."""
    return 1000.0 - 20.0 * (rank(FIRST, pass_[FIRST].candidate) == 0 if FIRST in pass_ else False)


def close_behind(workload: Workload, candidate: Candidate) -> float:
    return {0: 11.0, 1: 10.0}.get(rank(workload.problem, candidate), 30.0)


def test_what_is_better_in_the_network_is_told_and_kept(tune: Tune, tmp_path: Path) -> None:
    path = tmp_path / "tuned_h100.json"
    given: dict[str, Any] = {"time": close_behind, "pass_time": first_in_the_network}
    done = tune("resnet20", "--batch", "1,8", "--output", str(path), **given)
    assert done.status == 0, done.err
    first, second = candidates(FIRST, H100, spread_nan=True)[:2]
    lines = done.out.splitlines()
    assert f"in the network {FIRST}: {first} in place of {second}" in lines
    assert any(line.startswith("N = 1: 1000.0 → 1000.0 µs for a whole pass, 1.00×; 0 of ") for line in lines)
    assert any(line.startswith("N = 8: 1000.0 → 980.0 µs for a whole pass, 1.02×; 1 of ") for line in lines)
    assert choose(FIRST, H100, spread_nan=True).config == first.config
    for table in (path, tuned.own_path(H100.name)):
        (kept,) = (e for e in tuned.Table.parse(table.read_bytes()).entries.values() if e.problem == FIRST)
        assert (kept.config_among([first.config]), kept.microseconds) == (first.config, 11.0)
    assert tuned._kept.get(H100.name, {}) == {}


def test_json_tells_of_the_network_too(tune: Tune) -> None:
    given: dict[str, Any] = {"time": close_behind, "pass_time": first_in_the_network}
    document = json.loads(tune("resnet20", "--batch", "8", "--json", **given).out)
    told = document["in_network"]["8"]
    assert (told["microseconds_before"], told["microseconds"]) == (1000.0, 980.0)
    (change,) = told["changes"]
    first, second = candidates(FIRST, H100, spread_nan=True)[:2]
    assert change == {"problem": str(FIRST), "before": str(second), "after": str(first), "ratio": 0.98}


def test_without_the_network_no_pass_is_captured(tune: Tune) -> None:
    given: dict[str, Any] = {"time": close_behind, "pass_time": first_in_the_network}
    done = tune("resnet20", "--batch", "8", "--no-in-network", **given)
    assert done.status == 0
    assert "network" not in done.out
    assert choose(FIRST, H100, spread_nan=True).config == candidates(FIRST, H100, spread_nan=True)[1].config


def test_it_is_followed_afterwards(tune: Tune) -> None:
    tune("resnet20", "--batch", "3")
    tuned.forget()
    for workload in network_problems(describe("resnet20"), (3, 3, 32, 32), "fp16", H100):
        choice = choose(workload.problem, H100, spread_nan=True)
        assert choice.config == candidates(workload.problem, H100, spread_nan=True)[1].config
        assert choice.reason.endswith("timed on this GPU, 10.0 µs (next best 20.0)")


def test_where_the_model_was_right_there_is_no_table(tune: Tune) -> None:
    done = tune(
        "resnet20",
        *("--batch", "1"),
        time=lambda workload, candidate: 10.0 + rank(workload.problem, candidate),
    )
    assert "gain" not in done.out
    assert "for 0 another configuration than the cost model's is fastest." in done.out
    assert [line.endswith(" 1.00×") for line in done.out.splitlines() if "those of one forward pass" in line] == [True]


def test_json_tells_the_same(tune: Tune) -> None:
    done = tune("resnet20", "--batch", "2", "--precision", "tf32", "--size", "16", "--json")
    document = json.loads(done.out)
    workloads = network_problems(describe("resnet20"), (2, 3, 16, 16), "tf32", H100)
    assert (document["model"], document["precision"], document["gpu"]) == ("resnet20", "tf32", H100.name)
    assert [result["problem"] for result in document["results"]] == [str(workload.problem) for workload in workloads]
    assert [result["count"] for result in document["results"]] == [workload.count for workload in workloads]
    for result in document["results"]:
        assert (result["microseconds"], result["model_microseconds"]) == (10.0, 20.0)
        assert result["config"] != result["model_config"]
        assert result["rejected"] == {}
    assert document["skipped"] == {}
    assert document["table"] == str(tuned.own_path(H100.name))


def test_output_writes_a_table_that_can_be_shipped(tune: Tune, tmp_path: Path) -> None:
    path = tmp_path / "tuned_h100.json"
    for images in ("1", "2"):
        done = tune("resnet20", "--batch", images, "--output", str(path))
        assert done.status == 0
        assert done.err.endswith(f"wrote {path}\n")
    table = tuned.Table.parse(path.read_bytes())
    assert (table.gpu, table.sources_digest) == ("NVIDIA H100", tuned.kernels_digest())
    assert {problem.N for problem, _ in table.entries} == {1, 2}


def test_what_is_skipped_is_told_and_without_any_result_the_status_is_1(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tune("resnet20", "--batch", "1", "--budget", "0.1")
    assert done.status == 0

    def no_room(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(FakeBench, "race", no_room)
    done = tune("resnet20", "--batch", "1")
    assert done.status == 1
    workloads = network_problems(describe("resnet20"), (1, 3, 32, 32), "fp16", H100)
    assert sorted(done.err.splitlines()) == sorted(f"skipped {workload.problem}: no room" for workload in workloads)
    assert "0 convolutions timed" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "1,x"), "numbers from 1, separated by commas"),
        (("--batch", ""), "numbers from 1, separated by commas"),
        (("--batch", "0"), "numbers from 1, separated by commas"),
        (("--precision", "fp15"), "unknown precision 'fp15'"),
        (("--budget", "0"), "--budget"),
        (("--size", "0"), "--size"),
    ],
)
def test_a_wrong_command_line_is_status_2(tune: Tune, arguments: tuple[str, ...], message: str) -> None:
    done = tune("resnet20", *arguments)
    assert done.status == 2
    assert message in " ".join(done.err.replace("│", " ").split())


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("tune", "resnet20", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.status == 1
    assert done.err.startswith("error: the CUDA engine needs ")
    assert not (tmp_path / "cache" / "tuned").exists()
