"""What there is to tune: the convolutions of a network, and for each the configurations that may be fastest."""

from collections import Counter
from dataclasses import dataclass

from ..binding import bind_shapes
from ..conv2d import PRECISIONS, Conv2dProblem, Device
from ..conv2d.configs import Config
from ..conv2d.cost_model import cost
from ..conv2d.heuristics import allowed, automatic
from ..conv2d.stem import supports_stem
from ..engines.cuda_engine import precision_obstacle, resolve_precision
from ..engines.shape_engine import ShapeArray, ShapeEngine
from ..errors import EngineUnavailableError
from ..networks import Network

HOPELESS = 3.0
"""A candidate that the cost model expects to take so many times as long as the best is not timed."""


@dataclass(frozen=True)
class Workload:
    """A convolution as a network has it.

    Args:
        problem: what is computed.
        count: how often in one forward pass.
        residual: whether a residual is added behind it. It is timed that way, but tables do not tell the two apart:
            a residual costs every configuration about the same.
    """

    problem: Conv2dProblem
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


def network_problems(
    network: Network, shape: tuple[int, int, int, int], precision: str, device: Device, *, fuse: bool = True
) -> list[Workload]:
    """Returns the distinct convolutions of a forward pass, in the order in which they first occur.

    The classifier is among them where it runs as one, a stem that one kernel computes is not: that has nothing to
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
    ops = ShapeEngine(precision, fused_stem=fused_stem)
    bind_shapes(network, fuse=fuse)(ops, ShapeArray((N, H, W, C)))
    total, residuals = Counter[Conv2dProblem](), Counter[Conv2dProblem]()
    for record in ops.records:
        problem = record.problem if record.op == "conv2d" else record.as_conv2d
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


def candidates(problem: Conv2dProblem, device: Device, *, spread_nan: bool = False) -> list[Candidate]:
    """Returns what ``kernel="auto"`` may choose for a problem, the most promising first, without the `HOPELESS`.

    Raises:
        UnsupportedProblemError: no kernel solves the problem.
    """
    costs = {
        Candidate(variant, config): cost(problem, device, config)
        for variant in automatic(problem, device, spread_nan)
        for config in allowed(variant, problem, device, spread_nan)
    }
    bound = HOPELESS * min(costs.values())
    return sorted((c for c in costs if costs[c] <= bound), key=costs.__getitem__)
