"""What a forward pass does, operation by operation, and which kernel does it: known from shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from .binding import bind_shapes
from .conv2d import H100, PRECISIONS, Conv2dPair, Device, back_to_back, choose, choose_shortcut
from .conv2d.back_to_back_choice import BackToBackChoice, choose_back_to_back
from .conv2d.stem_choice import choose_stem
from .engines.base import Fusions
from .engines.cuda_engine import resolve_precision
from .engines.shape_engine import OpRecord, ShapeArray, ShapeEngine
from .networks import Network


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation and what computes it.

    Args:
        layer: parameter key prefix, empty for an operation without weights; of several all.
        op: name in `cupy_resnet.engines.base.Ops`, with what is fused behind it.
        problem: the convolution or the pair of them, or the output's shape, as text.
        kernel: name of the kernel, or ``"im2col + BLAS"``.
        config: the kernel's configuration, as text.
        reason: why this kernel.
        fallback: why the kernel that was demanded does not apply here, or None.
        record: shapes, FLOPs and bytes.
    """

    layer: str
    op: str
    problem: str
    kernel: str
    config: str
    reason: str
    fallback: str | None
    record: OpRecord


class Explanation(Sequence[Step]):
    """The steps of a forward pass in order; printed, an aligned table.

    Args:
        title: what is explained, and for which device.
        steps: in the order they run.
    """

    def __init__(self, title: str, steps: Sequence[Step]) -> None:
        self.title = title
        self._steps = tuple(steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, index: int | slice) -> Step | tuple[Step, ...]:
        return self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def fallbacks(self) -> list[Step]:
        """The steps where the kernel that was demanded does not apply."""
        return [step for step in self._steps if step.fallback]

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole pass."""
        return sum(step.record.flops for step in self._steps)

    def __str__(self) -> str:
        header = ("layer", "operation", "problem", "MFLOP", "MB", "kernel", "config", "reason")
        rows = [header, *(self._row(step) for step in self._steps)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        total = f"{len(self)} operations, {self.flops / 1e9:.2f} GFLOP"
        if self.fallbacks:
            total += f", {len(self.fallbacks)} fallbacks"
        return "\n".join([self.title, *(line.rstrip() for line in lines), total])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    @staticmethod
    def _row(step: Step) -> tuple[str, ...]:
        reason = f"{step.reason}; fallback: {step.fallback}" if step.fallback else step.reason
        flops, nbytes = f"{step.record.flops / 1e6:8.1f}", f"{step.record.nbytes / 1e6:6.1f}"
        return step.layer, step.op, step.problem, flops, nbytes, step.kernel, step.config, reason


def explain(
    network: Network,
    shape: tuple[int, ...],
    *,
    engine: str = "cuda",
    device: Device | None = None,
    kernel: str = "auto",
    strict: bool = False,
    fuse: bool = True,
    precision: str = "auto",
    ready: bool = False,
) -> Explanation:
    """Walks a network's graph with shapes only; needs neither weights nor a GPU.

    Args:
        network: a description or a bound network.
        shape: (N, C, H, W) of the input.
        engine: ``"cuda"`` or ``"numpy"``.
        device: the GPU that kernels are chosen for; an H100 where none is given.
        kernel, strict, fuse: as in `cupy_resnet.load`.
        precision: likewise; ``"auto"`` is what `device` would compute in by default.
        ready: whether the input lies in memory as activations do, channels last and in the type that they are stored
            in, so that nothing converts it; otherwise it is float32, channels first.

    Raises:
        ValueError: a shape that the network cannot run.
        UnsupportedProblemError: with `strict`, a convolution that `kernel` does not solve.
    """
    network.check_input(shape)
    N, C, H, W = shape
    target = device or H100
    arithmetic = PRECISIONS[resolve_precision(precision, target, kernel) if engine == "cuda" else "fp32"]
    if ready:
        pixels = ShapeArray((N, H, W, C), dtype=arithmetic.storage)
    else:
        pixels = ShapeArray((N, H, W, C), channels_first=C > 1 and H * W > 1)  # else both layouts are the same memory
    stem_kernel, _ = choose_stem(arithmetic, pixels.shape, network.stem.krsc_shape, target)

    fusions = Fusions(
        stem=kernel == "auto" and stem_kernel is not None,
        back_to_back=lambda pair: kernel == "auto" and _back_to_back(pair, target).config is not None,
        shortcut=lambda problem: choose_shortcut(problem, target, kernel, spread_nan=True)[0],
    )
    ops = ShapeEngine(arithmetic.name, fusions=fusions)
    bind_shapes(network, fuse=fuse)(ops, pixels)
    if engine == "numpy":
        return Explanation(f"{network.name}, input {shape}, NumPy engine", [_numpy_step(r) for r in ops.records])
    where = f"{arithmetic.name}, "
    where += f"on {target.name}" if device else f"as for an {target.name}, since no GPU is in use"
    steps = [_cuda_step(record, target, kernel, strict) for record in ops.records]
    return Explanation(f"{network.name}, input {shape}, CUDA engine, {where}", steps)


def _numpy_step(record: OpRecord) -> Step:
    kernel, reason = "NumPy", ""
    if record.problem is not None:
        pointwise = record.problem.is_pointwise and record.problem.groups == 1
        kernel = "BLAS" if pointwise else "im2col + BLAS"
        reason = "1×1, stride 1: the input is the im2col matrix" if pointwise else "the reference"
    elif record.op == "linear":
        kernel = "BLAS"
    return _step(record, kernel=kernel, reason=reason)


def _cuda_step(record: OpRecord, device: Device, kernel: str, strict: bool) -> Step:
    if record.op == "stem":
        problem = record.problem
        assert problem is not None
        name, _ = choose_stem(problem.arithmetic, problem.input_shape, problem.filter_shape, device)
        return _step(record, kernel=str(name), reason="one kernel from pixels to the pooled map")
    if record.pair is not None:
        fused = _back_to_back(record.pair, device)
        return _step(record, kernel=back_to_back.name, config=str(fused.config), reason=fused.reason)
    if record.as_conv2d is not None:
        choice = choose(record.as_conv2d, device)
    elif record.problem is not None:
        choice = choose(record.problem, device, kernel=kernel, strict=strict, spread_nan=True)
    else:
        return _step(record, kernel=record.op)
    return _step(
        record, kernel=choice.variant, config=str(choice.config), reason=choice.reason, fallback=choice.fallback
    )


def _back_to_back(pair: Conv2dPair, device: Device) -> BackToBackChoice:
    return choose_back_to_back(pair, device, spread_nan=True)


def _step(record: OpRecord, *, kernel: str, config: str = "", reason: str = "", fallback: str | None = None) -> Step:
    problem = record.pair or record.problem
    return Step(
        layer=record.layer or "",
        op=" + ".join([record.op, *record.epilogue]),
        problem=str(problem) if problem else "→ " + "×".join(map(str, record.output_shape)),
        kernel=kernel,
        config=config,
        reason=reason,
        fallback=fallback,
        record=record,
    )
