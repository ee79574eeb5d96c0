"""Two convolutions in one operation: in the graph, in each engine, and in what explains and times a pass."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from back_to_back_support import FIRST, PAIR, always, never
from helpers import normal
from profile_support import LIMITS, FakeClock

from cupy_resnet.arena import foresee
from cupy_resnet.binding import bind, bind_shapes
from cupy_resnet.conv2d import H100, PRECISIONS, Conv2dPair, back_to_back
from cupy_resnet.conv2d.back_to_back import back_to_back_problem
from cupy_resnet.conv2d.variants import Filter
from cupy_resnet.engines import checks
from cupy_resnet.engines.cuda import convolution
from cupy_resnet.engines.cuda.convolution import Convolutions
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine
from cupy_resnet.explanation import explain
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.networks.network import Network
from cupy_resnet.proof.profiling.measuring import HEAD, _forward, join
from cupy_resnet.proof.profiling.results import Roof
from cupy_resnet.proof.profiling.timed_ops import TimedOps

SHAPES = (2, 9, 8, 16), ((24, 3, 3, 16), (40, 1, 1, 24))


class Fusing(NumpyEngine):
    """Says that it computes pairs in one, and notes what it is asked to compute."""

    def __init__(self, fuses: bool = True) -> None:
        super().__init__()
        self.fuses = fuses
        self.log: list[str] = []

    def fuses_back_to_back(self, *shapes: Any, **geometry: Any) -> bool:
        checks.conv2d_pair(*shapes, "fp32", **geometry)
        return self.fuses

    def conv2d(self, x: Any, weight: Any, *arguments: Any, **options: Any) -> np.ndarray:
        self.log.append(f"conv {weight.shape[1]}×{weight.shape[1]}")
        return super().conv2d(x, weight, *arguments, **options)

    def conv2d_back_to_back(self, *arguments: Any, **options: Any) -> np.ndarray:
        before = len(self.log)
        y = super().conv2d_back_to_back(*arguments, **options)
        self.log[before:] = ["pair"]
        return y


def bound(name: str, ops: NumpyEngine, *, fuse: bool = True) -> Network:
    network = describe(name)
    return bind(network, random_state_dict(network, seed=4), ops, fuse=fuse)


# The graph ----------------------------------------------------------------------------------------------------------


def test_a_bottleneck_is_a_convolution_a_shortcut_and_a_pair_where_the_engine_can() -> None:
    x = normal((2, 8, 8, 64))
    for fuses, with_shortcut, without in (
        (True, ["conv 1×1", "conv 1×1", "pair"], ["conv 1×1", "pair"]),
        (False, ["conv 1×1", "conv 3×3", "conv 1×1", "conv 1×1"], ["conv 1×1", "conv 3×3", "conv 1×1"]),
    ):
        ops = Fusing(fuses)
        (_, first), (_, second) = bound("resnet50", ops).blocks[:2]
        y = first(ops, x)
        assert ops.log == with_shortcut
        ops.log.clear()
        second(ops, y)
        assert ops.log == without


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
def test_blocks_without_a_1x1_are_never_pairs(name: str) -> None:
    ops = Fusing()
    bound(name, ops)(ops, normal((1, 32, 32, 3)))
    assert "pair" not in ops.log


def test_with_batch_norm_apart_there_are_no_pairs() -> None:
    ops = Fusing()
    bound("resnet50", ops, fuse=False)(ops, normal((1, 32, 32, 3)))
    assert "pair" not in ops.log


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d"])
def test_a_pass_gives_the_same_either_way_checkpoints_included(name: str) -> None:
    x, found = normal((2, 32, 32, 3), 5), []
    for fuses in (True, False):
        ops, kept = Fusing(fuses), dict[str, np.ndarray]()
        network = bound(name, ops)
        results = (*network(ops, x), *network(ops, x, kept.__setitem__))
        assert list(kept) == list(network.checkpoint_names)
        found.append([*results, *kept.values()])
        assert ("pair" in ops.log) is fuses
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


# The operation ------------------------------------------------------------------------------------------------------


def test_in_numpy_it_is_its_parts() -> None:
    ops = NumpyEngine()
    (x_shape, shapes), biases = SHAPES, (normal((24,), 3), normal((40,), 4))
    x, weights = normal(x_shape), (normal(shapes[0], 1), normal(shapes[1], 2))
    assert not ops.fuses_back_to_back(x_shape, shapes, padding=1)
    between = ops.conv2d(x, weights[0], biases[0], stride=2, padding=1, relu=True)
    residual = normal((2, 5, 4, 40), 6)
    expected = ops.conv2d(between, weights[1], biases[1], residual=residual, relu=True)
    y = ops.conv2d_back_to_back(x, weights, biases, residual=residual, stride=2, padding=1, relu=True)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"second": (40, 3, 3, 24)}, r"conv2d_back_to_back: the second filter \(40, 3, 3, 24\) must be 1×1"),
        ({"second": (40, 1, 1, 16)}, "has C=24 channels"),
        ({"residual": (2, 9, 8, 24)}, "residual has shape"),
        ({"bias": (24,)}, "bias has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_every_engine(changes: dict[str, Any], words: str) -> None:
    x_shape, (first, second) = SHAPES
    weights = np.zeros(first, np.float32), np.zeros(changes.get("second", second), np.float32)
    biases = None, np.zeros(changes.get("bias", (40,)), np.float32)
    residual = np.zeros(changes.get("residual", (2, 9, 8, 40)), np.float32)
    for ops in (NumpyEngine(), ShapeEngine(fuses_pair=lambda pair: True)):
        with pytest.raises(ValueError, match=words):
            ops.conv2d_back_to_back(np.zeros(x_shape, np.float32), weights, biases, residual=residual, padding=1)


def test_the_pair_describes_both() -> None:
    assert PAIR.second == back_to_back_problem(FIRST, 256)
    assert PAIR.output_shape == (32, 56, 56, 256)
    assert PAIR.flops == FIRST.flops + PAIR.second.flops
    between = 2 * 32 * 56 * 56 * 64
    assert PAIR.bytes == FIRST.bytes + PAIR.second.bytes - 2 * between
    assert str(PAIR) == "32×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1, fp16"
    assert str(Conv2dPair(replace(FIRST, precision="fp32"), 256)) == "32×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1"
    with pytest.raises(ValueError, match="K must be at least 1"):
        Conv2dPair(FIRST, 0)


# Shapes -------------------------------------------------------------------------------------------------------------


def test_one_record_for_both_without_what_is_between() -> None:
    x_shape, shapes = SHAPES
    asked: list[Conv2dPair] = []

    def fuses(pair: Conv2dPair) -> bool:
        asked.append(pair)
        return True

    whole, parts = ShapeEngine("fp16", fuses_pair=fuses), ShapeEngine("fp16")
    for ops in (whole, parts):
        x, residual = (ShapeArray(shape, dtype=ops.arithmetic.storage) for shape in (x_shape, (2, 9, 8, 40)))
        weights = ShapeArray(shapes[0], layer="conv2"), ShapeArray(shapes[1], layer="conv3")
        biases = ShapeArray((24,), layer="conv2"), ShapeArray((40,), layer="conv3")
        y = ops.conv2d_back_to_back(x, weights, biases, residual=residual, padding=1, relu=True)
        assert (y.shape, y.dtype) == ((2, 9, 8, 40), np.float16)
    (record,) = whole.records
    assert [other.op for other in parts.records] == ["conv2d", "conv2d"]
    assert (record.op, record.layer) == ("conv2d_back_to_back", "conv2 + conv3")
    assert record.epilogue == ("bias", "residual", "relu")
    assert record.pair == asked[0]
    assert record.problem is None
    assert record.pair.parts == tuple(other.problem for other in parts.records)
    assert record.flops == sum(other.flops for other in parts.records)
    assert record.nbytes == sum(other.nbytes for other in parts.records) - 2 * 2 * (2 * 9 * 8 * 24)


def test_the_walk_foresees_what_an_engine_makes_that_fuses() -> None:
    network = bind_shapes(describe("resnet50"))
    _, apart = foresee(network, (2, 64, 64, 3), "fp16")
    _, fused = foresee(network, (2, 64, 64, 3), "fp16", lambda *shapes, **geometry: True)
    assert len(apart) - len(fused) == 16, "what is between"
    _, some = foresee(network, (2, 64, 64, 3), "fp16", lambda x_shape, *filters, **geometry: x_shape[3] == 256)
    assert len(apart) - len(some) == 6, "those of the third stage"


# The CUDA engine ----------------------------------------------------------------------------------------------------


class Gpu:
    """A device as far as the engine looks at it."""

    id = 0

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class OnGpu:
    """A CuPy array as far as the engine looks at it."""

    device: AbstractContextManager[Any] = Gpu()

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=4096)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Convolutions of an engine in fp16 on an H100; `launched` are the names of its kernels and their operands."""
    engine: Any = Convolutions()
    engine._cupy = SimpleNamespace(ndarray=OnGpu, empty=OnGpu, cuda=SimpleNamespace(Device=nullcontext))
    engine.precision, engine.arithmetic, engine.device = "fp16", PRECISIONS["fp16"], 0
    engine.kernel, engine.strict, engine.spread_nan, engine.launched = "auto", False, False, []
    kernel = SimpleNamespace(launch=lambda problem, operands, config: engine.launched.append(("one", operands)))
    monkeypatch.setattr(convolution, "describe_device", lambda number: H100)
    monkeypatch.setattr(convolution, "VARIANTS", dict.fromkeys(convolution.VARIANTS, kernel))
    monkeypatch.setattr(
        convolution,
        "launch_back_to_back",
        lambda pair, operands, config: engine.launched.append(("two", operands)),
    )
    return engine


