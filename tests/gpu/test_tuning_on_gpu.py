"""Tuning on a GPU: what is timed is right and ready to be replayed, and what is found is followed."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tuning_support import fresh_tables

from cupy_resnet.conv2d import PRECISIONS, VARIANTS, Conv2dProblem, choose, tuned
from cupy_resnet.conv2d.variants import Filter
from cupy_resnet.networks import Network, describe, random_state_dict
from cupy_resnet.tuning import (
    Candidate,
    GpuBench,
    GpuPasses,
    Tuner,
    Workload,
    bind_at_random,
    candidates,
    network_problems,
    remember,
    tune,
    tune_in_network,
)
from cupy_resnet.tuning.workloads import running

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "3×3": Conv2dProblem(N=4, H=14, W=14, C=256, K=256, R=3, S=3, pad_h=1, pad_w=1),
    "3×3 deep": Conv2dProblem(N=1, H=7, W=7, C=512, K=512, R=3, S=3, pad_h=1, pad_w=1),
    "3×3 stride 2": Conv2dProblem(N=4, H=28, W=28, C=64, K=128, R=3, S=3, stride_h=2, stride_w=2, pad_h=1, pad_w=1),
    "1×1": Conv2dProblem(N=4, H=14, W=14, C=1024, K=256, R=1, S=1),
    "groups": Conv2dProblem(N=4, H=14, W=14, C=128, K=128, R=3, S=3, pad_h=1, pad_w=1, groups=32),
    "odd channels": Conv2dProblem(N=2, H=9, W=9, C=13, K=17, R=3, S=3, pad_h=1, pad_w=1),
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known of this GPU; compiled kernels stay where they are."""
    return fresh_tables(tmp_path, monkeypatch)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_all_candidates_agree_and_can_be_timed(name: str, precision: str) -> None:
    bench = GpuBench()
    problem = replace(PROBLEMS[name], precision=precision)
    entrants = candidates(problem, bench.device, spread_nan=True)
    for residual, cold_l2 in ((False, False), (True, True)):
        bench.cold_l2 = cold_l2
        with bench.race(Workload(problem, residual=residual), entrants) as race:
            assert race.rejected == {}
            times = [race.sample(candidate) for candidate in entrants]
            assert all(0.5 < time < 1000 for time in times), times


