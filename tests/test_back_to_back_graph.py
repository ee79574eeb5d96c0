"""The ends of blocks in one operation: in the graph, in the engines without a GPU, and in what explains and times a
pass (the CUDA engine: test_back_to_back_engine).
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from back_to_back_support import FIRST, LEVELS, PLAIN, Fusing, always, choose_by, nothing
from helpers import assert_close, normal
from profile_support import LIMITS, FakeClock

from cupy_resnet.binding import bind
from cupy_resnet.conv2d import H100, Conv2dPair, back_to_back
from cupy_resnet.engines.base import Fusions
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine
from cupy_resnet.explanation import explain
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.networks.network import Network
from cupy_resnet.networks.resnet import BasicBlock
from cupy_resnet.proof.profiling.measuring import HEAD, _forward, join
from cupy_resnet.proof.profiling.results import Roof
from cupy_resnet.proof.profiling.timed_ops import TimedOps

ALL = LEVELS["all"]
SHAPES = (2, 9, 8, 16), ((24, 3, 3, 16), (40, 1, 1, 24))


@cache
def bound(name: str, *, fuse: bool = True) -> Network:
    network = describe(name)
    return bind(network, random_state_dict(network, seed=4), PLAIN, fuse=fuse)


# The graph ----------------------------------------------------------------------------------------------------------

FIRST_BLOCK = {
    "nothing": ["conv 1×1", "conv 3×3", "conv 1×1", "conv 1×1"],
    "shortcuts": ["conv 1×1", "conv 3×3", "conv 1×1 + shortcut"],
    "pairs": ["conv 1×1", "conv 3×3", "conv 1×1", "conv 1×1"],
    "pairs, shortcuts apart": ["conv 1×1", "conv 3×3", "conv 1×1 + shortcut"],
    "pairs with shortcuts": ["conv 1×1", "pair + shortcut"],
    "all": ["conv 1×1", "pair + shortcut"],
}
SECOND_BLOCK = {
    name: ["conv 1×1", *(["pair"] if "pairs" in name or name == "all" else ["conv 3×3", "conv 1×1"])]
    for name in FIRST_BLOCK
}


@pytest.mark.parametrize("level", FIRST_BLOCK)
def test_a_bottleneck_by_itself(level: str) -> None:
    """Which does not know what comes next."""
    ops = Fusing(LEVELS[level])
    (_, first), (_, second) = bound("resnet50").blocks[:2]
    y = first(ops, normal((2, 8, 8, 64)))
    assert ops.log == FIRST_BLOCK[level]
    ops.log.clear()
    second(ops, y)
    assert ops.log == SECOND_BLOCK[level]


def test_where_all_can_be_one_a_pass_is_a_kernel_per_bottleneck() -> None:
    """The next block's first convolution too, also where the next stage begins."""
    ops = Fusing(ALL)
    bound("resnet50").body(ops, normal((1, 8, 8, 64)))
    stages = [["pair + shortcut + following", *["pair + following"] * (depth - 1)] for depth in (3, 4, 6, 3)]
    stages[-1][-1] = "pair"
    assert ops.log == ["conv 1×1", *(op for stage in stages for op in stage)]


def test_where_three_are_too_many_two_are_one() -> None:
    """Of the second stage everything, of the third only pairs, elsewhere shortcuts at most."""
    ops = Fusing(LEVELS["some"])
    bound("resnet50").body(ops, normal((1, 8, 8, 64)))
    apart = ["conv 1×1", "conv 3×3", "conv 1×1"]
    first = ["conv 1×1", "conv 3×3", "conv 1×1", "conv 1×1", *apart, *apart]
    second = ["conv 1×1", "pair + shortcut + following", *["pair + following"] * 3]
    third = ["pair + shortcut", *["conv 1×1", "pair"] * 5]
    fourth = ["conv 1×1", "conv 3×3", "conv 1×1 + shortcut", *apart, *apart]
    assert ops.log == [*first, *second, *third, *fourth]


