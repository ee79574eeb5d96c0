"""A convolution with a shortcut, without a GPU: its description, checks, engines, the choice, tables, the launch."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, integers
from tuning_support import entry, fresh_tables
from wgmma_support import collected_launches, operands, two_gpus

from cupy_resnet.conv2d import (
    H100,
    PRECISIONS,
    VARIANTS,
    Conv2dProblem,
    choose,
    choose_shortcut,
    tensor_core_variants,
    tuned,
)
from cupy_resnet.conv2d.configs import WgmmaConfig
from cupy_resnet.conv2d.heuristics import automatic
from cupy_resnet.conv2d.variants import Filter, Operands, Shortcut
from cupy_resnet.engines.base import Fusions
from cupy_resnet.engines.cuda import convolution
from cupy_resnet.engines.cuda.convolution import Convolutions
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine
from cupy_resnet.errors import UnsupportedProblemError
from cupy_resnet.tuning import candidates

BLOCK = Conv2dProblem(
    N=8,
    H=14,
    W=14,
    C=256,
    K=256,
    R=3,
    S=3,
    pad_h=1,
    pad_w=1,
    precision="fp16",
    shortcut_channels=128,
    shortcut_stride=2,
)
"""The end of ResNet-18's layer3.0."""

A100 = replace(H100, name="A100", compute_capability=(8, 0), sm_count=108, shared_memory_per_block=163 << 10)

NO_HOPPER = "needs compute capability 9.0, A100 has 8.0"

# The description ------------------------------------------------------------------------------------------------------


def test_its_sizes() -> None:
    assert (BLOCK.gemm_k, BLOCK.depth) == (9 * 256, 9 * 256 + 128)
    assert BLOCK.shortcut_shape == (8, 28, 28, 128)
    assert BLOCK.shortcut_filter_shape == (256, 1, 1, 128)
    alone, rest = BLOCK.shortcut_alone(), BLOCK.without_shortcut()
    assert alone == Conv2dProblem(N=8, H=28, W=28, C=128, K=256, R=1, S=1, stride_h=2, stride_w=2, precision="fp16")
    assert alone.output_shape == rest.output_shape == BLOCK.output_shape
    assert BLOCK.shortcut_alone((8, 27, 28, 128)) == replace(alone, H=27)
    assert rest.depth == rest.gemm_k == BLOCK.gemm_k
    assert BLOCK.flops == alone.flops + rest.flops
    read = 8 * 14 * 14 * 128  # every other row and column
    assert BLOCK.bytes == rest.bytes + 2 * (read + 256 * 128)


