"""Measures the ladder: every convolution kernel, and cuDNN in the same run, on the layers of a network.

    python -m cupy_resnet.proof.ladder --batch 32 --json notebooks/results/ladder_fp32.json
    python -m cupy_resnet.proof.tables     # then rewrites the tables in README.md and kernels_cu/README.md

The rival is cuDNN's convolution through torch in float32 with TF32 off, autotuned, in both memory layouts, of which the
faster counts layer by layer. All contenders take turns sample by sample on the same normally distributed data, without
bias, residual or ReLU, since torch computes those in kernels of their own.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..binding import bind_shapes
from ..conv2d import VARIANTS, Conv2dProblem
from ..engines.shape_engine import ShapeArray, ShapeEngine
from ..networks import describe
from ..weights_store.writing import write_file
from .machine import describe_machine

CUDNN = ("cudnn_nchw", "cudnn_nhwc")


def convolutions(model: str, batch: int, size: int = 224) -> dict[Conv2dProblem, int]:
    """Returns a network's distinct convolutions on (batch, 3, size, size), in order, and how often each occurs."""
    ops = ShapeEngine()
    network = describe(model)
    bind_shapes(network, fuse=True)(ops, ops.nchw_to_nhwc(ShapeArray((batch, network.in_channels, size, size))))
    return Counter(record.problem for record in ops.records if record.problem is not None)


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
    """

    problem: dict[str, Any]
    text: str
    count: int
    flops: int
    configs: dict[str, str]
    samples_ms: dict[str, list[float]]

    def median_ms(self, contender: str) -> float:
        """Median time of a contender; ``"cudnn"`` is the faster of its two layouts."""
        if contender == "cudnn":
            return min(self.median_ms(name) for name in CUDNN)
        return statistics.median(self.samples_ms[contender])


def measure_layer(problem: Conv2dProblem, count: int, samples: int, milliseconds: float) -> Layer:
    """Times every contender on one problem; a sample lasts about `milliseconds`."""
    import cupy

    from ..conv2d.heuristics import fastest
    from ..conv2d.variants import Filter, Operands
    from ..engines.cuda_engine import describe_device

    device = describe_device(cupy.cuda.runtime.getDevice())
    x = cupy.random.standard_normal(problem.input_shape, dtype=cupy.float32)
    weight = cupy.random.standard_normal(problem.filter_shape, dtype=cupy.float32)
    y = cupy.empty(problem.output_shape, cupy.float32)
    operands = Operands(x, Filter(weight), None, None, y, False)
    contenders: dict[str, Callable[[], Any]] = {}
    configs = {}
    for name, variant in VARIANTS.items():
        if variant.supports(problem, device)[0]:
            config, _ = fastest(name, problem, device)
            configs[name] = str(config)
            contenders[name] = partial(variant.launch, problem, operands, config)
    contenders |= _cudnn(problem, x, weight)
    repeats = {name: _repeats(contender, milliseconds) for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(samples):
        for name, contender in contenders.items():
            times[name].append(_time(contender, repeats[name]))
    return Layer(asdict(problem), str(problem), count, problem.flops, configs, times)


def _cudnn(problem: Conv2dProblem, x: Any, weight: Any) -> dict[str, Callable[[], Any]]:
    """The rival's calls on the same data."""
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    nhwc = [torch.from_dlpack(array).permute(0, 3, 1, 2) for array in (x, weight)]
    options: dict[str, Any] = {
        "stride": (problem.stride_h, problem.stride_w),
        "padding": (problem.pad_h, problem.pad_w),
        "dilation": (problem.dilation_h, problem.dilation_w),
        "groups": problem.groups,
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name, tensors in zip(CUDNN, ([t.contiguous() for t in nhwc], nhwc), strict=True):
        calls[name] = partial(torch.nn.functional.conv2d, *tensors, **options)
        calls[name]()  # autotunes
    torch.cuda.synchronize()
    return calls


def _time(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds per call of `repeats` calls in a row, by events on the default stream."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / repeats


def _repeats(call: Callable[[], Any], milliseconds: float) -> int:
    call()
    return max(1, min(100, int(milliseconds / max(_time(call, 1), 1e-3))))


def measure(model: str, batch: int, samples: int, milliseconds: float, commit: str | None) -> dict[str, Any]:
    """Measures every distinct convolution of a network and returns the report that `main` stores."""
    import cupy

    layers = []
    for problem, count in convolutions(model, batch).items():
        layers.append(asdict(measure_layer(problem, count, samples, milliseconds)))
        cupy.get_default_memory_pool().free_all_blocks()
    return {**describe_machine(commit), "model": model, "batch": batch, "precision": "fp32", "layers": layers}


@dataclass(frozen=True)
class Rung:
    """A kernel's sum over the layers it supports, each once.

    Args:
        name: of the kernel.
        layers: how many it supports.
        milliseconds: their total.
        tflops: 10¹² operations of the direct convolution per second.
        cudnn_milliseconds: cuDNN's total on the same layers.
    """

    name: str
    layers: int
    milliseconds: float
    tflops: float
    cudnn_milliseconds: float

    @property
    def percent_of_cudnn(self) -> float:
        """Speed relative to that of cuDNN, which is 100."""
        return 100 * self.cudnn_milliseconds / self.milliseconds


def rungs(report: dict[str, Any], only: Iterable[str] | None = None) -> list[Rung]:
    """Sums a report up, in the ladder's order; `only` restricts the layers to those of these texts."""
    layers = [Layer(**layer) for layer in report["layers"]]
    wanted = None if only is None else set(only)
    result = []
    for name in VARIANTS:
        mine = [x for x in layers if name in x.samples_ms and (wanted is None or x.text in wanted)]
        if mine:
            total = sum(layer.median_ms(name) for layer in mine)
            flops = sum(layer.flops for layer in mine)
            cudnn = sum(layer.median_ms("cudnn") for layer in mine)
            result.append(Rung(name, len(mine), total, flops / total / 1e9, cudnn))
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measures and stores."""
    parser = argparse.ArgumentParser(prog="python -m cupy_resnet.proof.ladder", description="Measures the ladder.")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--milliseconds", type=float, default=3.0, help="length of a sample")
    parser.add_argument("--commit", help="the source's commit, to be stored")
    parser.add_argument("--json", type=Path, required=True, help="where to store the report")
    options = parser.parse_args(arguments)
    report = measure(options.model, options.batch, options.samples, options.milliseconds, options.commit)
    write_file(options.json, json.dumps(report, indent=1, ensure_ascii=False).encode())


if __name__ == "__main__":
    main()
