"""What fusing buys: the time of each stage of `stages`, beside torch's own modules at the same stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ...engines.selection import make_engine
from ...networks import Network
from ..machine import describe_machine
from .comparison import reference, verdict
from .contenders import Buffers, eager_or_folded, to_float64, torch_settings
from .meters import Meter, make_meter
from .network import make_weights, torch_network
from .precisions import RIVAL_ERROR_FACTOR, RULES
from .report import from_stored, to_stored
from .stages import STAGES, Stage, bind_stage, stage_records
from .statistics import FEWEST_SAMPLES, Ratio, Summary, ratio
from .timing import Contender, Effort, turns, warm_up

FORMAT = "fusion"
PRECISION = "fp32"
LAYOUTS = ("nchw", "nhwc")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a forward pass took at one stage, ours or torch's.

    Args:
        name: of the stage; of torch's with the way and the layout, as ``"folded-nhwc"``.
        stage: the stage of ours that it belongs to.
        operations: called in a pass; None for torch.
        nbytes: the fewest bytes that these must move; None for torch.
        host_ms: samples of the time until everything is enqueued; on a CPU, until it is done.
        device_ms: samples of the GPU's time, without waiting for the host; empty on a CPU.
        error: relative, of the logits against float64; None where they are not finite.
        wrong: why the times do not count, a clause; None where they do.
    """

    name: str
    stage: str
    operations: int | None
    nbytes: int | None
    host_ms: list[float]
    device_ms: list[float]
    error: float | None
    wrong: str | None

    @property
    def host(self) -> Summary:
        return Summary.of(self.host_ms)

    @property
    def device(self) -> Summary | None:
        """Of the GPU's time; None on a CPU."""
        return Summary.of(self.device_ms) if self.device_ms else None

    @property
    def time(self) -> Summary:
        """Of the GPU's time, on a CPU of the host's, which is the whole."""
        return self.device or self.host