def test_its_text() -> None:
    assert str(BLOCK) == "8×14×14×256 → 256, 3×3, pad 1×1, plus 1×1 of 128 channels, stride 2, fp16"
    assert str(replace(BLOCK, shortcut_stride=1)).endswith(", plus 1×1 of 128 channels, fp16")
    assert "plus" not in str(BLOCK.without_shortcut())


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((8, 28, 28, 128), True),
        ((8, 27, 28, 128), True),
        ((8, 27, 27, 128), True),
        ((8, 26, 28, 128), False),
        ((8, 28, 29, 128), False),
        ((7, 28, 28, 128), False),
        ((8, 28, 28, 64), False),
        ((8, 28, 28), False),
        ((8, 0, 28, 128), False),
    ],
)
def test_which_inputs_it_may_have(shape: tuple[int, ...], fits: bool) -> None:
    assert BLOCK.has_shortcut_of(shape) is fits
    assert not BLOCK.without_shortcut().has_shortcut_of(shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shortcut_channels": -1}, "conv2d: shortcut_channels must not be negative, got -1"),
        ({"shortcut_stride": 0}, "conv2d: shortcut_stride must be at least 1, got 0"),
        ({"shortcut_channels": 0}, "conv2d: there is no shortcut to have a stride of 2"),
    ],
)
def test_sizes_that_no_shortcut_can_have(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(BLOCK, **changes)


def test_sizes_that_the_kernels_cannot_index() -> None:
    assert BLOCK.limit_exceeded() is None
    large = replace(BLOCK, shortcut_channels=1 << 22)
    assert large.limit_exceeded() == "elements of one image of the shortcut's input = 3288334336 exceeds 2^31 − 1"
    wide = replace(
        BLOCK, H=1, W=1, K=1 << 20, shortcut_channels=2048, shortcut_stride=1, C=64, R=1, S=1, pad_h=0, pad_w=0
    )
    assert wide.limit_exceeded() == "elements of the shortcut's filter = 2148007936 exceeds 2^31 − 1"


# What engines make of it ----------------------------------------------------------------------------------------------

X, WEIGHT, BIAS = integers((2, 5, 4, 6), 1), integers((8, 3, 3, 6), 2), integers((8,), 3)
X0, WEIGHT0 = integers((2, 9, 8, 4), 4), integers((8, 1, 1, 4), 5)


@pytest.mark.parametrize("relu", [False, True])
def test_numpy_adds_both_convolutions(relu: bool) -> None:
    ops = NumpyEngine()
    y = ops.conv2d(X, WEIGHT, BIAS, padding=1, shortcut=(X0, WEIGHT0, 2), relu=relu)
    exact = ops.conv2d(X, WEIGHT, BIAS, padding=1) + X0[:, ::2, ::2] @ WEIGHT0[:, 0, 0].T
    assert_close(y, np.maximum(exact, 0) if relu else exact, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"shortcut": (X0, WEIGHT0, 1)},
            r"shortcut's input \(2, 9, 8, 4\) with stride 1 does not fit the output \(2, 5, 4",
        ),
        ({"shortcut": (X0[:1], WEIGHT0, 2)}, r"shortcut's input \(1, 9, 8, 4\) with stride 2 does not fit"),
        ({"shortcut": (X0, WEIGHT, 2)}, r"weight has shape \(8, 3, 3, 6\), but its .* need \(8, 1, 1, 4\)"),
        ({"shortcut": (X0, WEIGHT0[:7], 2)}, r"weight has shape \(7, 1, 1, 4\)"),
        ({"shortcut": (X0[0], WEIGHT0, 2)}, r"the shortcut's input must be \(N, H, W, C\), got shape \(9, 8, 4\)"),
        ({"shortcut": (X0, WEIGHT0, 2), "residual": integers((2, 5, 4, 8))}, "a residual or a shortcut, not both"),
    ],
)
@pytest.mark.parametrize("ops", [NumpyEngine(), ShapeEngine()], ids=["numpy", "shapes"])
def test_what_does_not_fit_is_named(ops: Any, given: dict[str, Any], message: str) -> None:
    if isinstance(ops, ShapeEngine):
        given = {
            name: tuple(v if isinstance(v, int) else ShapeArray(v.shape) for v in value)
            if name == "shortcut"
            else ShapeArray(value.shape)
            for name, value in given.items()
        }
    with pytest.raises(ValueError, match=f"^conv2d: .*{message}"):
        ops.conv2d(ShapeArray(X.shape) if isinstance(ops, ShapeEngine) else X, WEIGHT_OF[ops.name], padding=1, **given)


WEIGHT_OF = {"numpy": WEIGHT, "shapes": ShapeArray(WEIGHT.shape)}


def test_shapes_record_one_operation_or_two() -> None:
    asked: list[Conv2dProblem] = []
    fusing = Fusions(shortcut=lambda problem: not asked.append(problem))  # type: ignore[func-returns-value]
    whole, parts = ShapeEngine("fp16", fusions=fusing), ShapeEngine("fp16")
    for ops in (whole, parts):
        x, x0 = (ShapeArray(shape, dtype=np.dtype(np.float16)) for shape in (BLOCK.input_shape, BLOCK.shortcut_shape))
        weight, bias, weight0 = (
            ShapeArray(BLOCK.filter_shape, "conv2"),
            ShapeArray((256,)),
            ShapeArray((256, 1, 1, 128), "downsample.0"),
        )
        y = ops.conv2d(x, weight, bias, padding=1, shortcut=(x0, weight0, 2), relu=True)
        assert (y.shape, y.dtype) == (BLOCK.output_shape, np.float16)
    (record,) = whole.records
    assert asked == [BLOCK]
    assert record.output_shape == BLOCK.output_shape
    assert (record.op, record.layer, record.problem) == ("conv2d", "conv2 + downsample.0", BLOCK)
    assert record.epilogue == ("bias", "shortcut", "relu")
    assert record.nbytes == BLOCK.bytes + bias.nbytes
    first, second = parts.records
    assert (first.layer, first.problem, first.epilogue) == ("downsample.0", BLOCK.shortcut_alone(), ())
    assert (second.layer, second.problem) == ("conv2", BLOCK.without_shortcut())
    assert second.epilogue == ("bias", "residual", "relu")
    assert record.flops == first.flops + second.flops