@pytest.mark.alone
def test_times_are_those_of_the_kernel() -> None:
    """As measured one launch after the other on a kernel so long that launching it takes no time beside that."""
    import cupy

    bench = GpuBench()
    problem = Conv2dProblem(N=64, H=56, W=56, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
    (candidate, *_) = candidates(problem, bench.device)
    with bench.race(Workload(problem), [candidate]) as race:
        timed = statistics.median(race.sample(candidate) for _ in range(15))
        operands = race._operands[0]
        elapsed = []
        for _ in range(15):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            for _ in range(10):
                VARIANTS[candidate.variant].launch(problem, operands.whole, candidate.config)
            stop.record()
            stop.synchronize()
            elapsed.append(100 * cupy.cuda.get_elapsed_time(start, stop))
    assert timed == pytest.approx(statistics.median(elapsed), rel=0.1)


@pytest.mark.parametrize(
    ("fault", "place"),
    [("writes nothing", 0), ("writes nothing", 1), ("leaves one value out", 0), ("is a little off", 1)],
)
def test_a_wrong_output_is_found(fault: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GpuBench()
    problem = PROBLEMS["3×3"]
    good, bad, other = candidates(problem, bench.device)[:3]
    variant = VARIANTS[bad.variant]
    launch = variant.launch

    def faulty(problem: Conv2dProblem, operands: Any, config: Any) -> None:
        if config != bad.config:
            launch(problem, operands, config)
        elif fault == "leaves one value out":
            launch(problem, operands, config)
            operands.y[-1, -1, -1, -1] = np.nan
        elif fault == "is a little off":
            launch(problem, operands, config)
            operands.y[-1, -1] *= np.float32(1.01)

    monkeypatch.setattr(variant, "launch", faulty, raising=False)
    entrants = [good, other]
    entrants.insert(place, bad)
    with bench.race(Workload(problem), entrants) as race:
        assert list(race.rejected) == [bad]
        assert race.rejected[bad].startswith("its output differs by ")
        assert race.sample(other) > 0


@pytest.mark.alone
def test_what_does_not_fit_is_refused_and_memory_is_given_back() -> None:
    import cupy

    bench = GpuBench()
    huge = Conv2dProblem(N=4096, H=112, W=112, C=256, K=256, R=1, S=1)
    report = tune([Workload(huge)], bench)
    assert "GB are free" in report.skipped[Workload(huge)]
    tune([Workload(PROBLEMS["1×1"])], bench, budget_s=0.1)
    before = cupy.cuda.runtime.memGetInfo()[0]
    tune([Workload(replace(PROBLEMS["3×3"], N=256))], bench, budget_s=0.1)
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (64 << 20)  # what newly loaded kernels take


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_network_is_tuned_followed_and_still_right(precision: str) -> None:
    from cupy_resnet.binding import bind
    from cupy_resnet.engines.cuda_engine import CudaEngine

    engine = CudaEngine(precision=precision, spread_nan=True)
    network = describe("resnet18")
    bound = bind(network, random_state_dict(network), engine)
    bench = GpuBench()
    x = engine.upload(np.random.default_rng(0).standard_normal((2, 64, 64, 3), np.float32))
    before = engine.to_numpy(bound(engine, x)[0])
    Tuner(bound, precision, bench.device_id, budget_s=60.0)(2, 64, 64)  # enough where others keep the GPU busy
    workloads = network_problems(network, (2, 3, 64, 64), precision, bench.device)
    for workload in workloads:
        choice = choose(workload.problem, bench.device, spread_nan=True)
        assert " timed on this GPU, " in choice.reason
    after = engine.to_numpy(bound(engine, x)[0])
    scale = np.abs(before).max()
    np.testing.assert_allclose(after, before, rtol=0, atol=scale * (1e-4 if precision == "fp32" else 2e-2))


@pytest.mark.alone
def test_the_slowest_is_not_chosen() -> None:
    bench = GpuBench()
    problem = replace(PROBLEMS["3×3 deep"], precision="fp16")
    (result,) = tune([Workload(problem)], bench, budget_s=5.0).results
    remember(bench.device.name, [result.entry])
    choice = choose(problem, bench.device, spread_nan=True)
    assert Candidate(choice.variant, choice.config) == result.best
    assert result.microseconds == min(standing.median for standing in result.standings[:4])
    with bench.race(Workload(problem), [result.best, result.standings[-1].entrant]) as race:
        fast, slow = ([race.sample(s) for _ in range(9)] for s in (result.best, result.standings[-1].entrant))
    assert statistics.median(fast) < statistics.median(slow)


def test_what_is_tuned_in_the_network_is_right_and_leaves_nothing_behind() -> None:
    """In few seconds, with times of this GPU: what it finds differs from run to run, what holds of that does not."""
    bench = GpuBench()
    network, shape, gpu = describe("resnet20"), (8, 3, 32, 32), bench.device.name
    bound, engine = bind_at_random(network, "fp16", bench.device_id)
    x = engine.upload(np.random.default_rng(0).standard_normal((8, 32, 32, 3), np.float32))
    before, forms = engine.to_numpy(bound(engine, x)[0]), filter_forms(bound)
    followed = running(network, shape, "fp16", bench.device)
    seen: list[Workload] = []
    with GpuPasses(bound, engine, shape) as passes:
        first, second = passes.capture(), passes.capture()
        np.testing.assert_array_equal(first.logits, second.logits)
        assert 1 < first.sample() < 10_000
        second.close()
        first.close()
        found = tune_in_network(
            *(network, shape, "fp16", bench, passes),
            budget_s=8.0,
            progress=lambda done, total, workload: seen.append(workload),
        )
    assert seen
    assert found.after <= found.before
    assert tuned._kept.get(gpu, {}) == {}
    assert not tuned.own_path(gpu).exists()
    assert running(network, shape, "fp16", bench.device) == followed
    assert filter_forms(bound) == forms
    for entry in found.entries:
        assert tuned.Entry.from_dict(entry.as_dict()) == entry
    remember(gpu, found.entries)
    now = running(network, shape, "fp16", bench.device)
    for change in {change.workload.problem: change for change in found.changes}.values():
        chosen = now.get(change.workload.problem)
        assert chosen is None or chosen.candidate.launched == change.after.launched
    after = engine.to_numpy(bound(engine, x)[0])
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-2 * np.abs(before).max())


def filter_forms(network: Network) -> dict[str, int]:
    """How many forms kernels have derived from each filter."""
    return {layer.name: len(layer.weight.packed) for layer in network.layers() if isinstance(layer.weight, Filter)}