def call(engine: Any, N: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    """(result, operands by name, kernels) of a pair of 56×56×64 → 64 → 256."""
    given: dict[str, Any] = {
        "x": OnGpu((N, 56, 56, 64)),
        "weights": (Filter(OnGpu((64, 3, 3, 64))), Filter(OnGpu((256, 1, 1, 64)))),
        "biases": (OnGpu((64,), np.float32), OnGpu((256,), np.float32)),
        "residual": OnGpu((N, 56, 56, 256)),
    }
    y = engine.conv2d_back_to_back(**given, padding=1, relu=True, **options)
    return y, given, [name for name, _ in engine.launched]


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_engine_launches_one_kernel_which_may_take_the_residuals_memory(
    engine: Any, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch)
    assert engine.fuses_back_to_back((2, 56, 56, 64), ((64, 3, 3, 64), (256, 1, 1, 64)), padding=1)
    y, given, kernels = call(engine, overwrite_residual=overwrite)
    assert kernels == ["two"]
    operands = engine.launched[0][1]
    assert (y.shape, y is given["residual"]) == ((2, 56, 56, 256), overwrite)
    assert (operands.x, operands.filters, operands.biases) == (given["x"], given["weights"], given["biases"])
    assert (operands.residual, operands.y, operands.relus) == (given["residual"], y, (True, True))


@pytest.mark.parametrize("why", ["never", "kernel", "precision", "empty"])
def test_or_two_where_it_cannot(engine: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (never if why == "never" else always)(monkeypatch)
    N = 0 if why == "empty" else 2
    if why == "kernel":
        engine.kernel = "conv2d_mma"
    if why == "precision":
        engine.precision = "tf32"
    assert not engine.fuses_back_to_back((N, 56, 56, 64), ((64, 3, 3, 64), (256, 1, 1, 64)), padding=1)
    if why == "precision":
        return
    y, given, kernels = call(engine, N, overwrite_residual=True)
    assert kernels == ([] if why == "empty" else ["one", "one"])
    assert y is given["residual"]
    if kernels:
        (_, first), (_, second) = engine.launched
        assert (first.x, first.residual, first.relu) == (given["x"], None, True)
        assert (second.x, second.residual, second.y) == (first.y, given["residual"], y)


# Explained and timed ------------------------------------------------------------------------------------------------


def test_explain_has_one_step_for_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(**options: Any) -> Any:
        return explain(describe("resnet50"), (8, 3, 224, 224), device=H100, **{"precision": "fp16", **options})

    never(monkeypatch)
    apart = steps()
    always(monkeypatch)
    fused = steps()
    pairs = [step for step in fused if step.kernel == back_to_back.name]
    assert pairs
    assert len(apart) - len(fused) == len(pairs)
    assert fused.flops == apart.flops
    step = pairs[0]
    assert step.layer == "layer1.0.conv2 + layer1.0.conv3"
    assert step.op == "conv2d_back_to_back + bias + residual + relu"
    assert step.problem == "8×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1, fp16"
    assert (step.reason, step.fallback) == ("always", None)
    assert step.config in str(fused)
    layers = [step.layer for step in fused]
    assert layers.index("layer1.0.downsample.0") == layers.index(step.layer) - 1
    for options in ({"kernel": "conv2d_mma"}, {"precision": "tf32"}, {"fuse": False}, {"engine": "numpy"}):
        assert all(step.kernel != back_to_back.name for step in steps(**options)), options


class AsIfCuda(Fusing):
    """Computes with NumPy what `explain` says of the pairs of an H100."""

    def fuses_back_to_back(self, *shapes: Any, **geometry: Any) -> bool:
        return back_to_back.supports_back_to_back(checks.conv2d_pair(*shapes, "fp16", **geometry), H100)[0]


def test_a_profile_times_a_pair_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    clock = FakeClock()
    ops = TimedOps(AsIfCuda(), clock)
    network = bound("resnet50", ops._ops)  # type: ignore[arg-type]
    blocks = _forward(network, ops, normal((1, 3, 64, 64)))
    explained = explain(describe("resnet50"), (1, 3, 64, 64), device=H100, precision="fp16")
    # NumPy has no stem of its own: what comes before the first block is left out on both sides.
    begin = [timing.op for timing in ops.timings].index("max_pool2d") + 1
    explanation: Any = explained[[step.record.op for step in explained].index("stem") + 1 :]
    rows = join(explanation, [ops.timings[begin:]], blocks[begin:], Roof.of(LIMITS, "fp32"))
    pairs = [row for row in rows if row.kernel == back_to_back.name]
    assert pairs
    assert all(row.layer.startswith(f"{row.block}.conv2 + {row.block}.conv3") for row in pairs)
    assert rows[-1].block == HEAD
