"""Measures rows: the same network with the same weights on the same input, ours and the rivals taking turns."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...engines.cuda_engine import describe_device, find_device
from ...engines.selection import make_engine
from ...explanation import Explanation, explain
from ...networks import Network
from ..ceilings import Ceilings
from ..profiling.bounds import bounds
from ..profiling.results import Roof
from .contenders import (
    DEFAULT_RIVALS,
    Buffers,
    Recipe,
    check_rivals,
    our_recipes,
    rival_recipes,
    to_float64,
    torch_settings,
)
from .meters import Meter, make_meter
from .network import import_torch, make_weights, torch_network
from .precisions import RIVAL_ERROR_FACTOR, Rules, check_precision
from .report import Entry, Row
from .timing import Contender, Effort, measure_latency, measure_stream, warm_up

logger = logging.getLogger(__name__)

CHECKED_IMAGES = 8
"""Images of each buffer, spread evenly, whose logits are compared with float64."""

Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Args:
        models: as `cupy_resnet.load` knows them; those without embedded weights get random ones.
        batches: sizes, at least 1.
        precisions: of `precisions.RULES`.
        kernels: convolution kernels, ``"auto"`` for the engine's choice; each is a contender.
        rivals: of `contenders.RIVALS`; None for the device's usual ones.
        engine: as for `cupy_resnet.load`.
        size: height and width in pixels; by default each network's own.
        effort: how long.
        ceilings: of the device; without, nothing is said about the roofline.

    Raises:
        ValueError: something that does not exist, or a batch size below 1.
        EngineUnavailableError: the engine cannot run here.
    """

    models: Sequence[str]
    batches: Sequence[int]
    precisions: Sequence[str] = ("fp32",)
    kernels: Sequence[str] = ("auto",)
    rivals: Sequence[str] | None = None
    engine: str = "auto"
    size: int | None = None
    effort: Effort = field(default_factory=Effort)
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        for precision in self.precisions:
            check_precision(precision)
        if min(self.batches, default=1) < 1:
            raise ValueError(f"a batch has at least one image, got {min(self.batches)}")
        for kernel in self.kernels:
            object.__setattr__(self, "engine", make_engine(self.engine, kernel=kernel).name)
        rivals = DEFAULT_RIVALS[self.device] if self.rivals is None else self.rivals
        object.__setattr__(self, "rivals", check_rivals(rivals, self.device))

    @property
    def device(self) -> str:
        """``"cuda"`` or ``"cpu"``."""
        return "cuda" if self.engine == "cuda" else "cpu"

    def settings(self) -> dict[str, Any]:
        """What is stored beside the rows."""
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        return {
            **asdict(self.effort),
            "rivals": list(self.rivals or ()),
            "torch_threads": import_torch().get_num_threads(),
            "thread_limits": {name: os.environ[name] for name in limits if name in os.environ},
            "ceilings": None if self.ceilings is None else self.ceilings.to_dict(),
        }


def rows(plan: Plan, show: Show = lambda doing: None, meter: Meter | None = None) -> Iterator[Row]:
    """Measures row by row.

    A rival that cannot run, for lack of memory or of a compiler, is left out of its row with the reason; an error of
    ours is raised.

    Args:
        plan: what.
        show: told what is being done.
        meter: by default that of the plan's device.

    Raises:
        ImportError: torch is not installed.
    """
    meter = meter or make_meter(plan.engine)
    with tempfile.TemporaryDirectory(prefix="cupy_resnet-bench-") as folder:
        for model in plan.models:
            network, state = make_weights(model)
            weights = Path(folder) / f"{model}.npz"
            np.savez(weights, **state)  # type: ignore[arg-type]
            net = torch_network(network, state)
            for precision in plan.precisions:
                for N in plan.batches:
                    title = f"{model}, N = {N}, {precision}"
                    yield _Measurement(plan, meter, network, weights, net, N, precision).row(
                        model,
                        lambda doing, title=title: show(f"{title}: {doing}"),  # type: ignore[misc]
                    )


@dataclass
class _Contestant:
    """A contender in the making, and what is known of it so far."""

    recipe: Recipe
    contender: Contender
    first_call_s: float
    peak_bytes: int | None
    results: list[np.ndarray]


