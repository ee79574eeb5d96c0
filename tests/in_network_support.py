"""What the tests of tuning in the network share: ResNet-18 on passes whose times come from a function."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from tuning_support import FakeBench, FakePasses

from cupy_resnet.conv2d import H100, tuned
from cupy_resnet.conv2d.problem import Problem
from cupy_resnet.networks import describe
from cupy_resnet.tuning import (
    Candidate,
    InNetwork,
    Workload,
    candidates,
    network_problems,
    tune_in_network,
)
from cupy_resnet.tuning.entrants import Apart
from cupy_resnet.tuning.workloads import Running, running

NETWORK, SHAPE = describe("resnet18"), (8, 3, 224, 224)
NOW = partial(running, NETWORK, SHAPE, "fp16", H100)
Pass = Mapping[Problem, Running]


def alone(workload: Workload, candidate: Candidate) -> float:
    """The model is right: each place behind its favourite costs 5 %, pieces are as fast as the best."""
    return 10.0 if isinstance(candidate, Apart) else 10.0 * 1.05 ** in_one(workload.problem).index(candidate)


@cache
def in_one(problem: Problem) -> list[Candidate]:
    """The candidates in one kernel, the fastest alone first."""
    return [c for c in candidates(problem, H100, spread_nan=True) if not isinstance(c, Apart)]


def place(problem: Problem, number: int) -> Candidate:
    """The candidate in one kernel that comes in this place, alone."""
    return in_one(problem)[number]


def favouring(problem: Problem, favourite: Candidate, gain: float = 20.0) -> Callable[[Pass], float]:
    """A pass of a millisecond, by `gain` shorter with one candidate for one problem."""
    return lambda pass_: 1000.0 - gain * (problem in pass_ and pass_[problem].candidate == favourite)


def passes(time: Callable[[Pass], float], **changes: Any) -> FakePasses:
    return FakePasses(NOW, time, FakeBench(alone), **changes)


def tuned_in(made: FakePasses, **options: Any) -> InNetwork:
    return tune_in_network(NETWORK, SHAPE, "fp16", made.bench, made, clock=made.bench.clock, **options)


def kept() -> dict[Any, Any]:
    return dict(tuned._kept.get(H100.name, {}))


FEW = set(list(NOW())[:3])
"""Problems of a pass: enough where all would take long."""

SHORTCUT = next(w.problem for w in network_problems(NETWORK, SHAPE, "fp16", H100) if w.problem.shortcut_channels)
