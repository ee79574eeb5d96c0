"""What the tests of tuning share: a bench that has no GPU, and a folder for what is remembered."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, Device, tuned
from cupy_resnet.conv2d.cost_model import cost
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.conv2d.tuned import Entry, config_fields
from cupy_resnet.tuning import Candidate, Workload, candidates, remembering
from cupy_resnet.tuning.workloads import Running

LAYER = Conv2dProblem(N=8, H=14, W=14, C=256, K=256, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
PLAIN = Conv2dProblem(N=8, H=14, W=14, C=256, K=256, R=3, S=3, pad_h=1, pad_w=1)


def fresh_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty folder the cache folder, so that nothing is known of any GPU; returns it, not made yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(folder))
    for name in ("_known", "_kept"):
        monkeypatch.setattr(tuned, name, {})
    monkeypatch.setattr(tuned, "_warned", set())
    monkeypatch.setattr(remembering, "_told", set())
    monkeypatch.setattr(tuned, "_shipped", cache(tuple))
    tuned.kernels_digest.cache_clear()
    return folder


def assert_tables_tell_split_k_apart(variant: str, problem: Conv2dProblem) -> None:
    """Entries name each candidate, also when they have been written and read; those from before blocks of a cluster
    shared a tile, which lack `split_k_slices`, mean the form in which they do not.
    """
    found = VARIANTS[variant].candidates(problem, H100)
    for config in found:
        named = entry(Candidate(variant, config), problem)
        written = type(named).from_dict(json.loads(json.dumps(named.as_dict())))
        assert written == named
        assert written.config_among(found) == config
        fields = config_fields(config)
        if fields.pop("split_k_slices") == 1:
            assert replace(named, config=fields).config_among(found) == config


def assert_split_k_is_expected_to_win(variant: str, problem: Conv2dProblem) -> None:
    """By the cost model: in clusters whose blocks share a tile."""
    costs: dict[bool, list[float]] = {False: [], True: []}
    for config in VARIANTS[variant].candidates(problem, H100):
        costs[config_fields(config)["split_k_slices"] != 1].append(cost(problem, H100, config))
    assert min(costs[True]) < min(costs[False])


@cache
def _ranks(problem: Conv2dProblem) -> dict[Candidate, int]:
    return {candidate: n for n, candidate in enumerate(candidates(problem, H100, spread_nan=True))}


def rank(problem: Conv2dProblem, candidate: Candidate) -> int:
    """The place of a candidate on an H100 by the cost model, from 0."""
    return _ranks(problem)[candidate]


def entry(candidate: Candidate, problem: Problem, **changes: Any) -> Entry:
    """An entry by which `candidate` is the fastest."""
    values: dict[str, Any] = {
        "problem": problem,
        "spread_nan": True,
        "variant": candidate.variant,
        "config": config_fields(candidate.config),
        "microseconds": 12.3,
        "next_microseconds": 12.9,
        "candidates": 37,
    }
    return Entry(**values | changes)


@dataclass
class FakeBench:
    """Takes times from a function instead of a GPU, and keeps a log.

    Args:
        time: microseconds of a candidate on a workload.
        device: the GPU it pretends to be.
        rejected: what it finds wrong about candidates of a workload.
        seconds_per_sample: by how much its `clock` advances.
    """

    time: Callable[[Workload, Candidate], float]
    device: Device = H100
    device_id: int = 0
    rejected: Callable[[Workload, Sequence[Candidate]], Mapping[Candidate, str]] = lambda workload, candidates: {}
    seconds_per_sample: float = 0.001
    now: float = 0.0
    raced: list[Workload] = field(default_factory=list)
    samples: list[Candidate] = field(default_factory=list)

    @contextmanager
    def race(self, workload: Workload, candidates: Sequence[Candidate]) -> Iterator["FakeRace"]:
        self.raced.append(workload)
        yield FakeRace(self, workload, self.rejected(workload, candidates))

    def clock(self) -> float:
        return self.now


@dataclass
class FakeRace:
    bench: FakeBench
    workload: Workload
    rejected: Mapping[Candidate, str]

    def sample(self, candidate: Candidate) -> float:
        assert candidate not in self.rejected
        self.bench.samples.append(candidate)
        self.bench.now += self.bench.seconds_per_sample
        return self.bench.time(self.workload, candidate)


@dataclass
class FakePasses:
    """Captures nothing, but what a pass would launch by the tables of that moment; times come from a function.

    Args:
        now: what a pass would launch.
        time: microseconds of a pass.
        logits: its result.
        failure: called with what is to be captured, and may raise.
        bench: the clock that advances with each sample.
    """

    now: Callable[[], dict[Problem, Running]]
    time: Callable[[Mapping[Problem, Running]], float]
    bench: FakeBench
    logits: Callable[[Mapping[Problem, Running]], np.ndarray] = lambda pass_: np.ones((2, 3), np.float32)
    failure: Callable[[Mapping[Problem, Running]], None] = lambda pass_: None
    captured: list["FakePass"] = field(default_factory=list)
    samples: int = 0

    def capture(self) -> "FakePass":
        pass_ = self.now()
        self.failure(pass_)
        assert self.open < 2, "more than two are captured at once"
        self.captured.append(FakePass(self, pass_))
        return self.captured[-1]

    @property
    def open(self) -> int:
        return sum(pass_.alive for pass_ in self.captured)


@dataclass
class FakePass:
    passes: FakePasses
    launched: Mapping[Problem, Running]
    alive: bool = True

    @property
    def logits(self) -> np.ndarray:
        return self.passes.logits(self.launched)

    def sample(self) -> float:
        assert self.alive
        self.passes.samples += 1
        self.passes.bench.now += self.passes.bench.seconds_per_sample
        return self.passes.time(self.launched)

    def close(self) -> None:
        assert self.alive
        self.alive = False
