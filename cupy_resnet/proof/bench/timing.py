"""Contenders taking turns: single calls, each waited for, and calls back to back."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .meters import Meter
from .statistics import FEWEST_SAMPLES

FEWEST_TURNS = 10
"""Single calls that every contender gets, whatever the time budget, unless fewer were asked for."""
STREAM_RUNS = 20
STREAM_RUN_S = 0.1
MOST_STREAM_CALLS = 1000
WARMUP_SHARE = 0.2


@dataclass(frozen=True)
class Contender:
    """Something that can be called, and what it is called with.

    Args:
        call: takes one input; it may return before the result is there, as GPU calls do.
        inputs: buffers in the layout and type it likes best; calls go through them in rotation, so that no cache
            keyed by address or warmed by the last call helps one contender more than another.
    """

    call: Callable[[Any], Any]
    inputs: Sequence[Any]

    def turn(self, number: int) -> Any:
        """Makes the call with this number; returns its result."""
        return self.call(self.inputs[number % len(self.inputs)])


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure.

    Args:
        samples: single calls per contender.
        warmup: calls before them.
        seconds: for the single calls of all contenders, and again for the calls back to back. When they are over, that
            part ends early, but not before everyone had `FEWEST_TURNS` single calls or `FEWEST_SAMPLES` runs; the
            warm-up gets a fifth of them.

    Raises:
        ValueError: a number that cannot be.
    """

    samples: int = 1000
    warmup: int = 50
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.warmup < 0 or not self.seconds > 0:
            raise ValueError(
                f"samples must be at least 1, warmup at least 0 and seconds above 0, got {self.samples}, {self.warmup} "
                f"and {self.seconds}"
            )


def turns(names: Sequence[str], rounds: int, meter: Meter, *, seconds: float, fewest: int) -> Iterator[tuple[int, str]]:
    """Yields (round, name): everyone once a round, until the rounds or the seconds are over.

    Each round another one begins, so that nobody always follows the same neighbour's use of caches and power. A round
    that has begun is finished, and `fewest` rounds are made in any case.
    """
    begin = meter.now()
    for number in range(rounds):
        if number >= fewest and meter.now() - begin > seconds:
            return
        first = number % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            yield number, name


def warm_up(contenders: Mapping[str, Contender], meter: Meter, effort: Effort) -> None:
    """Calls every contender `effort.warmup` times, or as often as fits into its part of the warm-up's time."""
    share = WARMUP_SHARE * effort.seconds / max(1, len(contenders))
    for contender in contenders.values():
        begin = meter.now()
        for number in range(effort.warmup):
            _time(contender, meter, number, 1)
            if meter.now() - begin > share:
                break


def measure_latency(contenders: Mapping[str, Contender], meter: Meter, effort: Effort) -> dict[str, list[float]]:
    """Times single calls, the device idle before and waited for after: the host's time is included.

    Returns:
        Name to milliseconds, one per round; all the same number.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number, name in turns(
        list(contenders), effort.samples, meter, seconds=effort.seconds, fewest=min(FEWEST_TURNS, effort.samples)
    ):
        times[name].append(_time(contenders[name], meter, number, 1))
    return times


@dataclass(frozen=True)
class Stream:
    """Calls back to back.

    Args:
        calls: per run.
        ms: milliseconds per call of each run.
    """

    calls: int
    ms: list[float]


def measure_stream(
    contenders: Mapping[str, Contender], meter: Meter, effort: Effort, latency: Mapping[str, Sequence[float]]
) -> dict[str, Stream]:
    """Times runs of calls back to back, waited for at the end of a run only; contenders take turns run by run.

    Args:
        contenders: who.
        meter: of their device.
        effort: how much; `STREAM_RUNS` runs at most.
        latency: milliseconds of single calls, from which the length of a run follows: about `STREAM_RUN_S`.
    """
    calls = {name: _calls_per_run(statistics.median(latency[name])) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number, name in turns(
        list(contenders), min(STREAM_RUNS, effort.samples), meter, seconds=effort.seconds, fewest=FEWEST_SAMPLES
    ):
        times[name].append(_time(contenders[name], meter, number * calls[name], calls[name]))
    return {name: Stream(calls[name], times[name]) for name in contenders}


def _calls_per_run(ms: float) -> int:
    return max(1, min(MOST_STREAM_CALLS, round(STREAM_RUN_S * 1e3 / max(1e-6, ms))))


def _time(contender: Contender, meter: Meter, first: int, calls: int) -> float:
    """Milliseconds per call of `calls` calls, the device idle before and after."""
    meter.synchronize()
    start = meter.now()
    for number in range(first, first + calls):
        contender.turn(number)
    meter.synchronize()
    return (meter.now() - start) * 1e3 / calls
