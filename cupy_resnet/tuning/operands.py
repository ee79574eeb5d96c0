"""The arrays that kernels are timed on, on the current GPU, and how a candidate is launched on them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conv2d import PRECISIONS, VARIANTS, Conv2dPair, Conv2dProblem
from ..conv2d.back_to_back import BackToBackOperands, launch_back_to_back
from ..conv2d.problem import Problem
from ..conv2d.variants import Filter, Operands, Shortcut
from .workloads import Apart, Candidate, Workload

if TYPE_CHECKING:
    import cupy

LAUNCHES = 20
"""Launches per sample of a short kernel."""

L2_MARGIN = 1.5
"""How many times the size of the L2 cache operands must have altogether to be pushed out of it in turn."""

SHARE_OF_MEMORY = 0.5
"""Of the free memory, what one convolution's operands may take."""

PERIOD = 1_000_003
"""Numbers drawn for operands, which repeat them; prime, so that no two channels, pixels or filters are alike."""


@dataclass(frozen=True)
class PairOperands:
    """The arrays of two convolutions in a row.

    Args:
        fused: as the kernel for both takes them.
        between: what the two apart write and read.
    """

    fused: BackToBackOperands
    between: "cupy.ndarray"

    @property
    def y(self) -> "cupy.ndarray":
        return self.fused.y

    def apart(self) -> tuple[Operands, Operands]:
        """The arrays of each of the two."""
        whole = self.fused
        (filter1, filter2), (bias1, bias2), (relu1, relu2) = whole.filters, whole.biases, whole.relus
        return (
            Operands(whole.x, filter1, bias1, None, self.between, relu1),
            Operands(self.between, filter2, bias2, whole.residual, whole.y, relu2),
        )


def make_operands(workload: Workload, normal: np.ndarray, *, cold_l2: bool) -> list[Any]:
    """Returns what `LAUNCHES` launches get; arrays that need not differ are the same.

    Args:
        workload: a convolution, or two in a row.
        normal: numbers, normally distributed.
        cold_l2: whether activations change from launch to launch, and not only filters.

    Returns:
        For each launch `Operands`, or for two in a row `PairOperands`.

    Raises:
        MemoryError: there is no room for them.
    """
    import cupy

    problem = workload.problem
    parts = problem.parts if isinstance(problem, Conv2dPair) else (problem,)
    first, last = parts[0], parts[-1]
    size = first.arithmetic.element_size
    input_bytes = size * (math.prod(first.input_shape) + math.prod(last.shortcut_shape))
    output_bytes = size * math.prod(last.output_shape)
    between_bytes = size * math.prod(first.output_shape) if len(parts) > 1 else 0
    filter_bytes = size * sum(math.prod(part.filter_shape) + math.prod(part.shortcut_filter_shape) for part in parts)
    residual = workload.residual or len(parts) > 1  # two in a row always have one
    activations = input_bytes + (1 + residual) * output_bytes
    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    filters = copies(filter_bytes, l2)
    sets = copies(activations, l2) if cold_l2 else 1
    # Two outputs more: those that are compared.
    needed = filters * filter_bytes + sets * activations + between_bytes + 2 * output_bytes
    free = cupy.cuda.runtime.memGetInfo()[0]
    if needed > SHARE_OF_MEMORY * free:
        raise MemoryError(f"operands take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    numbers = cupy.asarray(normal)
    activation = stored(numbers, problem.precision)
    biases = [repeat(numbers, (part.K,), 7 + 4 * n) for n, part in enumerate(parts)]
    scaled = [stored(numbers / np.float32(np.sqrt(part.depth)), problem.precision) for part in parts]
    weights = [  # outputs are near 1, as inputs are
        [Filter(repeat(values, part.filter_shape, 1009 * n)) for values, part in zip(scaled, parts, strict=True)]
        for n in range(filters)
    ]
    shortcut_weights = [Filter(repeat(scaled[-1], last.shortcut_filter_shape, 4001 * n + 11)) for n in range(filters)]
    shortcut_inputs = [repeat(activation, last.shortcut_shape, 5003 * n + 13) for n in range(sets)]
    shortcuts = [
        Shortcut(shortcut_inputs[n % sets], shortcut_weights[n % filters]) if last.shortcut_channels else None
        for n in range(LAUNCHES)
    ]
    made = [
        (
            repeat(activation, first.input_shape, 2003 * n),
            repeat(activation, last.output_shape, 3001 * n) if residual else None,
            cupy.empty(last.output_shape, activation.dtype),
        )
        for n in range(sets)
    ]
    turns = [(*made[launch % sets], weights[launch % filters]) for launch in range(LAUNCHES)]
    if len(parts) == 1:
        return [
            Operands(x, weight[0], biases[0], added, y, True, shortcut)
            for (x, added, y, weight), shortcut in zip(turns, shortcuts, strict=True)
        ]
    between = cupy.empty(first.output_shape, activation.dtype)
    return [
        PairOperands(
            BackToBackOperands(x, (weight[0], weight[1]), (biases[0], biases[1]), added, y, (True, True)), between
        )
        for x, added, y, weight in turns
    ]


def launch(problem: Problem, candidate: Candidate, operands: Any) -> None:
    """Enqueues a candidate on one element of what `make_operands` returned, whose `y` it fills.

    Two convolutions apart run as in a plan: the second finds in the L2 cache what the first left there.
    """
    config: Any = candidate.config
    if isinstance(problem, Conv2dProblem):
        VARIANTS[candidate.variant].launch(problem, operands, config)
    elif isinstance(candidate, Apart):
        alone = candidate.first, candidate.second
        for part, kernel, arrays in zip(problem.parts, alone, operands.apart(), strict=True):
            launch(part, kernel, arrays)
    else:
        launch_back_to_back(problem, operands.fused, config)


def copies(nbytes: int, l2: int) -> int:
    """Of how many operands of a size, read in turn, none is still in the L2 cache; or `LAUNCHES`, if that is less."""
    return max(1, min(LAUNCHES, 1 + int(L2_MARGIN * l2 / max(nbytes, 1))))


def repeat(values: "cupy.ndarray", shape: tuple[int, ...], start: int) -> "cupy.ndarray":
    """Returns an array of `shape` filled with `values` over and over, beginning with the one at `start`."""
    import cupy

    out = cupy.empty(math.prod(shape), values.dtype)
    filled = 0
    while filled < out.size:
        part = values[start % values.size :][: out.size - filled]
        out[filled : filled + part.size] = part
        filled, start = filled + part.size, 0
    return out.reshape(shape)


def stored(values: "cupy.ndarray", precision: str) -> "cupy.ndarray":
    """float32 as a precision stores it; bfloat16, rounded to nearest even, as its bits."""
    import cupy

    if precision != "bf16":
        return values.astype(PRECISIONS[precision].storage)
    bits = values.view(cupy.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(cupy.uint16)


def as_float32(values: "cupy.ndarray", precision: str) -> "cupy.ndarray":
    """The values of what `stored` returned."""
    import cupy

    if precision != "bf16":
        return values.astype(cupy.float32, copy=False)
    return (values.astype(cupy.uint32) << np.uint32(16)).view(cupy.float32)