@dataclass(frozen=True, kw_only=True)
class FusionReport:
    """What fusing buys.

    Args:
        machine: as `cupy_resnet.proof.machine.describe_machine` gives it.
        model, N, size, engine, precision: what was run.
        stages: ours, in the order of `stages.STAGES`.
        torch: torch's, in each memory layout.
    """

    machine: dict[str, Any]
    model: str
    N: int
    size: int
    engine: str
    precision: str
    stages: list[Pass]
    torch: list[Pass]

    def gain(self, stage: Pass) -> Ratio:
        """How many times as fast a stage of ours is as the first."""
        first = self.stages[0]
        if wrong := stage.wrong or first.wrong:
            return Ratio.refused(f"its results do not count: {wrong}")
        return ratio(stage.time, first.time)

    def rival(self, stage: Pass) -> Pass | None:
        """Torch at the same stage, in the faster layout; None where torch has no module for it."""
        found = [each for each in self.torch if each.stage == stage.name and each.wrong is None]
        return min(found, key=lambda each: each.time.median, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        return to_stored(self, FORMAT)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returned.

        Raises:
            ValueError: it is something else.
        """
        own = from_stored(cls, values, FORMAT, "report on fusion")
        passes = {key: [Pass(**each) for each in own[key]] for key in ("stages", "torch")}
        return cls(**own | passes)


@dataclass(frozen=True)
class _Entry:
    """A pass before it is measured; `what` holds those fields of `Pass` that are known already."""

    contender: Contender
    error_factor: float
    what: dict[str, Any]


def measure_fusion(
    model: str,
    batch: int = 64,
    *,
    engine: str = "auto",
    size: int | None = None,
    effort: Effort | None = None,
    commit: str | None = None,
    show: Callable[[str], None] = lambda doing: None,
    meter: Meter | None = None,
) -> FusionReport:
    """Measures every stage in float32, ours and torch's taking turns, with the same weights on the same data.

    Args:
        model: as `network.make_weights` takes it.
        batch: N.
        engine: as for `cupy_resnet.load`.
        size: height and width in pixels; by default the network's own.
        effort: how much to measure.
        commit: as for `describe_machine`.
        show: told what is being done.
        meter: by default that of the engine's device.

    Raises:
        ImportError: torch is not installed.
        EngineUnavailableError: the engine cannot run here.
    """
    ops = make_engine(engine)
    effort, meter = effort or Effort(samples=100), meter or make_meter(ops.name)
    network, state = make_weights(model)
    pixels = size or network.default_size
    rules = RULES[PRECISION]
    with torch_settings(rules):
        show("preparing")
        buffers = Buffers.make((batch, network.in_channels, pixels, pixels), rules, meter.device, seed=batch)
        net = torch_network(network, state)
        expected, eager_error = reference(net, buffers, rules, meter.device)
        shape = (batch, pixels, pixels, network.in_channels)
        entries = [_ours(stage, network, state, ops, buffers, shape) for stage in STAGES]
        entries += [
            _torchs(stage, net, buffers, layout, meter.device) for stage in STAGES if stage.torch for layout in LAYOUTS
        ]
        passes = _measure(entries, expected, eager_error, meter, effort, show)
    return FusionReport(
        machine=describe_machine(commit, engine=ops.name),
        model=model,
        N=batch,
        size=pixels,
        engine=ops.name,
        precision=PRECISION,
        stages=passes[: len(STAGES)],
        torch=passes[len(STAGES) :],
    )


def _ours(
    stage: Stage,
    network: Network,
    state: Mapping[str, np.ndarray],
    ops: Any,
    buffers: Buffers,
    shape: tuple[int, int, int, int],
) -> _Entry:
    bound, wrapped = bind_stage(stage, network, state, ops), stage.wrapper(ops)
    records = stage_records(stage, network, shape)
    what = {
        "name": stage.name,
        "stage": stage.name,
        "operations": len(records),
        "nbytes": sum(record.nbytes for record in records),
    }
    inputs = [_engine_array(ops, x) for x in buffers.nhwc]
    return _Entry(Contender(lambda x: bound(wrapped, x)[0], inputs), RULES[PRECISION].error_factor, what)


def _engine_array(ops: Any, x: Any) -> Any:
    """A torch tensor (N, C, H, W), channels last, as the engine's array (N, H, W, C): the same memory."""
    nhwc = x.permute(0, 2, 3, 1)
    if ops.name != "cuda":
        return nhwc.numpy()
    import cupy

    return cupy.from_dlpack(nhwc)


def _torchs(stage: Stage, net: Any, buffers: Buffers, layout: str, device: str) -> _Entry:
    module = eager_or_folded(net, RULES[PRECISION], device, layout, folded=stage.torch == "folded")
    what = {"name": f"{stage.torch}-{layout}", "stage": stage.name, "operations": None, "nbytes": None}
    return _Entry(Contender(module, getattr(buffers, layout)), RIVAL_ERROR_FACTOR, what)


def _measure(
    entries: list[_Entry],
    expected: list[np.ndarray],
    eager_error: float,
    meter: Meter,
    effort: Effort,
    show: Callable[[str], None],
) -> list[Pass]:
    by_name = {entry.what["name"]: entry for entry in entries}
    results = {
        name: [to_float64(entry.contender.turn(number)) for number in range(len(expected))]
        for name, entry in by_name.items()
    }
    show("warming up")
    warm_up({name: entry.contender for name, entry in by_name.items()}, meter, effort)
    show("timing passes")
    host: dict[str, list[float]] = {name: [] for name in by_name}
    device: dict[str, list[float]] = {name: [] for name in by_name}
    fewest = min(FEWEST_SAMPLES, effort.samples)
    for number, name in turns(list(by_name), effort.samples, meter, seconds=effort.seconds, fewest=fewest):
        contender = by_name[name].contender
        meter.synchronize()
        begin = meter.now()
        contender.turn(number)
        host[name].append((meter.now() - begin) * 1e3)
        meter.synchronize()
        if meter.device == "cuda":
            device[name].append(meter.device_ms(lambda turn=contender.turn, number=number: turn(number)))  # type: ignore[misc]
    passes = []
    for name, entry in by_name.items():
        again = to_float64(entry.contender.turn(0))
        error, wrong = verdict(results[name], again, expected, entry.error_factor * eager_error)
        passes.append(Pass(**entry.what, host_ms=host[name], device_ms=device[name], error=error, wrong=wrong))
    return passes
