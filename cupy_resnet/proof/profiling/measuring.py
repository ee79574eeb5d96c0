"""Profiles a model: runs it operation by operation, and joins the times with what `explain` knows of each."""

import statistics
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ...engines.base import Ops, Pair, pair
from ...explanation import Explanation
from ...model import Model
from ...networks import Network
from ..ceilings import Ceilings, ceilings
from ..clock import Clock, clock_of
from ..machine import describe_machine
from .bounds import bounds
from .results import Profile, ProfiledOp, Roof
from .timed_ops import TimedOps, Timing

WARMUP = 3
"""Passes that do not count: they compile kernels, allocate memory and bring the clocks up."""

HEAD = "head"
"""The block of what follows the last one: pooling and classifier."""


def profile(
    model: Model,
    batch_size: int = 1,
    size: Pair | None = None,
    *,
    samples: int = 30,
    clock: Clock | None = None,
    limits: Ceilings | None = None,
) -> Profile:
    """Times every operation of a forward pass, one by one, and the whole pass beside it.

    Args:
        model: as `cupy_resnet.load` returns it.
        batch_size: N, at least 1.
        size: height and width in pixels, by default the network's own.
        samples: how often each operation and the whole pass are timed.
        clock: by default that of the model's engine.
        limits: by default what `ceilings` knows of the model's device, or measures now.

    Raises:
        ValueError: a batch or number of samples below 1, or a size that the network cannot run.
        RuntimeError: the model is closed.
    """
    if min(batch_size, samples) < 1:
        raise ValueError(f"profile needs at least one image and one sample, got {batch_size} and {samples}")
    network, ops = model.network, model.ops  # what a model runs is nobody's business but that of this room
    height, width = pair(size or model.default_size)
    shape = (batch_size, model.in_channels, height, width)
    explanation = model.explain(shape)
    limits = limits or ceilings_of(model)
    roof = Roof.of(limits, model.precision)
    clock = clock or clock_of(ops)
    x = ops.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    passes, blocks, whole = _measure(model, network, ops, clock, x, samples)
    empty = statistics.median(clock.alone(lambda: None)[1] for _ in range(samples))
    return Profile(
        model=model.name,
        input_shape=shape,
        engine=model.engine,
        precision=model.precision,
        kernel=model.kernel,
        fuse=model.fuse,
        ops=join(explanation, passes, blocks, roof),
        whole_us=tuple(1e6 * seconds for seconds in whole),
        empty_us=1e6 * empty,
        ceilings=limits,
        machine=describe_machine(engine=model.engine),
    )


def ceilings_of(model: Model, *, refresh: bool = False) -> Ceilings:
    """Returns the `ceilings` of the device that a model runs on; with `refresh` they are measured anew."""
    ops = model.ops
    return ceilings(cast(Any, ops).device if ops.name == "cuda" else None, refresh=refresh)


def _measure(
    model: Model, network: Network, ops: Ops, clock: Clock, x: Any, samples: int
) -> tuple[list[list[Timing]], list[str], list[float]]:
    """Returns the timings of each pass, the block of each operation, and the seconds of each whole pass."""
    whole, passes, blocks = [], [], []
    for number in range(WARMUP + samples):
        # In turns, so that a device that grows warm or busy does so for both.
        seconds = clock.as_called(lambda: model(x))
        timed = TimedOps(ops, clock)
        blocks = _forward(network, timed, x)
        if number >= WARMUP:
            whole.append(seconds)
            passes.append(timed.timings)
    return passes, blocks, whole


def _forward(network: Network, ops: TimedOps, x: Any) -> list[str]:
    """Runs a pass on (N, C, H, W); returns the block of each operation."""
    blocks: list[str] = []

    def close(name: str, _: Any) -> None:
        block = HEAD if name in ("gap", "logits") else name
        blocks.extend([block] * (len(ops.timings) - len(blocks)))

    network(ops, x.transpose(0, 2, 3, 1), close)
    return blocks


def join(
    explanation: Explanation, passes: Sequence[Sequence[Timing]], blocks: Sequence[str], roof: Roof
) -> tuple[ProfiledOp, ...]:
    """Joins what was timed with what was explained; both are in the order of the forward pass.

    Args:
        explanation: of the same model and shape.
        passes: the timings of each pass.
        blocks: the block of each operation.
        roof: that bounds the operations.

    Raises:
        RuntimeError: the passes did not do what `explanation` says.
    """
    explained = [(step.record.op, step.record.output_shape) for step in explanation]
    for timings in passes:
        done = [(timing.op, timing.shape) for timing in timings]
        if done != explained:
            pairs = zip(explained, done, strict=False)
            first = next((i for i, (told, ran) in enumerate(pairs) if told != ran), min(len(explained), len(done)))
            told, ran = (ops[first] if first < len(ops) else "nothing" for ops in (explained, done))
            raise RuntimeError(f"operation {first} should be {told} by explain(), but the engine ran {ran}")
    samples = [tuple(1e6 * timing.seconds for timing in column) for column in zip(*passes, strict=True)]
    medians = [statistics.median(column) for column in samples]
    total = sum(medians)
    ops = []
    for step, block, column, median, (bound, bound_us) in zip(
        explanation, blocks, samples, medians, bounds(explanation, roof), strict=True
    ):
        ops.append(
            ProfiledOp(
                block=block,
                layer=step.layer,
                op=step.op,
                problem=step.problem,
                kernel=step.kernel,
                config=step.config,
                flops=step.record.flops,
                nbytes=step.record.nbytes,
                samples_us=column,
                bound=bound,
                bound_us=bound_us,
                share=median / total,
            )
        )
    return tuple(ops)
