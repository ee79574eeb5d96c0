"""The result of profiling a forward pass: plain data, and the arithmetic of bounds and shares."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from ..ceilings import Ceilings

COMPUTE_CEILINGS: dict[str, tuple[str, int]] = {
    "fp32": ("float32", 1),
    "fp32-tc": ("tf32", 3),
    "tf32": ("tf32", 1),
    "fp16": ("float16", 1),
    "bf16": ("bfloat16", 1),
}
"""A model's precision → the matrix product that bounds it, and how many of those one product of the model takes."""


@dataclass(frozen=True)
class Roof:
    """What bounds an operation: memory for few operations per byte, arithmetic for many.

    Args:
        bytes_per_s: that can be moved.
        flops_per_s: that can be computed; None where nothing here could measure it, and memory alone bounds.
        compute: what the latter is, as ``"float32"`` or ``"tf32 / 3"``.
    """

    bytes_per_s: float
    flops_per_s: float | None
    compute: str

    @classmethod
    def of(cls, ceilings: Ceilings, precision: str) -> "Roof":
        """Returns the roof of a device for a model's precision.

        Raises:
            ValueError: a precision without an entry in `COMPUTE_CEILINGS`.
        """
        if precision not in COMPUTE_CEILINGS:
            raise ValueError(f"there is no ceiling for precision {precision!r}, only for {', '.join(COMPUTE_CEILINGS)}")
        name, products = COMPUTE_CEILINGS[precision]
        rate = ceilings.matmul_flops_per_s.get(name)
        compute = f"{name} / {products}" if products > 1 else name
        return cls(ceilings.copy_bytes_per_s, rate and rate / products, compute)

    def bound(self, flops: int, nbytes: int) -> tuple[str, float]:
        """Returns ``"memory"`` or ``"compute"``, whichever takes longer, and the least time in µs that it allows."""
        memory = 1e6 * nbytes / self.bytes_per_s
        compute = 1e6 * flops / self.flops_per_s if self.flops_per_s else 0.0
        return ("compute", compute) if compute > memory else ("memory", memory)

    @property
    def ridge(self) -> float | None:
        """Operations per byte where memory ceases to be the bound."""
        return self.flops_per_s and self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class ProfiledOp:
    """One operation of the pass.

    Args:
        block: the part of the network it belongs to: ``"stem"``, ``"layer1.0"``, … ``"head"``.
        layer: parameter key prefix of its weights, empty without.
        op: its name, with what is fused behind it.
        problem: the convolution, or the output's shape, as text.
        kernel: that computed it.
        config: the kernel's configuration, as text.
        flops: floating-point operations of the direct convolution, a multiply-add counted as two.
        nbytes: the fewest bytes to move: every input and the output once; nothing that stays within a kernel.
        samples_us: the time of each sample in µs, alone on an idle device.
        bound: ``"memory"`` or ``"compute"``: what the roofline says it cannot be faster than.
        bound_us: the least time in µs that this allows.
        share: of the sum of all operations' medians.
    """

    block: str
    layer: str
    op: str
    problem: str
    kernel: str
    config: str
    flops: int
    nbytes: int
    samples_us: tuple[float, ...]
    bound: str
    bound_us: float
    share: float

    @property
    def short_layer(self) -> str:
        """`layer` for where there is little room: of several, a block is named where it begins only."""
        names, told, block = self.layer.split(" + "), [], ""
        for name in names:
            told.append(name.removeprefix(block) if block else name)
            block = "".join(f"{part}." for part in name.split(".")[:2])
        return " + ".join(told)

    @property
    def median_us(self) -> float:
        """Median time in µs."""
        return statistics.median(self.samples_us)

    @property
    def tflops(self) -> float:
        """10¹² operations per second."""
        return self.flops / self.median_us / 1e6

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes per second, of those that must be moved."""
        return self.nbytes / self.median_us / 1e3

    @property
    def percent_of_bound(self) -> float:
        """100 where the operation takes the least time that its bound allows.

        More is possible: small tensors come from the cache and not from memory, and a kernel that saves arithmetic
        (Winograd does 2.25 times less) is measured by that of the direct convolution.
        """
        return 100 * self.bound_us / self.median_us

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can store, derived figures included."""
        derived = ("median_us", "tflops", "gb_per_s", "percent_of_bound", "intensity")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A forward pass, operation by operation.

    The operations are timed one by one, each on an idle device, so that nothing overlaps: launch overlap is off. The
    whole pass is timed beside that, as anyone calls it.

    Args:
        model: the network's name.
        input_shape: (N, C, H, W).
        engine: ``"cuda"`` or ``"numpy"``.
        precision, kernel, fuse: as in `cupy_resnet.load`.
        ops: in the order they run.
        whole_us: the time of each whole pass in µs, from the call until the results are there: on a GPU with the
            host's launching, which overlaps with computing.
        empty_us: what timing nothing takes, part of every operation's time.
        ceilings: that bounds were computed with.
        machine: device, versions and date.
    """

    model: str
    input_shape: tuple[int, int, int, int]
    engine: str
    precision: str
    kernel: str
    fuse: bool
    ops: tuple[ProfiledOp, ...]
    whole_us: tuple[float, ...]
    empty_us: float
    ceilings: Ceilings
    machine: dict[str, Any]

    @property
    def sum_us(self) -> float:
        """Sum of the operations' medians in µs."""
        return sum(op.median_us for op in self.ops)

    @property
    def bound_us(self) -> float:
        """The least time in µs that the roofline allows the operations, one after the other."""
        return sum(op.bound_us for op in self.ops)

    @property
    def median_whole_us(self) -> float:
        """Median time of the whole pass in µs."""
        return statistics.median(self.whole_us)

    @property
    def flops(self) -> int:
        """Floating-point operations of the pass."""
        return sum(op.flops for op in self.ops)

    @property
    def samples(self) -> int:
        """How often each operation was timed."""
        return len(self.whole_us)

    @property
    def roof(self) -> Roof:
        """What bounds the operations."""
        return Roof.of(self.ceilings, self.precision)

    def by_kernel(self) -> dict[str, tuple[int, float]]:
        """Returns kernel → how many operations it computed and the sum of their medians in µs, slowest first."""
        sums: dict[str, tuple[int, float]] = {}
        for op in self.ops:
            count, total = sums.get(op.kernel, (0, 0.0))
            sums[op.kernel] = count + 1, total + op.median_us
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can store, derived figures included."""
        own = {
            "model": self.model,
            "input_shape": list(self.input_shape),
            "engine": self.engine,
            "precision": self.precision,
            "kernel": self.kernel,
            "fuse": self.fuse,
            "method": METHOD,
            "sum_us": self.sum_us,
            "bound_us": self.bound_us,
            "median_whole_us": self.median_whole_us,
            "whole_us": list(self.whole_us),
            "empty_us": self.empty_us,
            "flops": self.flops,
            "ops": [op.to_dict() for op in self.ops],
            "ceilings": self.ceilings.to_dict(),
        }
        return self.machine | own


METHOD = (
    "each operation timed alone on an idle device, launch overlap off, median over the samples; the whole pass timed "
    "as it is called, until the results are there"
)
"""How the figures came about, in words."""
