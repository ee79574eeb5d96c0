"""The ladder: what was measured of each convolution kernel beside torch's, and what it sums up to.

    cupy-resnet bench --ladder --models resnet50 --batch 32 --json notebooks/results/ladder_fp32.json
    python -m cupy_resnet.proof.tables     # then rewrites the tables in README.md and kernels_cu/README.md

The rival is the convolution that torch calls, cuDNN's on a GPU and oneDNN's on a processor, autotuned, in both memory
layouts, of which the faster counts layer by layer; `cupy_resnet.proof.bench.ladder` measures.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..binding import bind_shapes
from ..conv2d import VARIANTS, Conv2dProblem
from ..engines.shape_engine import ShapeArray, ShapeEngine
from ..networks import describe

FORMAT = "ladder"
LAYOUTS = ("nchw", "nhwc")


def convolutions(model: str, batch: int, size: int = 224) -> dict[Conv2dProblem, int]:
    """Returns a network's distinct convolutions on (batch, 3, size, size), in order, and how often each occurs."""
    ops = ShapeEngine()
    network = describe(model)
    bind_shapes(network, fuse=True)(ops, ShapeArray((batch, size, size, network.in_channels)))
    return Counter(record.problem for record in ops.records if record.problem is not None)


def parse_problem(text: str) -> Conv2dProblem:
    """Reads a convolution from words such as ``"N=32,H=56,C=64,K=64,R=3,pad=1"``.

    ``W`` is ``H`` and ``S`` is ``R`` unless given; ``stride``, ``pad`` and ``dilation`` hold for height and width,
    ``stride_h`` and so on for one of them; all others are `Conv2dProblem`'s own, with its defaults.

    Raises:
        ValueError: a word that is none of these, a size that is missing, or no convolution.
    """
    words: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        name = name.strip().upper() if len(name.strip()) == 1 else name.strip().lower()
        if not value.strip().lstrip("-").isdecimal():
            raise ValueError(f"a convolution is written like N=32,H=56,C=64,K=64,R=3,pad=1, but {part!r} is no number")
        for each in (f"{name}_h", f"{name}_w") if name in ("stride", "pad", "dilation") else (name,):
            words[each] = int(value)
    words = {"W": words.get("H", 0), "S": words.get("R", 0)} | words
    known = Conv2dProblem.__dataclass_fields__.keys() - {"precision"}
    if unknown := sorted(words.keys() - known):
        raise ValueError(
            f"no size of a convolution is called {', '.join(unknown)}: there are {', '.join(sorted(known))}"
        )
    if missing := [name for name in "NHCKR" if name not in words]:
        raise ValueError(f"the convolution {text!r} lacks {', '.join(missing)}")
    if words["N"] < 1:
        raise ValueError(f"the convolution {text!r} has no image to measure: N must be at least 1")
    return Conv2dProblem(**words)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layer:
    """The measurement of one problem.

    Args:
        problem: the fields of its `Conv2dProblem`.
        text: the problem in words.
        count: how often the network has it.
        flops: of the direct convolution.
        configs: contender to configuration, for ours.
        samples_ms: contender to the time of each sample; a kernel that does not support the problem is absent.
        wrong: a kernel of ours whose times do not count, to the reason.
        library: behind torch's convolution, ``"cudnn"`` or ``"onednn"``. Its contenders are called
            ``"cudnn_nhwc"`` in float32 and ``"cudnn_fp16_nhwc"`` in another precision.
    """

    problem: dict[str, Any]
    text: str
    count: int
    flops: int
    configs: dict[str, str]
    samples_ms: dict[str, list[float]]
    wrong: dict[str, str] = field(default_factory=dict)
    library: str = "cudnn"

    def median_ms(self, contender: str) -> float:
        """Median time of a contender; of a library, as ``"cudnn"`` or ``"cudnn_fp16"``, in the faster layout."""
        layouts = [f"{contender}_{layout}" for layout in LAYOUTS if f"{contender}_{layout}" in self.samples_ms]
        return min(statistics.median(self.samples_ms[name]) for name in layouts or [contender])

    @property
    def rival(self) -> str:
        """The library in the problem's own precision, as `median_ms` knows it."""
        return library_name(self.library, rival_precision(self.problem["precision"]))

    @property
    def libraries(self) -> list[str]:
        """The library in every precision that was measured, as `median_ms` knows them."""
        names = (name.rpartition("_")[0] for name in self.samples_ms if name.startswith(f"{self.library}_"))
        return list(dict.fromkeys(names))

    @property
    def kernels(self) -> list[str]:
        """Ours, whose times count."""
        return [name for name in self.configs if name in self.samples_ms and name not in self.wrong]


def rival_precision(precision: str) -> str:
    """Returns what torch has to compute in to be as accurate as ours in `precision`."""
    return "fp32" if precision == "fp32-tc" else precision


def library_name(library: str, precision: str) -> str:
    """Returns what a library is called in a precision: by its name in float32, else as ``"cudnn_fp16"``."""
    return library if precision == "fp32" else f"{library}_{precision}"


@dataclass(frozen=True)
class Rung:
    """A kernel's sum over the layers it supports, each once.

    Args:
        name: of the kernel.
        layers: how many it supports.
        milliseconds: their total.
        tflops: 10¹² operations of the direct convolution per second.
        cudnn_milliseconds: the total of torch's library, cuDNN or oneDNN, on the same layers in the same precision.
    """

    name: str
    layers: int
    milliseconds: float
    tflops: float
    cudnn_milliseconds: float

    @property
    def percent_of_cudnn(self) -> float:
        """Speed relative to that of the library, which is 100."""
        return 100 * self.cudnn_milliseconds / self.milliseconds


def rungs(report: Mapping[str, Any], only: Iterable[str] | None = None) -> list[Rung]:
    """Sums a report up, in the ladder's order; `only` restricts the layers to those of these texts."""
    layers = _layers(report, only)
    return [rung for name in (*VARIANTS, "numpy") if (rung := _rung(name, layers, lambda layer: layer.kernels))]


def library_rungs(report: Mapping[str, Any]) -> list[Rung]:
    """The same for torch's convolution, in every precision that was measured, as ``"cudnn_tf32"``."""
    layers = _layers(report, None)
    names = dict.fromkeys(name for layer in layers for name in layer.libraries)
    return [rung for name in names if (rung := _rung(name, layers, lambda layer: layer.libraries))]


def _layers(report: Mapping[str, Any], only: Iterable[str] | None) -> list[Layer]:
    wanted = None if only is None else set(only)
    layers = [Layer(**layer) for layer in report["layers"]]
    return [layer for layer in layers if wanted is None or layer.text in wanted]


def _rung(name: str, layers: Sequence[Layer], names_of: Callable[[Layer], Sequence[str]]) -> Rung | None:
    mine = [layer for layer in layers if name in names_of(layer)]
    if not mine:
        return None
    total = sum(layer.median_ms(name) for layer in mine)
    flops = sum(layer.flops for layer in mine)
    return Rung(name, len(mine), total, flops / total / 1e9, sum(layer.median_ms(layer.rival) for layer in mine))
