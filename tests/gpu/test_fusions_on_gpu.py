"""What may be one kernel, timed on a GPU: whole and in pieces it gives the same, and what is faster is followed."""

from dataclasses import replace
from pathlib import Path

import pytest
from fusion_support import BASIC, PAIRS, SHORTCUT
from tuning_support import fresh_tables

from cupy_resnet.conv2d import Conv2dPair, choose_shortcut
from cupy_resnet.conv2d.back_to_back_choice import choose_back_to_back
from cupy_resnet.conv2d.pieces import halves
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.errors import UnsupportedProblemError
from cupy_resnet.tuning import GpuBench, Workload, candidates, remember, tune
from cupy_resnet.tuning.entrants import Apart

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("N", [2, 8])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("problem", [BASIC, SHORTCUT.second, *PAIRS], ids=str)
def test_all_ways_agree_and_the_fastest_is_followed(
    problem: Problem, precision: str, N: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_tables(tmp_path, monkeypatch)
    bench = GpuBench()
    if isinstance(problem, Conv2dPair):
        problem = replace(problem, first=replace(problem.first, N=N, precision=precision))
    else:
        problem = replace(problem, N=N, precision=precision)
    try:
        entrants = candidates(problem, bench.device, spread_nan=True)
    except UnsupportedProblemError as error:
        pytest.skip(str(error))
    with bench.race(Workload(problem), entrants) as race:
        assert race.rejected == {}
    report = tune([*map(Workload, parts_of(problem)), Workload(problem)], bench, budget_s=3.0)
    assert not report.skipped
    remember(bench.device.name, report.entries)
    best = report.results[-1].best
    if isinstance(problem, Conv2dPair):
        choice = choose_back_to_back(problem, bench.device, spread_nan=True)
        assert choice.config == (None if isinstance(best, Apart) else best.config)
    else:
        assert choose_shortcut(problem, bench.device, spread_nan=True)[0] is not isinstance(best, Apart)


def parts_of(problem: Problem) -> list[Problem]:
    """All that it is made of, smaller ones first."""
    return [part for half in halves(problem) or () for part in (*parts_of(half), half)]
