"""What there is to tune: the convolutions of a network, and for each the configurations that may be fastest."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..binding import bind_shapes
from ..conv2d import PRECISIONS, Conv2dPair, Conv2dProblem, Device, back_to_back, choose
from ..conv2d.back_to_back import back_to_back_candidates, supports_back_to_back
from ..conv2d.back_to_back_choice import APART
from ..conv2d.configs import Config, NoConfig
from ..conv2d.cost_model import back_to_back_microseconds, cost
from ..conv2d.heuristics import allowed, automatic
from ..conv2d.problem import Problem
from ..conv2d.stem import supports_stem
from ..engines.base import Fusions
from ..engines.cuda_engine import precision_obstacle, resolve_precision
from ..engines.shape_engine import OpRecord, ShapeArray, ShapeEngine
from ..errors import EngineUnavailableError
from ..networks import Network

HOPELESS = 3.0
"""A candidate that the cost model expects to take so many times as long as the best is not timed."""


@dataclass(frozen=True)
class Workload:
    """A convolution, or two in a row that may be one kernel, as a network has it.

    Args:
        problem: what is computed.
        count: how often in one forward pass.
        residual: whether a residual is added behind it. It is timed that way, but tables do not tell the two apart:
            a residual costs every configuration about the same.
    """

    problem: Problem
    count: int = 1
    residual: bool = False


@dataclass(frozen=True)
class Candidate:
    """A kernel in one of its configurations.

    Args:
        variant: name of the kernel.
        config: its configuration.
    """

    variant: str
    config: Config

    def __str__(self) -> str:
        return f"{self.variant}, {self.config}"


@dataclass(frozen=True)
class Apart(Candidate):
    """Two convolutions in a row as two kernels: with this the one kernel for both is compared.

    Args:
        first, second: what computes each.
    """

    first: Candidate
    second: Candidate

    def __str__(self) -> str:
        return f"{self.first}; {self.second}"


def network_problems(
    network: Network, shape: tuple[int, int, int, int], precision: str, device: Device, *, fuse: bool = True
) -> list[Workload]:
    """Returns the distinct convolutions of a forward pass, in the order in which they first occur; then its pairs.

    Pairs are those in a row that may be one kernel; both of their convolutions are listed by themselves as well. The
    classifier is among them where it runs as one, a stem that one kernel computes is not: that has nothing to
    choose.

    Args:
        network: a description or a bound network.
        shape: (N, C, H, W) of the input.
        precision: the arithmetic, a key of `cupy_resnet.conv2d.PRECISIONS`.
        device: the GPU.
        fuse: of a description, whether it is to be bound with BatchNorm folded; a bound network stays as it is.

    Raises:
        ValueError: a shape that the network cannot run.
    """
    network.check_input(shape)
    N, C, H, W = shape
    fused_stem, _ = supports_stem(PRECISIONS[precision], (N, H, W, C), network.stem.krsc_shape, device)
    bound = bind_shapes(network, fuse=fuse)
    apart = ShapeEngine(precision, fusions=Fusions(stem=fused_stem))
    pairs = Fusions(stem=fused_stem, back_to_back=lambda pair: supports_back_to_back(pair, device)[0])
    paired = ShapeEngine(precision, fusions=pairs)
    for ops in (apart, paired):
        bound(ops, ShapeArray((N, H, W, C)))
    records: list[tuple[Problem | None, OpRecord]] = [
        (record.problem if record.op == "conv2d" else record.as_conv2d, record) for record in apart.records
    ]
    records += [(record.pair, record) for record in paired.records]
    total, residuals = Counter[Problem](), Counter[Problem]()
    for problem, record in records:
        if problem is not None and N > 0:
            total[problem] += 1
            residuals[problem] += "residual" in record.epilogue
    return [Workload(problem, count, residual=2 * residuals[problem] >= count) for problem, count in total.items()]


def possible_precision(precision: str, device: Device) -> str:
    """Returns the arithmetic that the name, which may be ``"auto"``, stands for on a GPU.

    Raises:
        EngineUnavailableError: the GPU has no tensor cores for it.
    """
    resolved = resolve_precision(precision, device)
    obstacle = precision_obstacle(resolved, device)
    if obstacle:
        raise EngineUnavailableError(obstacle)
    return resolved


def candidates(
    problem: Problem,
    device: Device,
    *,
    spread_nan: bool = False,
    fastest: Mapping[Problem, Candidate] | None = None,
) -> list[Candidate]:
    """Returns what ``kernel="auto"`` may choose for a problem, the most promising first, without the `HOPELESS`.

    Of two convolutions in a row the first candidate is to compute them `Apart`.

    Args:
        problem: a convolution or a pair.
        device: the GPU.
        spread_nan: as in `cupy_resnet.conv2d.choose`.
        fastest: what is known to be fastest for a pair's convolutions; by default what `choose` says.

    Raises:
        UnsupportedProblemError: no kernel solves the problem.
    """
    if isinstance(problem, Conv2dPair):
        parts = [_alone(part, device, spread_nan, fastest or {}) for part in problem.parts]
        fused = [Candidate(back_to_back.name, c) for c in back_to_back_candidates(problem, device)]
        fused.sort(key=lambda candidate: expected(problem, device, candidate))
        return [Apart(APART, NoConfig(), *parts), *fused]
    costs = {
        Candidate(variant, config): cost(problem, device, config)
        for variant in automatic(problem, device, spread_nan)
        for config in allowed(variant, problem, device, spread_nan)
    }
    bound = HOPELESS * min(costs.values())
    return sorted((c for c in costs if costs[c] <= bound), key=costs.__getitem__)


def expected(problem: Problem, device: Device, candidate: Candidate) -> float:
    """Returns what the cost model expects of a candidate, in the unit of its arithmetic."""
    if isinstance(problem, Conv2dProblem):
        return cost(problem, device, candidate.config)
    if isinstance(candidate, Apart):
        apart = zip(problem.parts, (candidate.first, candidate.second), strict=True)
        return sum(expected(part, device, alone) for part, alone in apart)
    assert isinstance(candidate.config, back_to_back.BackToBackConfig)
    return back_to_back_microseconds(problem, device, candidate.config)


def _alone(problem: Conv2dProblem, device: Device, spread_nan: bool, fastest: Mapping[Problem, Candidate]) -> Candidate:
    if problem in fastest:
        return fastest[problem]
    choice = choose(problem, device, spread_nan=spread_nan)
    return Candidate(choice.variant, choice.config)
