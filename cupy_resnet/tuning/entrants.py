"""What races on a workload: the configurations that may be fastest, and for what may be one kernel its pieces too."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from ..conv2d import Conv2dPair, Conv2dProblem, Device, back_to_back, choose, choose_shortcut
from ..conv2d.back_to_back import back_to_back_candidates
from ..conv2d.back_to_back_choice import choose_back_to_back
from ..conv2d.configs import BackToBackConfig, Config, NoConfig
from ..conv2d.cost_model import back_to_back_microseconds, cost
from ..conv2d.heuristics import allowed, automatic
from ..conv2d.pieces import halves
from ..conv2d.problem import Problem
from ..conv2d.tuned import APART

HOPELESS = 3.0
"""A candidate that the cost model expects to take so many times as long as the best is not timed."""


@dataclass(frozen=True)
class Candidate:
    """A kernel in one of its configurations.

    Args:
        variant: name of the kernel.
        config: its configuration.
    """

    variant: str
    config: Config

    @property
    def launched(self) -> Hashable:
        """What two candidates for one problem have in common that launch the same: what is compiled, and the grid."""
        by_launch = (getattr(self.config, name, 1) for name in ("split_k_slices", "merged_groups"))
        return self.variant, frozenset(self.config.defines().items()), *by_launch

    def __str__(self) -> str:
        return f"{self.variant}, {self.config}"


@dataclass(frozen=True)
class Apart(Candidate):
    """The two halves of a problem one after the other: with this the one kernel for all of it is compared.

    Args:
        first, second: what computes each; perhaps its own halves.
    """

    first: Candidate
    second: Candidate

    @classmethod
    def of(cls, first: Candidate, second: Candidate) -> "Apart":
        return cls(APART, NoConfig(), first, second)

    def kernels(self) -> Iterator[Candidate]:
        """Yields what is launched, in order."""
        for half in (self.first, self.second):
            if isinstance(half, Apart):
                yield from half.kernels()
            else:
                yield half

    def __str__(self) -> str:
        return "; ".join(map(str, self.kernels()))


def candidates(
    problem: Problem,
    device: Device,
    *,
    spread_nan: bool = False,
    fastest: Mapping[Problem, Candidate] | None = None,
) -> list[Candidate]:
    """Returns what ``kernel="auto"`` may choose for a problem, the most promising first, without the `HOPELESS`.

    Of what has halves the first candidate is to compute them `Apart`, each in the best way that is known.

    Args:
        problem: what is computed.
        device: the GPU.
        spread_nan: as in `cupy_resnet.conv2d.choose`.
        fastest: what is known to be fastest for parts of the problem; by default what would be chosen.

    Raises:
        UnsupportedProblemError: no kernel solves the problem.
    """
    if isinstance(problem, Conv2dPair):
        costs = {
            Candidate(back_to_back.name, config): back_to_back_microseconds(problem, device, config)
            for config in back_to_back_candidates(problem, device)
        }
    else:
        costs = {
            Candidate(variant, config): cost(problem, device, config)
            for variant in automatic(problem, device, spread_nan)
            for config in allowed(variant, problem, device, spread_nan)
        }
    bound = HOPELESS * min(costs.values(), default=0.0)
    found = sorted((candidate for candidate in costs if costs[candidate] <= bound), key=costs.__getitem__)
    if halves(problem) is None:
        return found
    return [_apart(problem, device, spread_nan, fastest or {}), *found]


def together(problem: Problem, device: Device, *, spread_nan: bool, use_tables: bool = True) -> Candidate | None:
    """Returns the one kernel that would be chosen for all of a problem; None where it would be computed apart.

    Arguments are as of `cupy_resnet.conv2d.choose`.

    Raises:
        UnsupportedProblemError: no kernel solves a convolution.
    """
    if isinstance(problem, Conv2dPair):
        config = choose_back_to_back(problem, device, spread_nan=spread_nan, use_tables=use_tables).config
        return None if config is None else Candidate(back_to_back.name, config)
    if problem.shortcut_channels:
        fused, _ = choose_shortcut(problem, device, spread_nan=spread_nan, use_tables=use_tables)
        if not fused:
            return None
    choice = choose(problem, device, spread_nan=spread_nan, use_tables=use_tables)
    return Candidate(choice.variant, choice.config)


def expected(problem: Problem, device: Device, candidate: Candidate) -> float:
    """Returns what the cost model expects of a candidate, in the unit of its arithmetic."""
    if isinstance(candidate, Apart):
        parts = halves(problem)
        assert parts is not None
        return expected(parts[0], device, candidate.first) + expected(parts[1], device, candidate.second)
    if isinstance(problem, Conv2dProblem):
        return cost(problem, device, candidate.config)
    assert isinstance(candidate.config, BackToBackConfig)
    return back_to_back_microseconds(problem, device, candidate.config)


def _apart(problem: Problem, device: Device, spread_nan: bool, fastest: Mapping[Problem, Candidate]) -> Apart:
    def best(part: Problem) -> Candidate:
        known = fastest.get(part) or together(part, device, spread_nan=spread_nan)
        return known or _apart(part, device, spread_nan, fastest)

    parts = halves(problem)
    assert parts is not None
    return Apart.of(*map(best, parts))
