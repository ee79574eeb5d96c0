"""Whose memory a block's output may take: only what nobody needs any more. With an engine that takes all it may."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import normal

from cupy_resnet.binding import bind
from cupy_resnet.conv2d import H100, PRECISIONS
from cupy_resnet.conv2d.variants import NULL, Filter, Operands
from cupy_resnet.engines.cuda import convolution
from cupy_resnet.engines.cuda.convolution import Convolutions
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.networks.network import Network

# Networks -----------------------------------------------------------------------------------------------------------


class Greedy(NumpyEngine):
    """Puts every result into its residual's memory where it may; `taken` counts that."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> np.ndarray:
        y = super().conv2d(x, weight, bias, **options)
        residual = options.get("residual")
        if residual is None or not options.get("overwrite_residual"):
            return y
        self.taken += 1
        residual[...] = y
        return residual


NAMES = {"resnet18": (8, 3), "resnet50": (16, 4), "resnext50_32x4d": (16, 4), "resnet20": (9, 2)}
"""Network → its blocks, and how many of them have a shortcut that is more than their input."""


def bound(name: str, ops: NumpyEngine, fuse: bool = True) -> Network:
    network = describe(name)
    return bind(network, random_state_dict(network, seed=4), ops, fuse=fuse)


def pixels() -> np.ndarray:
    return normal((2, 32, 32, 3), 5)


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_gives_the_same_whatever_is_overwritten(name: str) -> None:
    plain, greedy, x = NumpyEngine(), Greedy(), pixels()
    expected = bound(name, plain)(plain, x)
    found = bound(name, greedy)(greedy, x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert greedy.taken == NAMES[name][0], "every block has a residual that nobody needs afterwards"
    np.testing.assert_array_equal(x, pixels(), err_msg="the caller's own")


@pytest.mark.parametrize("name", NAMES)
def test_what_checkpoints_were_given_stays_as_it_is(name: str) -> None:
    def values(ops: NumpyEngine) -> Mapping[str, np.ndarray]:
        kept: dict[str, np.ndarray] = {}
        bound(name, ops)(ops, pixels(), kept.__setitem__)
        return kept

    greedy = Greedy()
    found, expected = values(greedy), values(NumpyEngine())
    assert list(found) == list(expected)
    for key, value in found.items():
        np.testing.assert_array_equal(value, expected[key], err_msg=key)
    assert greedy.taken == NAMES[name][1], "shortcuts that are no checkpoint"


@pytest.mark.parametrize("overwrite", [False, True, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_block_keeps_its_input_unless_it_may_overwrite_it(name: str, overwrite: bool | None) -> None:
    """By default it may not."""
    greedy, plain = Greedy(), NumpyEngine()
    options = {} if overwrite is None else {"overwrite": overwrite}
    shapes = {}
    bound(name, plain)(plain, pixels(), lambda key, value: shapes.update({key: value.shape}))
    before = "stem"
    for (key, block), (_, same) in zip(bound(name, greedy).blocks, bound(name, plain).blocks, strict=True):
        x = normal(shapes[before])
        given, taken = x.copy(), greedy.taken
        y = block(greedy, given, **options)
        np.testing.assert_array_equal(y, same(plain, x), err_msg=key)
        if y is given:
            assert overwrite, key
        else:
            np.testing.assert_array_equal(given, x, err_msg=key)
            assert not np.shares_memory(y, given), key
        has_shortcut = greedy.taken > taken and y is not given
        assert has_shortcut or (y is given) is bool(overwrite), key
        before = key


def test_with_batch_norm_apart_nothing_is_overwritten() -> None:
    greedy, plain = Greedy(), NumpyEngine()
    logits = bound("resnet18", greedy, fuse=False)(greedy, pixels())[0]
    np.testing.assert_array_equal(logits, bound("resnet18", plain, fuse=False)(plain, pixels())[0])
    assert greedy.taken == 0


# The CUDA engine ----------------------------------------------------------------------------------------------------


class Gpu:
    """A device as far as `conv2d` looks at it."""

    id = 0

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class OnGpu:
    """A CuPy array as far as `conv2d` looks at it."""

    device: AbstractContextManager[Any] = Gpu()

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=4096)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Convolutions of an engine in fp16; `launched` are the operands of its kernels."""
    engine: Any = Convolutions()
    engine._cupy = SimpleNamespace(ndarray=OnGpu, empty=OnGpu, cuda=SimpleNamespace(Device=nullcontext))
    engine.precision, engine.arithmetic = "fp16", PRECISIONS["fp16"]
    engine.kernel, engine.strict, engine.spread_nan, engine.launched = "auto", False, False, []
    kernel = SimpleNamespace(launch=lambda problem, operands, config: engine.launched.append(operands))
    monkeypatch.setattr(convolution, "describe_device", lambda number: H100)
    monkeypatch.setattr(convolution, "VARIANTS", dict.fromkeys(convolution.VARIANTS, kernel))
    return engine


@pytest.mark.parametrize("overwrite", [None, False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("N", [0, 2])
def test_the_engine_takes_the_residuals_memory_if_it_may(
    engine: Any, N: int, given: bool, overwrite: bool | None
) -> None:
    x, weight = OnGpu((N, 14, 14, 64)), Filter(OnGpu((72, 3, 3, 64)))
    residual = OnGpu((N, 14, 14, 72)) if given else None
    options = {} if overwrite is None else {"overwrite_residual": overwrite}
    y = engine.conv2d(x, weight, padding=1, residual=residual, relu=True, **options)
    assert y.shape == (N, 14, 14, 72)
    assert (y is residual) is (given and overwrite is True)
    assert y is not x
    if not N:
        assert engine.launched == []
        return
    (operands,) = engine.launched
    assert operands == Operands(x, weight, None, residual, y, True, backwards=True)
    assert operands.tail()[1] is residual or (not given and operands.tail()[1] == NULL)