def test_blocks_of_two_3x3_have_shortcuts_but_no_pairs() -> None:
    ops = Fusing(ALL)
    bound("resnet18").body(ops, normal((1, 8, 8, 64)))
    plain, joint = ["conv 3×3"] * 2, ["conv 3×3", "conv 3×3 + shortcut"]
    assert ops.log == [*plain * 2, *(joint + plain) * 3]
    ops.log.clear()
    bound("resnet20")(ops, normal((1, 32, 32, 3)))
    assert set(ops.log) == {"conv 3×3"}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_with_batch_norm_apart_every_convolution_is_by_itself(name: str) -> None:
    ops = Fusing(ALL)
    bound(name, fuse=False)(ops, normal((1, 32, 32, 3)))
    assert set(ops.log) <= {"conv 7×7", "conv 3×3", "conv 1×1"}


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_a_pass_gives_the_same_either_way_checkpoints_included(name: str) -> None:
    x, network = normal((2, 32, 32, 3), 5), bound(name)
    wanted = None
    for level, fusions in LEVELS.items():
        if name != "resnet50" and level not in ("nothing", "all"):
            continue
        ops, kept = Fusing(fusions), dict[str, np.ndarray]()
        results = (*network(ops, x), *network(ops, x, kept.__setitem__))
        assert list(kept) == list(network.checkpoint_names)
        found = [*results, *kept.values()]
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=level)


# The joint bias -----------------------------------------------------------------------------------------------------


def ends(network: Network) -> list[tuple[Any, Any]]:
    """(last convolution, downsample) of each block that has one."""
    blocks = [block for _, block in network.blocks if getattr(block, "downsample", None) is not None]
    return [(b.conv2 if isinstance(b, BasicBlock) else b.conv3, b.downsample) for b in blocks]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_last_convolution_has_the_bias_of_both(name: str) -> None:
    """Folded and added up in float64, rounded once."""
    state = random_state_dict(describe(name), seed=4)

    def shift(conv: Any, bn: str) -> np.ndarray:
        weight, bias, mean, var = (
            state[f"{bn}.{of}"].astype(np.float64) for of in ("weight", "bias", "running_mean", "running_var")
        )
        return bias - mean * weight / np.sqrt(var + 1e-5)

    described, folded = ends(describe(name)), ends(bound(name))
    assert len(folded) == (3 if name == "resnet18" else 4)
    for (last, downsample), (one, other) in zip(described, folded, strict=True):
        both = shift(last, last.batch_norm.name) + shift(downsample, downsample.batch_norm.name)
        assert other.bias is None
        assert_close(one.bias, both.astype(np.float32), rtol=1e-6, atol=1e-7)
    for last, downsample in ends(bound(name, fuse=False)):
        assert last.batch_norm is not None
        assert downsample.batch_norm is not None


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_folding_changes_nothing_but_roundings(name: str) -> None:
    x = normal((2, 32, 32, 3), 5)
    for one, other in zip(bound(name)(Fusing(ALL), x), bound(name, fuse=False)(PLAIN, x), strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-3 * float(np.abs(other).max()))


@pytest.mark.parametrize(("name", "at"), [("resnet18", 2), ("resnet50", 0)])
def test_a_downsample_that_kept_its_bias_is_an_operation_of_its_own(name: str, at: int) -> None:
    _, block = bound(name).blocks[at]
    more = normal((ends(bound(name))[0][0].out_channels,), 7)
    x = normal((2, 8, 8, 64), 3)
    expected = block.with_joint_bias(lambda last, down: (replace(last, bias=last.bias + more), down))(PLAIN, x)
    ops = Fusing(ALL)
    y = block.with_joint_bias(lambda last, down: (last, replace(down, bias=more)))(ops, x)
    assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert "+" not in "".join(ops.log)


# The operation ------------------------------------------------------------------------------------------------------

