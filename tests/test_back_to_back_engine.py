"""The ends of blocks in the CUDA engine, with stand-ins for CuPy and kernels: what is launched on which operands, and
that a walk with shapes foresees which arrays that takes, and for how long.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from back_to_back_support import LEVELS, PAIR, always, choose_by, never, shortcuts

from cupy_resnet.arena import ALIGNMENT, Lifetime, foresee
from cupy_resnet.binding import bind_shapes
from cupy_resnet.conv2d import H100, PRECISIONS, Conv2dPair, configs
from cupy_resnet.conv2d.back_to_back import BackToBackOperands, Following
from cupy_resnet.conv2d.variants import Filter, Operands, Shortcut
from cupy_resnet.engines.base import Fusions
from cupy_resnet.engines.cuda import convolution
from cupy_resnet.engines.cuda.convolution import Convolutions
from cupy_resnet.networks import describe
from cupy_resnet.networks.network import Network


class Gpu:
    """A device as far as the engine looks at it."""

    id = 0

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *error: object) -> None:
        pass


GPU = Gpu()


class OnGpu:
    """A CuPy array as far as the engine looks at it."""

    device = GPU

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=4096)


class Engine(Convolutions):
    """In fp16 on an H100. `launched` are a kernel's problem and its operands; `allocated` hears of every new array."""

    def __init__(self) -> None:
        self._cupy = SimpleNamespace(ndarray=OnGpu, empty=self.empty, cuda=SimpleNamespace(Device=nullcontext))
        self.precision, self.arithmetic, self.device = "fp16", PRECISIONS["fp16"], 0
        self.kernel, self.strict, self.spread_nan = "auto", False, False
        self.launched: list[tuple[Any, Any]] = []
        self.note: Callable[[Any, Any], None] = lambda problem, operands: self.launched.append((problem, operands))
        self.allocated: Callable[[OnGpu], None] = lambda array: None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> OnGpu:
        array = OnGpu(shape, dtype)
        self.allocated(array)
        return array

    def global_avg_pool2d(self, x: Any) -> Any:
        return self._cupy.empty((x.shape[0], x.shape[3]), np.float32)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        return self._cupy.empty((x.shape[0], weight.weight.shape[0]), np.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    kernel = SimpleNamespace(launch=lambda problem, operands, config: engine.note(problem, operands))
    monkeypatch.setattr(convolution, "describe_device", lambda number: H100)
    monkeypatch.setattr(convolution, "VARIANTS", dict.fromkeys(convolution.VARIANTS, kernel))

    def launch(pair: Conv2dPair, operands: Any, config: Any) -> None:
        assert config in configs.BACK_TO_BACK
        engine.note(pair, operands)

    monkeypatch.setattr(convolution, "launch_back_to_back", launch)
    return engine


# One operation ------------------------------------------------------------------------------------------------------


def small(more: dict[str, int], N: int = 2) -> Conv2dPair:
    return replace(PAIR, first=replace(PAIR.first, N=N), **more)


SHORTCUT, FOLLOWING = {"shortcut_channels": 64, "shortcut_stride": 2}, {"following": 128}


def call(engine: Engine, pair: Conv2dPair, **options: Any) -> tuple[Any, Any, SimpleNamespace]:
    """The operation's results, and what it was given: filters, biases, and so on, by name."""
    second, third = pair.second, pair.third
    given = SimpleNamespace(
        x=OnGpu(pair.first.input_shape),
        weights=(Filter(OnGpu(pair.first.filter_shape)), Filter(OnGpu(second.filter_shape))),
        biases=(OnGpu((pair.first.K,), np.float32), OnGpu((pair.K,), np.float32)),
        residual=None if pair.shortcut_channels else OnGpu(pair.output_shape),
        shortcut=None,
        following=None,
    )
    if pair.shortcut_channels:
        N, H, W, C = second.shortcut_shape
        given.shortcut = OnGpu((N, H - 1, W, C)), Filter(OnGpu(second.shortcut_filter_shape)), pair.shortcut_stride
    if third is not None:
        given.following = Filter(OnGpu(third.filter_shape)), OnGpu((third.K,), np.float32)
    y, z = engine.conv2d_back_to_back(**vars(given), padding=1, relu=True, **options)
    return y, z, given


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("following", [{}, FOLLOWING])
@pytest.mark.parametrize("shortcut", [{}, SHORTCUT])
def test_one_kernel_has_all_operands(
    engine: Engine, shortcut: Any, following: Any, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_by(monkeypatch, LEVELS["all"])
    pair = small(shortcut | following)
    assert engine.fusions().back_to_back(pair)
    y, z, given = call(engine, pair, overwrite_residual=overwrite)
    assert (y is given.residual) is (overwrite and not shortcut)
    assert y.shape == pair.output_shape
    added = Shortcut(*given.shortcut[:2]) if shortcut else None
    then = Following(*given.following, True, z) if following else None
    expected = BackToBackOperands(
        given.x,
        given.weights,
        given.biases,
        given.residual,
        y,
        (True, True),
        shortcut=added,
        following=then,
        backwards=True,
    )
    assert engine.launched == [(pair, expected)]
    assert (z is not None) is bool(following)
    if following:
        assert z.shape == (2, 56, 56, 128)
        assert z.dtype == np.float16
        assert not any(z is array for array in (y, given.x, given.residual))


def test_every_launch_begins_where_the_one_before_has_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_by(monkeypatch, LEVELS["all"])
    for _ in range(4):
        call(engine, small({}))
    assert [operands.backwards for _, operands in engine.launched] == [True, False, True, False]


@pytest.mark.parametrize("shortcut", [{}, SHORTCUT])
def test_where_three_are_refused_it_is_two_and_nothing_of_the_third(
    engine: Engine, shortcut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_by(monkeypatch, LEVELS["pairs with shortcuts"])
    pair = small(shortcut | FOLLOWING)
    y, z, _ = call(engine, pair)
    ((launched, operands),) = engine.launched
    assert launched == pair.without_following()
    assert operands.following is None
    assert operands.y is y
    assert z is None


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("shortcut", [{}, SHORTCUT])
def test_where_two_are_refused_they_are_apart(
    engine: Engine, shortcut: Any, overwrite: bool, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortcut is in the second, or a convolution before it whose place the second takes."""
    choose_by(monkeypatch, LEVELS["shortcuts" if joint else "nothing"])
    pair = small(shortcut | FOLLOWING)
    assert not engine.fusions().back_to_back(pair)
    assert engine.fusions().shortcut(replace(pair.second, **SHORTCUT)) is joint
    y, z, given = call(engine, pair, overwrite_residual=overwrite)
    assert z is None
    (first, operands), *rest = engine.launched
    between = operands.y
    assert first == pair.first
    assert operands == Operands(given.x, given.weights[0], given.biases[0], None, between, True, backwards=True)
    of_second = between, given.weights[1], given.biases[1]
    if not shortcut:
        assert rest == [(pair.second, Operands(*of_second, given.residual, y, True))]
        assert (y is given.residual) is overwrite
    elif joint:
        x0, filter0, _ = given.shortcut
        assert rest == [(pair.second, Operands(*of_second, None, y, True, Shortcut(x0, filter0)))]
    else:
        x0, filter0, _ = given.shortcut
        assert rest == [
            (pair.second.shortcut_alone(x0.shape), Operands(x0, filter0, None, None, y, False)),
            (pair.second.without_shortcut(), Operands(*of_second, y, y, True, backwards=True)),
        ]


@pytest.mark.parametrize("why", ["never", "kernel", "precision", "empty"])
def test_what_the_engine_itself_is_keeps_them_apart(engine: Engine, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (never if why == "never" else always)(monkeypatch)
    shortcuts(monkeypatch, lambda problem: True)
    pair = small({}, N=0 if why == "empty" else 2)
    if why == "kernel":
        engine.kernel = "conv2d_mma"
        assert not engine.fusions().shortcut(replace(pair.second, **SHORTCUT))
    if why == "precision":
        pair = replace(pair, first=replace(pair.first, precision="fp32-tc"))
    assert not engine.fusions().back_to_back(pair)
    if why == "precision":
        return
    y, z, given = call(engine, pair, overwrite_residual=True)
    assert len(engine.launched) == (0 if why == "empty" else 2)
    assert y is given.residual
    assert z is None


def test_an_empty_batch_launches_nothing_with_a_shortcut_either(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in LEVELS.values():
        choose_by(monkeypatch, level)
        y, z, _ = call(engine, small(SHORTCUT | FOLLOWING, N=0))
        assert y.shape == (0, 56, 56, 256)
        assert z is None
    assert engine.launched == []


@pytest.mark.parametrize("which", ["x", "weights", "biases", "residual", "shortcut", "following"])
def test_operands_of_another_type_are_refused_by_name(
    engine: Engine, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_by(monkeypatch, LEVELS["all"])
    _, _, given = call(engine, small((SHORTCUT if which == "shortcut" else {}) | FOLLOWING))
    wrong = OnGpu((1,), np.float64)
    arrays = getattr(given, which)
    vars(given)[which] = (wrong, *arrays[1:]) if isinstance(arrays, tuple) else wrong
    with pytest.raises(TypeError, match=r"^conv2d(_back_to_back)?: .* must be float(16|32).* got float64"):
        engine.conv2d_back_to_back(**vars(given), padding=1)


# Whole passes -------------------------------------------------------------------------------------------------------


def on_gpu(name: str) -> Network:
    """A folded network whose weights are stand-ins."""

    def bound(layer: Any) -> Any:
        bias = None if layer.bias is None else OnGpu(layer.bias.shape, np.float32)
        return replace(layer, weight=Filter(OnGpu(layer.weight.shape)), bias=bias)

    return bind_shapes(describe(name)).map_layers(bound)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_the_arrays_of_a_pass_are_those_that_were_foreseen(
    engine: Engine, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order, and none is kept any longer: each finds its place in an arena."""
    choose_by(monkeypatch, LEVELS[level])
    given, foreseen = foresee(bind_shapes(describe(name)), (2, 64, 64, 3), "fp16", engine.fusions())
    sizes: list[int] = []
    ends: dict[int, int] = {}
    references: list[Any] = []

    def allocated(array: OnGpu) -> None:
        number = len(sizes)
        references.append(weakref.ref(array, lambda _: ends.setdefault(number, len(sizes))))
        sizes.append(-(-array.nbytes // ALIGNMENT) * ALIGNMENT)

    engine.allocated, engine.note = allocated, lambda problem, operands: None
    network = on_gpu(name)
    results = network.body(engine, engine.empty(given.shape, given.dtype))
    found = [Lifetime(nbytes, ends.get(number, len(sizes))) for number, nbytes in enumerate(sizes)]
    assert found == foreseen
    assert len(results) == 2


def test_how_many_arrays_a_pass_makes() -> None:
    """The input, features and logits, and of each operation but those that take another's memory one or two."""
    counts = {}
    for level, fusions in LEVELS.items():
        _, lifetimes = foresee(bind_shapes(describe("resnet50")), (2, 64, 64, 3), "fp16", fusions)
        counts[level] = len(lifetimes) - 3
    assert counts == {
        "nothing": 2 * 16 + 4,  # conv1 and conv2 of each block, and shortcuts
        "shortcuts": 2 * 16 + 4,  # in their place the block's output, which has no residual to take the place of
        "pairs": 2 * 16 + 4 - 12,
        "pairs, shortcuts apart": 2 * 16 + 4 - 12,
        "pairs with shortcuts": 16 + 4,
        "some": 2 * 16 + 4 - 4 - 6,  # conv2 of the second stage's blocks, and of the third's
        "all": 16 + 4,
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_with_checkpoints_nothing_is_overwritten(
    engine: Engine, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_by(monkeypatch, LEVELS[level])
    kept: dict[str, Any] = {}
    on_gpu(name).body(engine, OnGpu((2, 16, 16, 64)), kept.__setitem__)
    assert len({id(array) for array in kept.values()}) == len(kept)
    written = [operands.y for _, operands in engine.launched]
    for name, array in kept.items():
        if name in ("stem", "gap", "logits"):
            assert all(y is not array for y in written)
        else:
            last = max(number for number, y in enumerate(written) if y is array)
            readers = [number for number, (_, operands) in enumerate(engine.launched) if operands.x is array]
            assert all(number > last for number in readers)


def test_a_block_gets_what_the_one_before_began(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_by(monkeypatch, LEVELS["all"])
    on_gpu("resnet50").body(engine, OnGpu((2, 16, 16, 64)))
    (_, conv1), *pairs = engine.launched
    assert len(pairs) == 16
    begun, x = conv1.y, conv1.x
    for pair, operands in pairs:
        assert operands.x is begun
        assert (operands.shortcut.x if pair.shortcut_channels else operands.residual) is x
        assert (operands.y is x) is (not pair.shortcut_channels), "it takes the memory of its residual"
        x, begun = operands.y, operands.following and operands.following.z
    assert begun is None


def test_fusions_say_nothing_of_the_stem(engine: Engine) -> None:
    """Which the network's front decides by itself."""
    assert isinstance(engine.fusions(), Fusions)
    assert not engine.fusions().stem
