"""Percentiles, the rule when a ratio is refused, and contenders taking turns."""

import statistics
from collections import Counter

import numpy as np
import pytest
from bench_support import FakeMeter
from hypothesis import given
from hypothesis import strategies as st

from cupy_resnet.proof.bench.statistics import FEWEST_SAMPLES, Summary, fastest, ratio
from cupy_resnet.proof.bench.timing import (
    FEWEST_TURNS,
    STREAM_RUNS,
    Contender,
    Effort,
    measure_latency,
    measure_stream,
    turns,
    warm_up,
)

BUFFERS = ("x0", "x1", "x2")


def samples(median: float, spread: float) -> Summary:
    """Eleven samples whose p10 and p90 are the second and the tenth."""
    return Summary.of([median + spread * step / 8 for step in (-9, -4, -3, -2, -1, 0, 1, 2, 3, 4, 9)])


def test_percentiles_of_what_is_counted_by_hand():
    found = Summary.of([float(value) for value in range(101)])
    assert (found.count, found.median, found.p10, found.p90, found.p99) == (101, 50.0, 10.0, 90.0, 99.0)
    assert found.spread == 80.0
    assert Summary.of([3.0]) == Summary(1, 3.0, 3.0, 3.0, 3.0)
    assert Summary.of([1.0, 2.0]).p99 == pytest.approx(1.99)
    with pytest.raises(ValueError, match="no samples"):
        Summary.of([])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50))
def test_percentiles_are_ordered_within_the_samples_and_do_not_depend_on_their_order(values):
    found = Summary.of(values)
    assert min(values) <= found.p10 <= found.median <= found.p90 <= found.p99 <= max(values)
    assert found.median == pytest.approx(statistics.median(values))
    assert found == Summary.of(values[::-1])


def test_one_outlier_in_twenty_changes_no_spread():
    calm = [1.0 + 0.001 * step for step in range(20)]
    assert Summary.of([*calm[:-1], 100.0]).spread == pytest.approx(Summary.of(calm).spread, rel=0.1)


def test_a_ratio_is_the_rivals_time_over_ours():
    found = ratio(samples(2.0, 0.1), samples(3.0, 0.2))
    assert found.value == pytest.approx(1.5)
    assert found.reason == ""
    assert str(found) == "1.50×"
    assert ratio(samples(3.0, 0.2), samples(2.0, 0.1)).value == pytest.approx(2 / 3)


@pytest.mark.parametrize(("ours", "rival"), [(0.4, 0.0), (0.0, 0.4)])
def test_a_ratio_is_refused_when_either_spreads_more_than_they_differ(ours, rival):
    found = ratio(samples(2.0, ours), samples(2.3, rival))
    assert found.value is None
    assert str(found) == "–"
    assert "differ by 0.3 ms" in found.reason
    assert "p10 to p90: 0.4 ms" in found.reason
    # the same spread, and a larger difference
    assert ratio(samples(2.0, ours), samples(2.5, rival)).value == pytest.approx(1.25)


def test_a_ratio_of_few_samples_is_refused():
    few, enough = Summary.of([1.0] * (FEWEST_SAMPLES - 1)), Summary.of([2.0] * FEWEST_SAMPLES)
    for ours, rival in ((few, enough), (enough, few)):
        assert f"{FEWEST_SAMPLES - 1} samples" in ratio(ours, rival).reason
    assert ratio(enough, Summary.of([4.0] * FEWEST_SAMPLES)).value == 2.0


def test_the_fastest_has_the_smallest_median():
    summaries = {name: samples(median, 0.0) for name, median in (("a", 3.0), ("b", 1.0), ("c", 2.0))}
    assert fastest(summaries.items()) == ("b", summaries["b"])
    assert fastest([]) is None


def test_everyone_has_a_turn_in_every_round_and_everyone_begins_equally_often():
    order = list(turns(["a", "b", "c"], 6, FakeMeter(), seconds=1.0, fewest=1))
    assert [name for number, name in order if number < 3] == list("abcbcacab")
    assert Counter(name for _, name in order) == {"a": 6, "b": 6, "c": 6}
    rounds = [[name for number, name in order if number == each] for each in range(6)]
    assert Counter(names[0] for names in rounds) == {"a": 2, "b": 2, "c": 2}