X, WEIGHTS = normal(SHAPES[0]), (normal(SHAPES[1][0], 1), normal(SHAPES[1][1], 2))
BIASES = normal((24,), 3), normal((40,), 4)
SHORTCUT = normal((2, 9, 7, 12), 6), normal((40, 1, 1, 12), 7), 2
FOLLOWING = normal((8, 1, 1, 40), 8), normal((8,), 9)


@pytest.mark.parametrize("added", [{"residual": normal((2, 5, 4, 40), 6)}, {"shortcut": SHORTCUT}])
@pytest.mark.parametrize("following", [None, FOLLOWING])
def test_in_numpy_it_is_its_parts(added: dict[str, Any], following: Any) -> None:
    between = PLAIN.conv2d(X, WEIGHTS[0], BIASES[0], stride=2, padding=1, relu=True)
    expected = PLAIN.conv2d(between, WEIGHTS[1], BIASES[1], **added, relu=True)
    options: dict[str, Any] = {"stride": 2, "padding": 1, "relu": True, "following": following}
    y, z = PLAIN.conv2d_back_to_back(X, WEIGHTS, BIASES, **added, **options)
    np.testing.assert_array_equal(y, expected)
    assert z is None
    pair = Conv2dPair(replace(FIRST, N=1), 256)
    assert not PLAIN.fusions().stem
    assert not PLAIN.fusions().back_to_back(pair)
    assert not PLAIN.fusions().shortcut(pair.second)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"second": (40, 3, 3, 24)}, r"conv2d_back_to_back: the second filter \(40, 3, 3, 24\) must be 1×1"),
        ({"second": (40, 1, 1, 16)}, "has C=24 channels"),
        ({"residual": (2, 9, 8, 24)}, "residual has shape"),
        ({"bias": (24,)}, "bias has shape"),
        ({"residual": None}, "has either a residual or a shortcut"),
        ({"shortcut": ((2, 9, 8, 12), (40, 1, 1, 12), 1)}, "has either a residual or a shortcut"),
        ({"residual": None, "shortcut": ((2, 9, 8, 12), (40, 1, 1, 12), 2)}, "shortcut's input .* does not fit"),
        ({"residual": None, "shortcut": ((2, 9, 8, 12), (40, 1, 1, 16), 1)}, "shortcut's weight has shape"),
        ({"following": ((8, 3, 3, 40), (8,))}, r"conv2d_back_to_back: the third filter \(8, 3, 3, 40\) must be 1×1"),
        ({"following": ((8, 1, 1, 24), (8,))}, "has C=40 channels"),
        ({"following": ((8, 1, 1, 40), (9,))}, "bias has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_every_engine(changes: dict[str, Any], words: str) -> None:
    given = {"second": (40, 1, 1, 24), "bias": (40,), "residual": (2, 9, 8, 40), "shortcut": None, "following": None}
    given |= changes

    def arrays(shape: Any) -> Any:
        if shape is None or isinstance(shape, int):
            return shape
        whole = isinstance(shape[0], int)
        return np.zeros(shape, np.float32) if whole else tuple(arrays(part) for part in shape)

    second, bias, *rest = (arrays(shape) for shape in given.values())
    added = dict(zip(("residual", "shortcut", "following"), rest, strict=True))
    for ops in (PLAIN, ShapeEngine(fusions=ALL)):
        with pytest.raises(ValueError, match=words):
            ops.conv2d_back_to_back(arrays(SHAPES[0]), (WEIGHTS[0], second), (None, bias), padding=1, **added)


# Shapes -------------------------------------------------------------------------------------------------------------


def recorded(fusions: Fusions, *, shortcut: bool, following: bool) -> tuple[ShapeEngine, Any, Any]:
    """An engine after one operation, and its results."""
    ops = ShapeEngine("fp16", fusions=fusions)
    half = ops.arithmetic.storage
    weights = ShapeArray(SHAPES[1][0], layer="conv2"), ShapeArray(SHAPES[1][1], layer="conv3")
    biases = ShapeArray((24,), layer="conv2"), ShapeArray((40,), layer="conv3")
    x0, residual = ShapeArray((2, 9, 8, 12), dtype=half), ShapeArray((2, 9, 8, 40), dtype=half)
    y, z = ops.conv2d_back_to_back(
        ShapeArray(SHAPES[0], dtype=half),
        weights,
        biases,
        padding=1,
        relu=True,
        residual=None if shortcut else residual,
        shortcut=(x0, ShapeArray((40, 1, 1, 12), layer="downsample"), 1) if shortcut else None,
        following=(ShapeArray((8, 1, 1, 40), layer="next"), ShapeArray((8,), layer="next")) if following else None,
    )
    return ops, y, z


@pytest.mark.parametrize("following", [False, True])
@pytest.mark.parametrize("shortcut", [False, True])
def test_one_record_for_all_without_what_is_between(shortcut: bool, following: bool) -> None:
    ops, y, z = recorded(ALL, shortcut=shortcut, following=following)
    (record,) = ops.records
    assert (y.shape, y.dtype) == (record.output_shape, np.float16) == ((2, 9, 8, 40), np.float16)
    assert (z is not None) is following
    if following:
        assert (z.shape, z.dtype) == ((2, 9, 8, 8), np.float16)
    assert record.op == "conv2d_back_to_back"
    assert record.layer == "conv2 + conv3" + " + downsample" * shortcut + " + next" * following
    added = "shortcut" if shortcut else "residual"
    assert record.epilogue == ("bias", added, "relu", *["following"] * following)
    assert record.problem is None
    pair = record.pair
    assert pair is not None
    assert (pair.K, pair.shortcut_channels, pair.following) == (40, 12 * shortcut, 8 * following)
    parts, *_ = recorded(Fusions(shortcut=lambda problem: True), shortcut=shortcut, following=False)
    assert [part.op for part in parts.records] == ["conv2d", "conv2d"]
    assert [part.problem for part in parts.records] == [pair.first, pair.second]
    pixels = 2 * 9 * 8
    third = pixels * (2 * 40 * 8 + 2 * 8) if following else 0  # with bias and ReLU
    assert record.flops == sum(part.flops for part in parts.records) + third
    moved = sum(part.nbytes for part in parts.records) - 2 * 2 * pixels * 24
    assert record.nbytes == moved + (2 * pixels * 8 + 2 * 40 * 8 + 4 * 8 if following else 0)


def test_where_all_is_refused_less_is_asked_for() -> None:
    asked: list[Conv2dPair] = []

    def fuses(pair: Conv2dPair) -> bool:
        asked.append(pair)
        return not pair.following

    ops, _, z = recorded(Fusions(back_to_back=fuses), shortcut=True, following=True)
    (record,) = ops.records
    assert asked == [replace(asked[0], following=8), record.pair]
    assert record.pair == asked[0].without_following()
    assert z is None
    ops, _, z = recorded(LEVELS["nothing"], shortcut=True, following=True)
    assert [record.layer for record in ops.records] == ["conv2", "downsample", "conv3"]
    assert [record.epilogue for record in ops.records] == [("bias", "relu"), (), ("bias", "residual", "relu")]
    assert z is None


# Explained and timed ------------------------------------------------------------------------------------------------


def steps(name: str = "resnet50", **options: Any) -> Any:
    return explain(describe(name), (8, 3, 224, 224), device=H100, **{"precision": "fp16", **options})


def test_explain_has_one_step_for_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing(monkeypatch)
    apart = steps()
    always(monkeypatch)
    fused = steps()
    pairs = [step for step in fused if step.kernel == back_to_back.name]
    assert pairs
    spared = sum(len(step.record.pair.parts) - 1 + (step.record.pair.shortcut_channels > 0) for step in pairs)
    assert len(apart) - len(fused) == spared
    assert fused.flops == apart.flops
    four, three, two = pairs[0], pairs[1], pairs[-1]
    assert four.layer == "layer1.0.conv2 + layer1.0.conv3 + layer1.0.downsample.0 + layer1.1.conv1"
    assert four.op == "conv2d_back_to_back + bias + shortcut + relu + following"
    assert four.problem == "8×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1, plus 1×1 of 64 channels; → 64, 1×1, fp16"
    assert three.layer == "layer1.1.conv2 + layer1.1.conv3 + layer1.2.conv1"
    assert three.op == "conv2d_back_to_back + bias + residual + relu + following"
    assert three.problem == "8×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1; → 64, 1×1, fp16"
    assert two.layer == "layer3.5.conv2 + layer3.5.conv3"
    assert two.op == "conv2d_back_to_back + bias + residual + relu"
    assert two.problem == "8×14×14×256 → 256, 3×3, pad 1×1; → 1024, 1×1, fp16"
    for step in (four, three, two):
        assert (step.reason, step.fallback) == ("always", None)
        assert step.config in str(fused)
    for options in ({"kernel": "conv2d_mma"}, {"precision": "fp32-tc"}, {"fuse": False}, {"engine": "numpy"}):
        assert all(step.kernel != back_to_back.name for step in steps(**options)), options


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_explain_says_how_blocks_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for level, fusions in LEVELS.items():
        choose_by(monkeypatch, fusions)
        found[level] = steps(name)
    assert len({told.flops for told in found.values()}) == 1
    count = {level: len(told) - len(found["all"]) for level, told in found.items()}
    joint = [step for step in found["all"] if "shortcut" in step.op]
    first = joint[0]
    if name == "resnet18":
        apart = dict.fromkeys(("nothing", "pairs", "pairs with shortcuts"), 3)
        assert count == apart | dict.fromkeys(("shortcuts", "pairs, shortcuts apart", "all"), 0) | {"some": 1}
        assert first.layer == "layer2.0.conv2 + layer2.0.downsample.0"
        assert first.op == "conv2d + bias + shortcut + relu"
        assert first.problem == "8×28×28×128 → 128, 3×3, pad 1×1, plus 1×1 of 64 channels, stride 2, fp16"
        assert first.kernel == "conv2d_wgmma"
        return
    # A kernel for each of 16 bottlenecks; the 4 downsamples, 15 first convolutions, and 16 last ones are spared.
    assert count["nothing"] == 4 + 15 + 16
    assert count["shortcuts"] == 15 + 16
    assert count["pairs"] == 15 + 4 + 4
    assert count["pairs with shortcuts"] == 15
    assert first.layer == "layer1.0.conv2 + layer1.0.conv3 + layer1.0.downsample.0 + layer1.1.conv1"
    assert first.op == "conv2d_back_to_back + bias + shortcut + relu + following"
    assert first.problem == "8×56×56×64 → 64, 3×3, pad 1×1; → 256, 1×1, plus 1×1 of 64 channels; → 64, 1×1, fp16"
    assert first.kernel == back_to_back.name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_profile_times_what_explain_tells(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_by(monkeypatch, LEVELS[level])
    ops = TimedOps(Fusing(LEVELS[level]), FakeClock())
    blocks = _forward(bound(name), ops, normal((1, 3, 32, 32)))
    explained = explain(describe(name), (1, 3, 32, 32), device=H100, precision="fp16")
    # NumPy has no stem of its own: what comes before the first block is left out on both sides.
    begin = [timing.op for timing in ops.timings].index("max_pool2d") + 1
    explanation: Any = explained[[step.record.op for step in explained].index("stem") + 1 :]
    rows = join(explanation, [ops.timings[begin:]], blocks[begin:], Roof.of(LIMITS, "fp32"))
    assert len(rows) == len(explanation)
    assert all(row.layer.startswith(f"{row.block}.") for row in rows[:-2])
    assert [row.block for row in rows[-2:]] == [HEAD, HEAD]
