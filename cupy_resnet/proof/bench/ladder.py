"""Measures the ladder: every convolution kernel, and torch's convolution in every precision, on the same data.

All contenders take turns sample by sample on the same normally distributed data, without bias, residual or ReLU, since
torch computes those in kernels of their own. What a kernel of ours computes is compared with float64 first. The report
is read by `cupy_resnet.proof.ladder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...conv2d import PRECISIONS, VARIANTS, Conv2dProblem, choose
from ...engines.bfloat16 import from_bfloat16
from ...engines.selection import make_engine
from ..ladder import FORMAT, LAYOUTS, Layer, library_name, rival_precision
from ..machine import describe_machine
from .contenders import torch_settings
from .meters import Meter, make_meter
from .network import import_torch
from .precisions import RULES, Rules
from .timing import Effort, turns

SAMPLE_MS = 3.0
"""About how long a sample lasts: as many calls as that takes."""

TOLERANCES = {"fp32": 1e-5, "fp32-tc": 1e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}
"""‖y − y64‖ / ‖y64‖ of one convolution of normal data that is in the type already: a few times what rounding the output
(in TF32 the factors) and sums of a few thousand products in float32 give, Winograd's transforms included, and far below
what one wrong tap does."""

TORCH_PRECISIONS = {"cuda": ("fp32", "tf32", "fp16", "bf16"), "numpy": ("fp32", "bf16")}
LIBRARIES = {"cuda": "cudnn", "numpy": "onednn"}
"""By engine: the library behind torch's convolution."""

CHECKED_IMAGES = 2


@dataclass(frozen=True)
class _Contender:
    call: Callable[[], Any]
    rules: Rules