def test_a_round_that_has_begun_is_finished_when_the_time_is_over():
    meter = FakeMeter()
    done = []
    for number, name in turns(["a", "b"], 100, meter, seconds=3.5, fewest=2):
        meter.time += 1.0
        done.append((number, name))
    assert len(done) == 4
    assert Counter(name for _, name in done) == {"a": 2, "b": 2}


def test_latency_waits_for_every_call_and_the_buffers_rotate():
    meter = FakeMeter()
    contenders = {name: Contender(meter.work(name, ms * 1e-3), BUFFERS) for name, ms in (("slow", 4.0), ("fast", 1.0))}
    times = measure_latency(contenders, meter, Effort(samples=6, warmup=0, seconds=60))
    assert times["slow"] == pytest.approx([4.0] * 6)
    assert times["fast"] == pytest.approx([1.0] * 6)
    for name in contenders:
        assert [x for called, x in meter.log if called == name] == [*BUFFERS, *BUFFERS]
    assert [name for name, _ in meter.log[:4]] == ["slow", "fast", "fast", "slow"]


def test_a_small_budget_leaves_the_fewest_turns():
    meter = FakeMeter()
    contenders = {"one": Contender(meter.work("one", 1.0), BUFFERS)}
    assert len(measure_latency(contenders, meter, Effort(samples=1000, seconds=0.5))["one"]) == FEWEST_TURNS
    assert len(measure_latency(contenders, meter, Effort(samples=3, seconds=0.5))["one"]) == 3
    latency = {"one": [1000.0]}
    assert (
        len(measure_stream(contenders, meter, Effort(samples=1000, seconds=0.5), latency)["one"].ms) == FEWEST_SAMPLES
    )


def test_calls_back_to_back_are_waited_for_once_a_run():
    meter = FakeMeter()
    # 0.25 ms on the host and 1 ms altogether: a single call takes 1 ms, many overlap on a real device, here they add up
    contenders = {"one": Contender(meter.work("one", 1e-3, host=0.25e-3), BUFFERS)}
    found = measure_stream(contenders, meter, Effort(samples=1000), {"one": [1.0, 1.0, 9.0]})["one"]
    assert found.calls == 100  # a tenth of a second, by the median
    assert found.ms == pytest.approx([1.0] * STREAM_RUNS)
    assert len(meter.log) == 100 * STREAM_RUNS
    assert [x for _, x in meter.log] == [BUFFERS[number % 3] for number in range(100 * STREAM_RUNS)]


def test_slow_calls_make_short_runs_and_quick_ones_do_not_make_endless_ones():
    meter = FakeMeter()
    contenders = {
        "slow": Contender(meter.work("slow", 2.0), BUFFERS),
        "quick": Contender(meter.work("q", 1e-7), BUFFERS),
    }
    found = measure_stream(contenders, meter, Effort(samples=5), {"slow": [2000.0], "quick": [1e-4]})
    assert (found["slow"].calls, found["quick"].calls) == (1, 1000)


def test_the_warm_up_ends_with_its_share_of_the_budget():
    meter = FakeMeter()
    warm_up({"slow": Contender(meter.work("slow", 1.0), BUFFERS)}, meter, Effort(warmup=50, seconds=10.0))
    assert len(meter.log) == 3  # two seconds, the call that passes them included
    meter.log.clear()
    warm_up({"quick": Contender(meter.work("quick", 1e-3), BUFFERS)}, meter, Effort(warmup=50, seconds=10.0))
    assert len(meter.log) == 50


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"warmup": -1}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_an_effort_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="samples must be"):
        Effort(**wrong)


def test_the_processors_meter_sees_memory_that_is_held_and_memory_that_was():
    from cupy_resnet.proof.bench.meters import CpuMeter

    meter = CpuMeter()
    mark = meter.memory_mark()
    if mark is None:
        pytest.skip("this system does not tell the memory of a process")
    passing = np.ones(40_000_000, np.uint8)
    del passing
    assert 35e6 < meter.memory_peak(mark) < 80e6
    again = meter.memory_mark()
    assert meter.memory_peak(again) < 20e6
    assert meter.memory_peak(None) is None
