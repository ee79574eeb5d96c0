"""Who takes part: this package through its public functions, and every way PyTorch offers to run the same network.

A contender is made late and one at a time (`make`), so that what making it takes, compilation above all, and the memory
it needs can be measured. torch is imported on first use.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import loading
from ..._names import unknown_name
from .network import import_torch
from .precisions import Rules


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run a network in torch.

    Args:
        layout: of activations and filters, ``"nchw"`` or ``"nhwc"``.
        on_cpu: on the processor, whatever device is measured.
        folded: BatchNorm folded into the convolutions by `torch.fx`.
        graph: captured as a CUDA graph, which is replayed.
        mode: of `torch.compile`, with Inductor's freezing; None for eager.
    """

    layout: str = "nhwc"
    on_cpu: bool = False
    folded: bool = False
    graph: bool = False
    mode: str | None = None


RIVALS: dict[str, dict[str, Way]] = {
    "eager": {"eager-nchw": Way(layout="nchw"), "eager-nhwc": Way()},
    "graph": {"graph-nhwc": Way(folded=True, graph=True)},
    "compile": {"compile": Way(mode="reduce-overhead")},
    "max-autotune": {"max-autotune": Way(mode="max-autotune")},
    "torch-cpu": {
        "torch-cpu-nchw": Way(layout="nchw", on_cpu=True),
        "torch-cpu-nhwc": Way(on_cpu=True),
        "torch-cpu-folded": Way(on_cpu=True, folded=True),
    },
}
"""What ``--rivals`` may name, and the contenders that each stands for."""

DEFAULT_RIVALS = {"cuda": ("eager", "graph", "compile"), "cpu": ("torch-cpu",)}
"""By the device that is measured."""

BUFFERS = 3


@dataclass(frozen=True)
class Recipe:
    """How to make a contender.

    Args:
        make: loads, moves, folds, captures or compiles; returns the call.
        inputs: what it will be called with.
        kernel: the convolution kernel that one of ours was told to use; None for a rival.
    """

    make: Callable[[], Callable[[Any], Any]]
    inputs: Sequence[Any]
    kernel: str | None = None


def check_rivals(names: Sequence[str], device: str) -> tuple[str, ...]:
    """Returns the rivals' names without repetition.

    Args:
        names: of `RIVALS`.
        device: ``"cuda"`` or ``"cpu"``: where this package will run, and so most rivals.

    Raises:
        ValueError: an unknown one, or one that does not run on `device`.
    """
    for name in names:
        if name not in RIVALS:
            raise ValueError(unknown_name("rival", name, RIVALS))
        if name == "graph" and device != "cuda":
            raise ValueError("the rival 'graph' replays a CUDA graph and needs the CUDA engine; without, use torch-cpu")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Buffers:
    """The input: `BUFFERS` normally distributed batches on the device, each in both memory layouts.

    Args:
        nchw: torch tensors (N, C, H, W), contiguous.
        nhwc: the same values, channels last.
    """

    nchw: list[Any]
    nhwc: list[Any]

    @classmethod
    def make(cls, shape: tuple[int, int, int, int], rules: Rules, device: str, seed: int = 0) -> "Buffers":
        """Draws them.

        Args:
            shape: (N, C, H, W).
            rules: of the precision, which names the type.
            device: ``"cuda"`` or ``"cpu"``.
            seed: equal seeds give equal values, on one kind of device.
        """
        torch = import_torch()
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, rules.dtype)
        nchw = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(BUFFERS)]
        return cls(nchw, [x.contiguous(memory_format=torch.channels_last) for x in nchw])


def our_recipes(
    network: str, weights: Path, buffers: Buffers, *, engine: str, precision: str, kernels: Sequence[str]
) -> dict[str, Recipe]:
    """Returns this package's contenders, through `cupy_resnet.load` and nothing else, one per kernel.

    Args:
        network: the model's name.
        weights: a file.
        buffers: the input. The NumPy engine gets NumPy's view of the same memory.
        engine: ``"cuda"`` or ``"numpy"``.
        precision: as for `load`.
        kernels: names of convolution kernels, or ``"auto"``.
    """
    inputs = buffers.nhwc if engine == "cuda" else [x.numpy() for x in buffers.nhwc]

    def make(kernel: str) -> Callable[[], Callable[[Any], Any]]:
        # Looked up when it is called, as a caller of the package would: what stands in for load in a test counts.
        return lambda: loading.load(network, weights, engine=engine, precision=precision, kernel=kernel)

    return {
        "ours" if kernel == "auto" else f"ours, {kernel}": Recipe(make(kernel), inputs, kernel) for kernel in kernels
    }