class OnGpu:
    """A CuPy array as far as the engine looks at it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.device = nullcontext()
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("N", [0, 8])
def test_the_cuda_engine_launches_one_kernel_or_two(monkeypatch: pytest.MonkeyPatch, N: int, fused: bool) -> None:
    launched: list[Any] = []
    device: Any = nullcontext()
    device.id = 0
    engine: Any = Convolutions()
    engine._cupy = SimpleNamespace(ndarray=OnGpu, empty=OnGpu, cuda=SimpleNamespace(Device=nullcontext))
    engine.precision, engine.arithmetic = "fp16", PRECISIONS["fp16"]
    engine.kernel, engine.strict, engine.spread_nan = "auto", False, False
    kernel = SimpleNamespace(launch=lambda problem, operands, config: launched.append((problem, operands)))
    monkeypatch.setattr(convolution, "describe_device", lambda number: H100)
    monkeypatch.setattr(convolution, "VARIANTS", dict.fromkeys(convolution.VARIANTS, kernel))
    monkeypatch.setattr(convolution, "choose_shortcut", lambda *_, **__: (fused, "because"))
    problem = replace(BLOCK, N=N)
    x, x0, bias = OnGpu(problem.input_shape), OnGpu(problem.shortcut_shape), OnGpu((256,), np.float32)
    for array in (x, x0, bias):
        array.device = device
    filter, filter0 = Filter(OnGpu(problem.filter_shape)), Filter(OnGpu(problem.shortcut_filter_shape))
    for array in (filter.weight, filter0.weight):
        array.device = device
    monkeypatch.setattr(engine, "_output", lambda op, shape, out=None: out or made(shape, device))
    y = engine.conv2d(x, filter, bias, padding=1, shortcut=(x0, filter0, 2), relu=True)
    assert y.shape == problem.output_shape
    if not N:
        assert launched == []
    elif fused:
        joint = Operands(x, filter, bias, None, y, True, Shortcut(x0, filter0), backwards=True)
        assert launched == [(problem, joint)]
    else:
        first = Operands(x0, filter0, None, None, y, False, backwards=True)
        second = Operands(x, filter, bias, y, y, True)  # in the place of the first
        assert launched == [(problem.shortcut_alone(), first), (problem.without_shortcut(), second)]


def made(shape: tuple[int, ...], device: Any) -> OnGpu:
    array = OnGpu(shape)
    array.device = device
    return array


# Who computes it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_that_do_not_know_it_say_so(name: str) -> None:
    variant = VARIANTS[name]
    for precision in variant.precisions:
        problem = replace(BLOCK, precision=precision)
        supported, why_not = variant.supports(problem, H100)
        assert supported == variant.adds_shortcut == (name == "conv2d_wgmma")
        if variant.supports(problem.without_shortcut(), H100)[0] and not supported:
            assert why_not == "computes no second convolution as a shortcut"


def test_what_auto_chooses_among() -> None:
    for precision in ("fp16", "bf16", "tf32"):
        assert automatic(replace(BLOCK, precision=precision), H100, True) == ["conv2d_wgmma"]
    problem = replace(BLOCK, precision="fp32")
    with pytest.raises(UnsupportedProblemError, match="computes no second convolution as a shortcut"):
        automatic(problem, H100)
    with pytest.raises(UnsupportedProblemError, match=NO_HOPPER):
        choose(BLOCK, A100)
    demanded = choose(BLOCK, H100, "conv2d_mma")
    assert demanded.variant == "conv2d_wgmma"
    assert demanded.fallback == "conv2d_mma computes no second convolution as a shortcut"


def test_split_k_deals_out_the_shortcuts_slices() -> None:
    """A tap of 64 channels is one slice: too few for a cluster, but for the shortcut's."""
    shallow = replace(BLOCK, R=1, S=1, pad_h=0, pad_w=0, C=64, shortcut_channels=64 * 15)
    sizes = {c.split_k_slices for c in VARIANTS["conv2d_wgmma"].candidates(shallow, H100) if isinstance(c, WgmmaConfig)}
    assert sizes == {1, 2, 4, 8}
    alone = VARIANTS["conv2d_wgmma"].candidates(shallow.without_shortcut(), H100)
    assert {c.split_k_slices for c in alone if isinstance(c, WgmmaConfig)} == {1}


# One kernel or two ----------------------------------------------------------------------------------------------------


def test_the_model_expects_what_is_not_written_to_be_saved() -> None:
    wide = replace(
        BLOCK, N=256, H=56, W=56, C=64, K=256, R=1, S=1, pad_h=0, pad_w=0, shortcut_channels=64, shortcut_stride=1
    )
    for problem in (BLOCK, wide):
        fused, reason = choose_shortcut(problem, H100, use_tables=False)
        assert fused
        assert reason.endswith("by the model")


