"""What there is to tune: the convolutions of a network, and for each the configurations that may be fastest."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ..binding import bind_shapes
from ..conv2d import PRECISIONS, Conv2dPair, Conv2dProblem, Device
from ..conv2d.back_to_back import supports_back_to_back
from ..conv2d.heuristics import automatic
from ..conv2d.pieces import halves, steps
from ..conv2d.problem import Problem
from ..conv2d.stem import supports_stem
from ..engines.base import Fusions
from ..engines.cuda_engine import precision_obstacle, resolve_precision
from ..engines.shape_engine import OpRecord, ShapeArray, ShapeEngine
from ..errors import EngineUnavailableError, UnsupportedProblemError
from ..networks import Network
from .entrants import Candidate, together


@dataclass(frozen=True)
class Workload:
    """A convolution, or several that may be one kernel, as a network has them.

    Args:
        problem: what is computed.
        count: how often in one forward pass, alone or as part of a larger one; 0 for what a pass never has, but a
            larger one is made of.
        residual: whether a residual is added behind it. It is timed that way, but tables do not tell the two apart:
            a residual costs every configuration about the same.
    """

    problem: Problem
    count: int = 1
    residual: bool = False


def network_problems(
    network: Network, shape: tuple[int, int, int, int], precision: str, device: Device, *, fuse: bool = True
) -> list[Workload]:
    """Returns the distinct convolutions of a forward pass, in the order in which they first occur; then what may be
    one kernel: convolutions with a shortcut, those in a row, and those in a row that have another one following.

    What a larger one is made of stands before it. The classifier is among them where it runs as a convolution, a stem
    that one kernel computes is not: that has nothing to choose.

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
    stem, _ = supports_stem(PRECISIONS[precision], (N, H, W, C), network.stem.krsc_shape, device)
    bound = bind_shapes(network, fuse=fuse)
    walks = [_walk(bound, (N, H, W, C), precision, fusions) for fusions in possible_fusions(device, stem)]
    return workloads(walks) if N > 0 else []


@dataclass(frozen=True)
class Running:
    """How a pass computes a problem: how often, and by which kernel."""

    count: int
    candidate: Candidate


def running(
    network: Network, shape: tuple[int, int, int, int], precision: str, device: Device, *, fuse: bool = True
) -> dict[Problem, Running]:
    """Returns what a forward pass launches as tables and cost model choose now, in the order of the pass.

    What is computed as part of a larger problem is not there, nor what is computed in pieces. Arguments are those of
    `network_problems`.

    Raises:
        ValueError: a shape that the network cannot run.
    """
    network.check_input(shape)
    N, C, H, W = shape
    fusions = Fusions(
        stem=supports_stem(PRECISIONS[precision], (N, H, W, C), network.stem.krsc_shape, device)[0],
        shortcut=lambda problem: together(problem, device, spread_nan=True) is not None,
        back_to_back=lambda pair: together(pair, device, spread_nan=True) is not None,
    )
    found: dict[Problem, Running] = {}
    for record in _walk(bind_shapes(network, fuse=fuse), (N, H, W, C), precision, fusions):
        problem = _problem(record)
        if problem in found:
            found[problem] = replace(found[problem], count=found[problem].count + 1)
        elif problem is not None:
            with suppress(UnsupportedProblemError):  # a classifier that this GPU computes in another arithmetic
                candidate = together(problem, device, spread_nan=record.as_conv2d is None)
                assert candidate is not None, "the walk would have taken it apart"
                found[problem] = Running(1, candidate)
    return found


def possible_fusions(device: Device, stem: bool) -> Iterator[Fusions]:
    """Yields the ways to walk through a graph that show everything there is to time, each with more fused.

    Args:
        device: the GPU.
        stem: whether the stem is fused; that is the same in all of them.
    """

    def shortcut(problem: Conv2dProblem) -> bool:
        try:
            return bool(automatic(problem, device, spread_nan=True))
        except UnsupportedProblemError:
            return False

    def pair(pair: Conv2dPair) -> bool:
        return supports_back_to_back(pair, device)[0]

    def pair_alone(whole: Conv2dPair) -> bool:
        return not whole.following and pair(whole)

    yield Fusions(stem=stem)
    yield Fusions(stem=stem, shortcut=shortcut)
    yield Fusions(stem=stem, shortcut=shortcut, back_to_back=pair_alone)
    yield Fusions(stem=stem, shortcut=shortcut, back_to_back=pair)


def _walk(bound: Network, shape: tuple[int, int, int, int], precision: str, fusions: Fusions) -> list[OpRecord]:
    ops = ShapeEngine(precision, fusions=fusions)
    bound(ops, ShapeArray(shape))
    return ops.records


def workloads(walks: Iterable[Iterable[OpRecord]]) -> list[Workload]:
    """Returns the distinct convolutions of several walks through one graph, smaller ones first.

    Each counts as often as in the walk that has it most often: where more is fused it may be part of a larger one.
    """
    total, residuals = Counter[Problem](), Counter[Problem]()
    for records in walks:
        here = Counter[Problem]()
        for record in records:
            problem = _problem(record)
            if problem is not None:
                here[problem] += 1
                residuals[problem] += 1 if "residual" in record.epilogue else -1
        total |= here
    for problem in list(total):
        for part in _made_of(problem):
            total.setdefault(part, 0)
    ordered = sorted(total, key=steps)  # stable: otherwise as they occur
    return [Workload(problem, total[problem], residual=residuals.get(problem, -1) >= 0) for problem in ordered]


def _problem(record: OpRecord) -> Problem | None:
    if record.pair is not None:
        return record.pair
    return record.problem if record.op == "conv2d" else record.as_conv2d


def _made_of(problem: Problem) -> Iterator[Problem]:
    for part in halves(problem) or ():
        yield from _made_of(part)
        yield part


def counted_alone(counts: Mapping[Problem, int]) -> dict[Problem, int]:
    """Returns how often each problem is no part of a larger one, if all of them are computed as one where possible.

    Args:
        counts: of `Workload`; those that are missing count with what they are made of.
    """
    alone = dict(counts)

    def take(problem: Problem, count: int) -> None:
        for part in halves(problem) or ():
            if part in alone:
                alone[part] = max(0, alone[part] - count)
            else:
                take(part, count)

    for problem, count in counts.items():
        take(problem, count)
    return alone


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