class _Measurement:
    """One row on its way."""

    def __init__(
        self, plan: Plan, meter: Meter, network: Network, weights: Path, net: Any, N: int, precision: str
    ) -> None:
        self._plan, self._meter, self._network, self._weights = plan, meter, network, weights
        self._net, self._precision, self._rules = net, precision, check_precision(precision)
        size = plan.size or network.default_size
        self._shape = (N, network.in_channels, size, size)

    def row(self, model: str, show: Show) -> Row:
        plan, N = self._plan, self._shape[0]
        show("drawing the input")
        with torch_settings(self._rules):
            buffers = Buffers.make(self._shape, self._rules, plan.device, seed=N)
            expected, eager_error = reference(self._net, buffers, self._rules, plan.device)
            recipes = our_recipes(
                self._network.name,
                self._weights,
                buffers,
                engine=plan.engine,
                precision=self._precision,
                kernels=plan.kernels,
            ) | rival_recipes(self._net, buffers, self._rules, plan.rivals or (), plan.device)
            made, failed = self._make_all(recipes, show)
            entries = self._measure(made, expected, eager_error, show)
        flops, bound_ms = self._work()
        return Row(
            model=model,
            N=N,
            size=self._shape[2],
            precision=self._precision,
            engine=plan.engine,
            flops=flops,
            bound_ms=bound_ms,
            bound_of="launches",
            eager_error=eager_error,
            entries=entries,
            failed=failed,
        )

    def _make_all(self, recipes: Mapping[str, Recipe], show: Show) -> tuple[dict[str, _Contestant], dict[str, str]]:
        made, failed = {}, {}
        for name, recipe in recipes.items():
            show(f"preparing {name}")
            try:
                made[name] = self._make(recipe)
            except Exception as error:
                if recipe.kernel is not None:
                    raise
                failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
                logger.warning("%s is left out: %s", name, failed[name])
                logger.debug("why %s is left out", name, exc_info=error)
        return made, failed

    def _make(self, recipe: Recipe) -> _Contestant:
        meter = self._meter
        mark = meter.memory_mark()
        begin = meter.now()
        contender = Contender(recipe.make(), recipe.inputs)
        contender.turn(0)
        meter.synchronize()
        seconds = meter.now() - begin
        results = [to_float64(contender.turn(number)) for number in range(len(recipe.inputs))]
        return _Contestant(recipe, contender, seconds, meter.memory_peak(mark), results)

    def _measure(
        self, made: Mapping[str, _Contestant], expected: Sequence[np.ndarray], eager_error: float, show: Show
    ) -> list[Entry]:
        contenders = {name: each.contender for name, each in made.items()}
        show("warming up")
        warm_up(contenders, self._meter, self._plan.effort)
        show("timing single calls")
        latency = measure_latency(contenders, self._meter, self._plan.effort)
        show("timing calls back to back")
        streams = measure_stream(contenders, self._meter, self._plan.effort, latency)
        entries = []
        for name, each in made.items():
            factor = RIVAL_ERROR_FACTOR if each.recipe.kernel is None else self._rules.error_factor
            again = to_float64(each.contender.turn(0))
            error, wrong = verdict(each.results, again, expected, factor * eager_error)
            entries.append(
                Entry(
                    name=name,
                    kernel=each.recipe.kernel,
                    first_call_s=each.first_call_s,
                    peak_bytes=each.peak_bytes,
                    error=error,
                    wrong=wrong,
                    latency_ms=latency[name],
                    stream_calls=streams[name].calls,
                    stream_ms=streams[name].ms,
                )
            )
        return entries

    def _work(self) -> tuple[int, float | None]:
        """Operations of a pass, and what the roofline allows its launches in ms."""
        launches = self._launches()
        if self._plan.ceilings is None:
            return launches.flops, None
        roof = Roof.of(self._plan.ceilings, self._precision)
        return launches.flops, sum(least for _, least in bounds(launches, roof)) / 1e3

    def _launches(self) -> Explanation:
        """What ours launches on the input as it gets it; of several of ours, that with the engine's own choice."""
        plan = self._plan
        return explain(
            self._network,
            self._shape,
            engine=plan.engine,
            device=describe_device(find_device(None)) if plan.engine == "cuda" else None,
            kernel="auto" if "auto" in plan.kernels else plan.kernels[0],
            precision=self._precision,
            ready=True,
        )


def checked_images(N: int) -> list[int]:
    """Returns the indices of at most `CHECKED_IMAGES` of N images, spread evenly from the first to the last."""
    return sorted({int(index) for index in np.linspace(0, N - 1, min(N, CHECKED_IMAGES))})


def reference(net: Any, buffers: Buffers, rules: Rules, device: str) -> tuple[list[np.ndarray], float]:
    """Returns what is right, and how far torch's own eager run is off.

    Args:
        net: torch's network, float32, on the CPU.
        buffers: the input, in the precision's type.
        rules: of the precision.
        device: where to compute.

    Returns:
        For each buffer the float64 logits of its `checked_images`, and the relative error, over all of them, of the
        eager network in the type of the input.
    """
    import copy

    torch = import_torch()
    images = [x[checked_images(len(x))] for x in buffers.nchw]
    double = copy.deepcopy(net).to(device, torch.float64)
    expected = [to_float64(double(x.double())) for x in images]
    eager = copy.deepcopy(net).to(device, getattr(torch, rules.dtype))
    return expected, relative_error([to_float64(eager(x)) for x in images], expected)


def relative_error(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Returns ‖y − y64‖ / ‖y64‖ over all arrays together; not finite where a result is not."""
    y, y64 = np.concatenate(results), np.concatenate(expected)
    return float(np.linalg.norm(y - y64) / np.linalg.norm(y64))


def verdict(
    results: Sequence[np.ndarray], again: np.ndarray, expected: Sequence[np.ndarray], allowed: float
) -> tuple[float | None, str | None]:
    """Returns a contender's error (None where it is not finite), and why its times do not count (None if they do).

    Args:
        results: (N, num_classes) of every buffer, before it was timed.
        again: of the first buffer, after.
        expected: as `reference` gives them.
        allowed: the largest relative error.
    """
    if any(y.shape[1:] != y64.shape[1:] for y, y64 in zip(results, expected, strict=True)):
        return None, f"its results have the shape {results[0].shape}, not (N, {expected[0].shape[1]})"
    error = relative_error([y[checked_images(len(y))] for y in results], expected)
    if not np.isfinite(error):
        return None, "its results are not finite"
    if error > allowed:
        return error, f"its relative error against float64 is {error:.2g}, and {allowed:.2g} is allowed"
    if not np.array_equal(again, results[0]):
        return error, "its results on the same input differ from one call to the next"
    return error, None