def rival_recipes(net: Any, buffers: Buffers, rules: Rules, rivals: Sequence[str], device: str) -> dict[str, Recipe]:
    """Returns the contenders that `rivals` stand for.

    Args:
        net: torch's network, float32, on the CPU.
        buffers: the input.
        rules: of the precision.
        rivals: names of `RIVALS`.
        device: where all but ``torch-cpu`` run.
    """
    ways = {name: way for rival in rivals for name, way in RIVALS[rival].items()}
    if any(way.mode for way in ways.values()):
        import_torch()._dynamo.reset()  # once, before any is made: it forgets what was compiled for an earlier row
    return {name: _recipe(net, buffers, rules, way, "cpu" if way.on_cpu else device) for name, way in ways.items()}


def _recipe(net: Any, buffers: Buffers, rules: Rules, way: Way, device: str) -> Recipe:
    inputs = [x.to(device) for x in (buffers.nchw if way.layout == "nchw" else buffers.nhwc)]

    def make() -> Callable[[Any], Any]:
        module = eager_or_folded(net, rules, device, way.layout, folded=way.folded)
        if way.graph:
            return Replayed(module, inputs[0])
        return _compiled(module, way.mode, inputs) if way.mode else module

    return Recipe(make, inputs)


def eager_or_folded(net: Any, rules: Rules, device: str, layout: str, *, folded: bool) -> Any:
    """Returns a copy of a torch network as a module that is called as it is.

    Args:
        net: float32, on the CPU; left as it is.
        rules: of the precision, which names the type of the weights.
        device: where the copy runs.
        layout: of its filters, ``"nchw"`` or ``"nhwc"``.
        folded: whether BatchNorm is folded into the convolutions, by torch's own means.
    """
    torch = import_torch()
    module = copy.deepcopy(net)
    if folded:
        from torch.fx.experimental.optimization import fuse

        module = fuse(module)
    module = module.to(device, getattr(torch, rules.dtype))
    return module.to(memory_format=torch.channels_last) if layout == "nhwc" else module


def _compiled(net: Any, mode: str, inputs: Sequence[Any]) -> Callable[[Any], Any]:
    """Compiles with frozen weights; the first calls, in which that happens, are made here."""
    torch = import_torch()
    import torch._inductor.config as inductor

    with inductor.patch(freezing=True):
        call = torch.compile(net, mode=mode)
        for x in inputs:
            call(x)
    return call


class Replayed:
    """A network captured as a CUDA graph. The input is copied into the graph's own, as any user would have to."""

    def __init__(self, net: Any, x: Any) -> None:
        torch = import_torch()
        self._net = net  # the graph reads its weights
        self._x = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is allocated or tuned on first use must not be captured
            for _ in range(3):
                net(self._x)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._y = net(self._x)

    def __call__(self, x: Any) -> Any:
        self._x.copy_(x)
        self._graph.replay()
        return self._y


@contextlib.contextmanager
def torch_settings(rules: Rules) -> Iterator[None]:
    """Inference mode, cuDNN's autotuning, and TF32 as the precision says; torch is left as it was found."""
    torch = import_torch()
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.benchmark = True
    cudnn.allow_tf32 = matmul.allow_tf32 = rules.tf32
    try:
        with torch.inference_mode():
            yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def to_float64(y: Any) -> Any:
    """Returns a result as a new float64 NumPy array on the host: contenders may overwrite theirs in the next call."""
    if hasattr(y, "cpu"):  # torch
        y = y.double().cpu().numpy()
    elif hasattr(y, "get"):  # CuPy
        y = y.get()
    return y.astype("float64", copy=True)
