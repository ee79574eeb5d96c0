"""Who is sampled how often until the fastest is known; and the bench's numbers, with NumPy in place of CuPy."""

import random
import statistics
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tuning_support import LAYER

from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.tuning import Workload, bench, operands
from cupy_resnet.tuning.contest import FINALISTS, FIRST_SAMPLES, LAST_SAMPLES, contest


def test_the_fastest_wins_in_spite_of_noise_and_spikes() -> None:
    generator = random.Random(0)

    def sample(entrant: int) -> float:
        spike = 500.0 if generator.random() < 0.1 else 0.0
        return 10.0 + 0.5 * entrant + generator.gauss(0, 0.1) + spike

    for entrants in (list(range(40)), list(range(40))[::-1]):
        standings = contest(entrants, sample)
        assert standings[0].entrant == 0
        assert [standing.entrant for standing in standings[:3]] == [0, 1, 2]
        assert standings[0].median == pytest.approx(10.0, abs=0.2)


def test_everybody_is_sampled_a_little_and_finalists_much_in_turns() -> None:
    log: list[int] = []

    def sample(entrant: int) -> float:
        log.append(entrant)
        return float(entrant)

    standings = contest(range(16), sample)
    counts = Counter(log)
    assert [standing.entrant for standing in standings] == list(range(16))
    assert [counts[n] for n in range(FINALISTS)] == [LAST_SAMPLES] * FINALISTS
    assert all(counts[n] == FIRST_SAMPLES for n in range(8, 16))
    assert [standing.samples for standing in standings] == [counts[n] for n in range(16)]
    assert log[:32] == [*range(16), *range(16)]
    assert log[-8:] == [0, 1, 2, 3] * 2
    assert len(log) < 16 * LAST_SAMPLES / 2


@pytest.mark.parametrize("number", [1, 2, 4, 5, 100])
def test_any_number_of_entrants(number: int) -> None:
    standings = contest(range(number), float)
    assert [standing.entrant for standing in standings] == list(range(number))


def test_a_contest_that_is_out_of_time_ends_after_a_whole_turn() -> None:
    turns = iter([False, True])
    standings = contest([2, 0, 1], float, lambda: next(turns))
    assert [(standing.entrant, standing.samples) for standing in standings] == [(0, 2), (1, 2), (2, 2)]
    assert {standing.samples for standing in contest(range(9), float, lambda: True)} == {1}


def test_the_result_is_the_median() -> None:
    times = iter([9.0, 1.0, 5.0, *[4.0] * 30])
    seen: list[float] = []

    def sample(entrant: int) -> float:
        seen.append(next(times))
        return seen[-1]

    (standing,) = contest([0], sample)
    assert standing.median == statistics.median(seen) == 4.0


@pytest.fixture
def numpy_for_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", np)


@pytest.mark.usefixtures("numpy_for_cupy")
def test_operands_repeat_what_was_drawn_from_any_start() -> None:
    values = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(operands.repeat(values, (2, 5), 0).reshape(-1), [*range(7), 0, 1, 2])
    np.testing.assert_array_equal(operands.repeat(values, (9,), 12), [5, 6, *range(7)])
    np.testing.assert_array_equal(operands.repeat(values, (3,), 2), [2, 3, 4])


@pytest.mark.usefixtures("numpy_for_cupy")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_operands_are_stored_as_the_precision_says(precision: str) -> None:
    values = np.random.default_rng(0).standard_normal(1000, np.float32)
    stored = operands.stored(values, precision)
    assert stored.dtype == PRECISIONS[precision].storage
    expected = torch.from_numpy(values).to(
        {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    )
    np.testing.assert_array_equal(operands.as_float32(stored, precision), expected.float().numpy())


@pytest.mark.usefixtures("numpy_for_cupy")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_outputs_that_differ_are_told_apart_in_every_place(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CHUNK", 64)
    problem = replace(LAYER, precision=precision)
    race = bench.GpuRace(SimpleNamespace(normal=None, cold_l2=False), Workload(problem), None)
    reference = operands.stored(np.linspace(-1, 4, 200, dtype=np.float32), precision).reshape(2, 100)
    assert race._difference(reference.copy(), reference) == 0
    for place in (0, 63, 64, 199):
        for value, least in ((np.float32(9), 1.0), (np.float32(np.nan), np.inf), (np.float32(np.inf), np.inf)):
            output = reference.copy().reshape(-1)
            output[place] = operands.stored(np.array([value]), precision)[0]
            assert race._difference(output.reshape(2, 100), reference) >= least
    unwritten = np.full(reference.nbytes, 0xFF, np.uint8).view(reference.dtype).reshape(reference.shape)
    assert race._difference(unwritten, reference) == np.inf
    assert race._difference(unwritten, unwritten) == np.inf


def test_filters_are_as_many_as_push_each_other_out_of_the_cache() -> None:
    megabyte = 1 << 20
    assert operands.copies(9 * megabyte, 50 * megabyte) * 9 > 50 * operands.L2_MARGIN
    assert operands.copies(200 * megabyte, 50 * megabyte) == 1
    assert operands.copies(1000, 50 * megabyte) == operands.copies(0, 50 * megabyte) == operands.LAUNCHES
