"""The arrays that kernels are timed on, on the current GPU, and how a candidate is launched on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conv2d import PRECISIONS, VARIANTS, Conv2dPair, Conv2dProblem
from ..conv2d.back_to_back import BackToBackOperands, Following, launch_back_to_back
from ..conv2d.pieces import halves
from ..conv2d.problem import Problem
from ..conv2d.tf32_parts import nearest_tf32
from ..conv2d.variants import Filter, Operands, Shortcut
from .entrants import Apart, Candidate
from .workloads import Workload

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
class Arrays:
    """What one launch of a candidate works on.

    Args:
        whole: as one kernel takes it.
        between: of convolutions in a row, what comes out of the first if they are computed apart.
    """

    whole: Operands | BackToBackOperands
    between: "cupy.ndarray | None" = None

    @property
    def outputs(self) -> "tuple[cupy.ndarray, ...]":
        """What is there in the end, however it is computed."""
        following = self.whole.following if isinstance(self.whole, BackToBackOperands) else None
        return (self.whole.y,) if following is None else (self.whole.y, following.z)

    def halves(self) -> "tuple[Arrays, Arrays]":
        """The arrays of both halves (`cupy_resnet.conv2d.pieces`), as a plan has them: what a shortcut gives lies where
        the output will.
        """
        whole = self.whole
        if isinstance(whole, Operands):
            assert whole.shortcut is not None
            shortcut = Operands(whole.shortcut.x, whole.shortcut.filter, None, None, whole.y, False)
            return Arrays(shortcut), Arrays(replace(whole, residual=whole.y, shortcut=None))
        if whole.following is not None:
            filter, bias, relu, z = whole.following
            return (
                Arrays(whole._replace(following=None), self.between),
                Arrays(Operands(whole.y, filter, bias, None, z, relu)),
            )
        assert self.between is not None
        (filter1, filter2), (bias1, bias2), (relu1, relu2) = whole.filters, whole.biases, whole.relus
        return (
            Arrays(Operands(whole.x, filter1, bias1, None, self.between, relu1)),
            Arrays(Operands(self.between, filter2, bias2, whole.residual, whole.y, relu2, whole.shortcut)),
        )


def make_operands(workload: Workload, normal: np.ndarray, *, cold_l2: bool) -> list[Arrays]:
    """Returns what `LAUNCHES` launches get; arrays that need not differ are the same.

    Args:
        workload: what is to be timed.
        normal: numbers, normally distributed.
        cold_l2: whether activations change from launch to launch, and not only filters.

    Raises:
        MemoryError: there is no room for them.
    """
    import cupy

    problem = workload.problem
    pair = problem if isinstance(problem, Conv2dPair) else None
    parts = (problem,) if isinstance(problem, Conv2dProblem) else problem.parts
    first, third = parts[0], None if pair is None else pair.third
    adding = problem if isinstance(problem, Conv2dProblem) else problem.second
    residual = not adding.shortcut_channels and (workload.residual or pair is not None)
    shapes = {
        "x": first.input_shape,
        "shortcut": adding.shortcut_shape if adding.shortcut_channels else (0,),
        "residual": adding.output_shape if residual else (0,),
        "y": adding.output_shape,
        "z": (0,) if third is None else third.output_shape,
    }
    between_shape = (0,) if pair is None else first.output_shape
    filter_shapes = [part.filter_shape for part in parts] + [adding.shortcut_filter_shape]
    size = first.arithmetic.element_size
    activation_bytes, filter_bytes = (
        size * sum(math.prod(shape) for shape in some) for some in (shapes.values(), filter_shapes)
    )
    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    filter_sets = copies(filter_bytes, l2)
    sets = copies(activation_bytes, l2) if cold_l2 else 1
    # Two outputs more: those that are compared.
    compared = 2 * (math.prod(shapes["y"]) + math.prod(shapes["z"]))
    needed = filter_sets * filter_bytes + sets * activation_bytes + size * (math.prod(between_shape) + compared)
    free = cupy.cuda.runtime.memGetInfo()[0]
    if needed > SHARE_OF_MEMORY * free:
        raise MemoryError(f"operands take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    numbers = cupy.asarray(normal)
    activation = stored(numbers, problem.precision)
    biases = [repeat(numbers, (part.K,), 7 + 4 * n) for n, part in enumerate(parts)]
    # Outputs are near 1, as inputs are.
    scaled = [filter_values(numbers / np.float32(np.sqrt(part.depth)), problem.precision) for part in (*parts, adding)]
    filters = [  # each with numbers of its own
        [Filter(repeat(scaled[i], shape, 1009 * n + 4001 * i)) for i, shape in enumerate(filter_shapes)]
        for n in range(filter_sets)
    ]
    starts = {"x": (2003, 0), "shortcut": (5003, 13), "residual": (3001, 0)}
    made = []
    for n in range(sets):
        given = {name: repeat(activation, shapes[name], step * n + start) for name, (step, start) in starts.items()}
        made.append(given | {name: cupy.empty(shapes[name], activation.dtype) for name in ("y", "z")})
    between = None if pair is None else cupy.empty(between_shape, activation.dtype)

    def one(arrays: "dict[str, cupy.ndarray]", weights: Sequence[Filter]) -> Arrays:
        added = arrays["residual"] if residual else None
        shortcut = Shortcut(arrays["shortcut"], weights[-1]) if adding.shortcut_channels else None
        if pair is None:
            return Arrays(Operands(arrays["x"], weights[0], biases[0], added, arrays["y"], True, shortcut))
        following = None if third is None else Following(weights[2], biases[2], True, arrays["z"])
        two, of_two = (weights[0], weights[1]), (biases[0], biases[1])
        whole = BackToBackOperands(
            arrays["x"], two, of_two, added, arrays["y"], (True, True), shortcut=shortcut, following=following
        )
        return Arrays(whole, between)

    return [one(made[n % sets], filters[n % filter_sets]) for n in range(LAUNCHES)]


def launch(problem: Problem, candidate: Candidate, arrays: Arrays) -> None:
    """Enqueues a candidate on one element of what `make_operands` returned, whose `outputs` it fills.

    What is computed apart runs as in a plan: the second half finds in the L2 cache what the first left there.
    """
    config: Any = candidate.config
    if isinstance(candidate, Apart):
        parts = halves(problem)
        assert parts is not None
        for part, half, its_arrays in zip(parts, (candidate.first, candidate.second), arrays.halves(), strict=True):
            launch(part, half, its_arrays)
    elif isinstance(problem, Conv2dPair):
        assert isinstance(arrays.whole, BackToBackOperands)
        launch_back_to_back(problem, arrays.whole, config)
    else:
        assert isinstance(arrays.whole, Operands)
        VARIANTS[candidate.variant].launch(problem, arrays.whole, config)


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


def filter_values(values: "cupy.ndarray", precision: str) -> "cupy.ndarray":
    """float32 as a filter of an engine has it: as `stored`, but in TF32 rounded."""
    return nearest_tf32(values) if precision == "tf32" else stored(values, precision)


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