def test_where_no_kernel_does_both_there_are_two() -> None:
    assert choose_shortcut(BLOCK, A100) == (False, f"conv2d {BLOCK} cannot be computed: {NO_HOPPER}")
    fp32 = replace(BLOCK, precision="fp32")
    assert choose_shortcut(fp32, H100)[0] is False
    narrow = replace(BLOCK, shortcut_channels=96)
    assert choose_shortcut(narrow, H100)[1].endswith("needs the shortcut's C a multiple of 64, not 96")


def test_a_kernel_that_was_asked_for_decides() -> None:
    mma = choose_shortcut(BLOCK, H100, "conv2d_mma")
    assert mma == (False, "conv2d_mma was asked for, which computes no second convolution as a shortcut")
    assert choose_shortcut(BLOCK, H100, "conv2d_wgmma") == (True, "conv2d_wgmma was asked for")
    with pytest.raises(ValueError, match="kernel"):
        choose_shortcut(BLOCK, H100, "conv2d_best")
    with pytest.raises(ValueError, match=r"has no shortcut$"):
        choose_shortcut(BLOCK.without_shortcut(), H100)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_tables(tmp_path, monkeypatch)


@pytest.mark.usefixtures("tables")
def test_the_race_of_one_kernel_against_two_decides() -> None:
    apart, together = candidates(BLOCK, H100)[:2]
    parts = [BLOCK.without_shortcut(), BLOCK.shortcut_alone()]
    tuned.keep(H100.name, [entry(candidates(part, H100)[0], part, spread_nan=False) for part in parts])
    assert choose_shortcut(BLOCK, H100)[1].endswith("by the model")
    told = "fastest of 37 timed on this GPU, 12.3 µs (next best 12.9)"
    tuned.keep(H100.name, [entry(together, BLOCK, spread_nan=False)])
    assert choose_shortcut(BLOCK, H100) == (True, told)
    tuned.keep(H100.name, [entry(apart, BLOCK, spread_nan=False)])
    assert choose_shortcut(BLOCK, H100) == (False, f"two kernels are faster: {told}")
    assert choose_shortcut(BLOCK, H100, use_tables=False)[1].endswith("by the model")


def test_tables_name_it_and_older_ones_have_none() -> None:
    best = candidates(BLOCK, H100)[0]
    written = entry(best, BLOCK).as_dict()
    assert written["problem"] | {"shortcut_channels": 128, "shortcut_stride": 2} == written["problem"]
    assert tuned.Entry.from_dict(json.loads(json.dumps(written))).problem == BLOCK
    older = entry(best, BLOCK.without_shortcut()).as_dict()
    assert not [name for name in older["problem"] if "shortcut" in name]
    assert tuned.Entry.from_dict(older).problem == BLOCK.without_shortcut()
    table = tuned.Table("gpu", "digest").merged([entry(best, BLOCK), entry(best, BLOCK.without_shortcut())])
    assert tuned.Table.parse(table.dump()) == table


# The launch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [27, 28])
def test_the_launch_describes_both_inputs(monkeypatch: pytest.MonkeyPatch, split: bool, size: int) -> None:
    launches = collected_launches(monkeypatch, tensor_core_variants, ("im2col_map", "matrix_map"))
    variant = VARIANTS["conv2d_wgmma"]
    config = next(c for c in variant.candidates(BLOCK, H100) if isinstance(c, WgmmaConfig) and c.cluster == split)
    x0 = SimpleNamespace(shape=(8, size, size, 128))
    second = Shortcut(x0, Filter("weight0"))  # type: ignore[arg-type]
    with two_gpus(monkeypatch):
        variant.launch(BLOCK, replace(operands(True, False), shortcut=second), config)
    ((kernel, _, _, arguments, _),) = launches
    assert kernel == (config.source, config.defines())
    alone = replace(BLOCK.shortcut_alone(), H=size, W=size)
    assert arguments[:4] == (
        ("im2col_map", BLOCK, "x", config.tile_m),
        ("matrix_map", BLOCK, "weight", 9 * 256, config.tile_n),
        ("im2col_map", alone, x0, config.tile_m),
        ("matrix_map", alone, "weight0", 128, config.tile_n),
    )
    params = arguments[-1]
    assert (params["shortcut_channels"][0], params["shortcut_stride"][0], params["gemm_k"][0]) == (128, 2, 9 * 256)