def measure_layer(problem: Conv2dProblem, count: int, engine: str, effort: Effort, meter: Meter) -> Layer:
    """Times every contender on one problem.

    Args:
        problem: the convolution, in the precision that is compared; kernels of other precisions are absent.
        count: as in `Layer`.
        engine: ``"cuda"``: the kernels; ``"numpy"``: the NumPy engine.
        effort: how many samples, and how many seconds for all contenders together.
        meter: of the engine's device.
    """
    torch = import_torch()
    generator = torch.Generator(meter.device).manual_seed(0)
    dtype = getattr(torch, RULES[problem.precision].dtype)
    shapes = (problem.input_shape, problem.filter_shape)
    x, weight = (torch.randn(shape, generator=generator, device=meter.device).to(dtype) for shape in shapes)
    ours, configs = (_kernels if engine == "cuda" else _numpy)(problem, x, weight)
    wrong = _wrong(problem, x, weight, ours)
    contenders = {name: _Contender(call, RULES["fp32"]) for name, call in ours.items()}
    contenders |= _torch_contenders(problem, x, weight, engine)

    def sample(contender: _Contender, repeats: int) -> float:
        with torch_settings(contender.rules):
            return meter.device_ms(contender.call, repeats)

    repeats = {}
    for name, contender in contenders.items():
        sample(contender, 1)  # compiles and autotunes
        repeats[name] = max(1, min(100, int(SAMPLE_MS / max(sample(contender, 1), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    fewest = min(3, effort.samples)
    for _, name in turns(list(contenders), effort.samples, meter, seconds=effort.seconds, fewest=fewest):
        times[name].append(sample(contenders[name], repeats[name]))
    return Layer(asdict(problem), str(problem), count, problem.flops, configs, times, wrong, LIBRARIES[engine])


Ours = tuple[dict[str, Callable[[], Any]], dict[str, str]]
"""Calls by name, which return the output (N, P, Q, K), and the configurations' names."""


def _kernels(problem: Conv2dProblem, x: Any, weight: Any) -> Ours:
    """Every kernel that supports the problem, in the configuration that the engine would choose for it."""
    import cupy

    from ...conv2d.variants import Filter, Operands
    from ...engines.cuda_engine import describe_device

    device = describe_device(cupy.cuda.runtime.getDevice())
    pixels, filter = (_cupy_array(tensor) for tensor in (x, weight))
    calls: dict[str, Callable[[], Any]] = {}
    configs = {}
    for name, variant in VARIANTS.items():
        if variant.supports(problem, device)[0]:
            config = choose(problem, device, name, spread_nan=True).config
            configs[name] = str(config)
            y = cupy.empty(problem.output_shape, problem.arithmetic.storage)
            operands = Operands(pixels, Filter(filter), None, None, y, False)
            calls[name] = partial(_launched, variant.launch, problem, operands, config)
    return calls, configs


def _cupy_array(tensor: Any) -> Any:
    """A torch tensor on the GPU as CuPy's array of the same memory, bfloat16 as its bits."""
    import cupy

    if tensor.dtype == import_torch().bfloat16:
        return cupy.from_dlpack(tensor.view(import_torch().int16)).view(np.uint16)
    return cupy.from_dlpack(tensor)


def _launched(launch: Callable[..., None], problem: Conv2dProblem, operands: Any, config: Any) -> Any:
    launch(problem, operands, config)
    return operands.y


def _numpy(problem: Conv2dProblem, x: Any, weight: Any) -> Ours:
    from ...engines.numpy_engine import NumpyEngine

    if problem.precision != "fp32":
        return {}, {}
    call = partial(NumpyEngine().conv2d, x.numpy(), weight.numpy(), **_geometry(problem))
    return {"numpy": call}, {"numpy": "im2col + BLAS"}


def _geometry(problem: Conv2dProblem) -> dict[str, Any]:
    return {
        "stride": (problem.stride_h, problem.stride_w),
        "padding": (problem.pad_h, problem.pad_w),
        "dilation": (problem.dilation_h, problem.dilation_w),
        "groups": problem.groups,
    }


def _torch_contenders(problem: Conv2dProblem, x: Any, weight: Any, engine: str) -> dict[str, _Contender]:
    torch = import_torch()
    contenders = {}
    for precision in TORCH_PRECISIONS[engine]:
        rules = RULES[precision]
        nhwc = [tensor.to(getattr(torch, rules.dtype)).permute(0, 3, 1, 2) for tensor in (x, weight)]
        for layout, tensors in zip(LAYOUTS, ([tensor.contiguous() for tensor in nhwc], nhwc), strict=True):
            call = partial(torch.nn.functional.conv2d, *tensors, **_geometry(problem))
            contenders[f"{library_name(LIBRARIES[engine], precision)}_{layout}"] = _Contender(call, rules)
    return contenders


def _wrong(problem: Conv2dProblem, x: Any, weight: Any, ours: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Returns the calls whose output is off, and by how much; the first and the last image are looked at."""
    torch = import_torch()
    images = sorted({0, problem.N - 1})[:CHECKED_IMAGES]
    nchw = (x[images].double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2))
    expected = torch.nn.functional.conv2d(*nchw, **_geometry(problem)).permute(0, 2, 3, 1).cpu().numpy()
    wrong = {}
    for name, call in ours.items():
        y = call()[images]
        error = _relative_error(y.get() if hasattr(y, "get") else y, expected)
        if not error <= TOLERANCES[problem.precision]:
            wrong[name] = f"its relative error against float64 is {error:.2g}"
    return wrong


def _relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    """‖y − expected‖ / ‖expected‖; uint16 are the bits of bfloat16."""
    values = np.asarray(from_bfloat16(y) if y.dtype == np.uint16 else y, np.float64)
    return float(np.linalg.norm(values - expected) / np.linalg.norm(expected))


def measure(
    problems: Mapping[Conv2dProblem, int],
    *,
    engine: str = "auto",
    effort: Effort,
    precision: str = "fp32",
    commit: str | None = None,
    model: str | None = None,
    batch: int | None = None,
    show: Callable[[str], None] = lambda doing: None,
    meter: Meter | None = None,
) -> dict[str, Any]:
    """Measures problems and returns the report that is stored.

    Args:
        problems: with how often each occurs, as `convolutions` gives them.
        engine: as for `cupy_resnet.load`.
        effort: per problem.
        precision: in which ours compute; one that torch has too, or fp32-tc.
        commit: as for `describe_machine`.
        model, batch: where the problems are from, if from a network.
        show: told what is being measured.
        meter: by default that of the engine's device.

    Raises:
        ImportError: torch is not installed.
        EngineUnavailableError: the engine cannot run here.
        ValueError: another precision.
    """
    engine = make_engine(engine).name
    valid = [name for name in PRECISIONS if rival_precision(name) in TORCH_PRECISIONS[engine]]
    if precision not in valid:
        raise ValueError(f"on the {engine} engine the ladder is measured in {', '.join(valid)}, not in {precision!r}")
    meter = meter or make_meter(engine)
    layers = []
    for problem, count in problems.items():
        show(str(problem))
        layers.append(asdict(measure_layer(replace(problem, precision=precision), count, engine, effort, meter)))
        meter.memory_mark()  # gives memory back
    report = {"format": FORMAT, **describe_machine(commit, engine=engine), "model": model, "batch": batch}
    return report | {"precision": precision, "layers": layers}
