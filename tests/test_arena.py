"""Where a plan's arrays lie: none in the place of one that is still needed, all in as little memory as is ever needed.

Networks are run in an arena by the NumPy engine, on a buffer that stands for the GPU's memory.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from back_to_back_support import LEVELS, PLAIN, fused_pair, geometry_of
from helpers import normal
from hypothesis import given
from hypothesis import strategies as st

from cupy_resnet.arena import ALIGNMENT, Arena, Lifetime, foresee, lay_out
from cupy_resnet.binding import bind
from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.engines import checks
from cupy_resnet.engines.base import NONE_FUSED, Fusions
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.networks.network import Network

MIB = 1 << 20


@cache
def bound(name: str, *, fuse: bool = True) -> Network:
    network = describe(name)
    return bind(network, random_state_dict(network, seed=4), NumpyEngine(), fuse=fuse)


# Layouts ------------------------------------------------------------------------------------------------------------


def most_needed(lifetimes: list[Lifetime]) -> int:
    """The bytes needed at the same time at most."""
    alive = [[array.nbytes for array in lifetimes[: now + 1] if array.end > now] for now in range(len(lifetimes))]
    return max(map(sum, alive))


def used(lifetimes: list[Lifetime]) -> int:
    return max(offset + array.nbytes for offset, array in zip(lay_out(lifetimes), lifetimes, strict=True))


@st.composite
def passes(draw: st.DrawFn) -> list[Lifetime]:
    count = draw(st.integers(1, 12))
    sizes = [ALIGNMENT * draw(st.integers(1, 9)) for _ in range(count)]
    return [Lifetime(nbytes, draw(st.integers(number + 1, count))) for number, nbytes in enumerate(sizes)]


@given(passes())
def test_no_two_arrays_overlap_that_are_needed_at_the_same_time(lifetimes: list[Lifetime]) -> None:
    offsets = lay_out(lifetimes)
    for later, array in enumerate(lifetimes):
        for earlier in range(later):
            if lifetimes[earlier].end > later:
                apart = offsets[earlier] + lifetimes[earlier].nbytes <= offsets[later]
                assert apart or offsets[later] + array.nbytes <= offsets[earlier]
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in offsets)
    assert most_needed(lifetimes) <= used(lifetimes) <= sum(array.nbytes for array in lifetimes)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "resnet152", "resnext50_32x4d", "wide_resnet50_2", "resnet56"]
)
def test_networks_get_no_more_than_they_ever_need_at_once(name: str, fuse: bool) -> None:
    network = describe(name).map_layers(_folded) if fuse else describe(name)
    size = network.default_size
    for shape in ((1, size, size, 3), (64, size, size, 3), (2, 3 * size // 2 + 1, size, 3)):
        for level in ("nothing", "some", "all"):
            _, lifetimes = foresee(network, shape, "fp16", LEVELS[level])
            assert used(lifetimes) == most_needed(lifetimes)


def _folded(layer: Any) -> Any:
    """The layer as binding leaves it."""
    return replace(layer, batch_norm=None) if hasattr(layer, "batch_norm") else layer


TAKEN = {
    # The first bottleneck of the second stage: its input, conv1's output, a shortcut or output of just the same size;
    # where they are apart, conv2's output, and where the next block is begun, what it begins with, of the same size.
    "resnet50": dict.fromkeys(LEVELS, 56 * 56 * (256 + 128) + 28 * 28 * (512 + 128))
    | {"pairs with shortcuts": 56 * 56 * (256 + 128) + 28 * 28 * 512},
    # The first stage's map, and conv1's output.
    "resnet18": dict.fromkeys(LEVELS, 56 * 56 * (64 + 64)),
}
"""Values per image that are needed at the same time."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TAKEN)
def test_what_the_large_batches_of_the_benchmark_take(name: str, precision: str) -> None:
    width = PRECISIONS[precision].storage.itemsize
    network = describe(name).map_layers(_folded)
    for level, values in TAKEN[name].items():
        _, lifetimes = foresee(network, (64, 224, 224, 3), precision, LEVELS[level])
        assert used(lifetimes) == 64 * values * width, level


def test_the_input_is_needed_by_the_first_block_only() -> None:
    first, lifetimes = foresee(bound("resnet50"), (2, 64, 64, 3), "fp32")
    assert first.shape == (2, 16, 16, 64)
    assert lifetimes[0] == Lifetime(2 * 16 * 16 * 64 * 4, 4)  # conv1, conv2, the shortcut; then layer1.1.conv1
    assert [array.end for array in lifetimes[-2:]] == [len(lifetimes)] * 2  # features and logits


def test_without_a_fused_stem_pixels_are_the_input() -> None:
    first, lifetimes = foresee(bound("resnet20"), (2, 32, 32, 3), "bf16")
    assert (first.shape, first.dtype) == ((2, 32, 32, 3), np.uint16)
    assert lifetimes[0].nbytes == 2 * 32 * 32 * 3 * 2


# Running ------------------------------------------------------------------------------------------------------------


class Pointer:
    """A place in a GPU's memory, which is that of `mem`."""

    device_id = 0

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> "Pointer":
        return Pointer(self.mem, self.ptr - self.mem.ptr + offset)


class OnGpu(np.ndarray[Any, Any]):
    """An array with what CuPy's have: `data` says where it is, and keeps that."""

    data: Any = None


class Gpu:
    """Memory, and CuPy's ways to it. `elsewhere` are the sizes of what is allocated but for an arena."""

    def __init__(self) -> None:
        self.memory = np.full(32 * MIB, 0xFF, np.uint8)  # NaN in every type
        self.top = ALIGNMENT
        self.elsewhere: list[int] = []
        self.allocators: list[Callable[[int], Pointer]] = [self.malloc]
        cuda = SimpleNamespace(
            get_allocator=lambda: self.allocators[-1],
            using_allocator=self._using_allocator,
            MemoryPointer=Pointer,
            UnownedMemory=lambda ptr, nbytes, owner, device_id: SimpleNamespace(ptr=ptr, owner=owner),
        )
        self.cupy = SimpleNamespace(cuda=cuda, ndarray=self.array)

    def malloc(self, nbytes: int) -> Pointer:
        self.elsewhere.append(nbytes)
        begin = self.top
        self.top += -(-nbytes // ALIGNMENT) * ALIGNMENT
        assert self.top <= self.memory.size
        return Pointer(SimpleNamespace(ptr=begin), 0)

    @contextmanager
    def _using_allocator(self, allocator: Callable[[int], Pointer]) -> Iterator[None]:
        self.allocators.append(allocator)
        try:
            yield
        finally:
            self.allocators.pop()

    def array(self, shape: tuple[int, ...], dtype: Any, memory: Pointer | None = None) -> Any:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = memory or self.allocators[-1](nbytes)
        y = np.ndarray(shape, dtype, self.memory[memory.ptr : memory.ptr + nbytes]).view(OnGpu)
        y.data = memory
        return y


class Engine(NumpyEngine):
    """Computes with NumPy, but every result lies where the current allocator says; in one what `fused` says is."""

    fused = NONE_FUSED

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def fusions(self) -> Fusions:
        return self.fused

    def placed(self, y: np.ndarray, out: Any = None) -> Any:
        out = self.gpu.array(y.shape, y.dtype) if out is None else out
        out[...] = y
        return out

    def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        problem = checks.conv2d(x, weight, bias, **geometry_of(options))
        if problem.shortcut_channels and not self.fused.shortcut(problem):
            return super().conv2d(x, weight, bias, **options)
        y = PLAIN.conv2d(np.array(x), weight, bias, **options)
        return self.placed(y, options["residual"] if options.get("overwrite_residual") else None)

    def conv2d_back_to_back(self, x: Any, weights: Any, biases: Any = (None, None), **options: Any) -> Any:
        pair = fused_pair(self.fused, x, weights, biases, **options)
        if pair is None:
            return super().conv2d_back_to_back(x, weights, biases, **options)
        y, _ = PLAIN.conv2d_back_to_back(np.array(x), weights, biases, **options)
        z = PLAIN.conv2d(y, *options["following"], relu=True) if pair.following else None
        y = self.placed(y, options["residual"] if options.get("overwrite_residual") else None)
        return y, None if z is None else self.placed(z)

    def stem(self, *arguments: Any, out: Any = None, **options: Any) -> Any:
        return self.placed(PLAIN.stem(*arguments, **options), out)

    def pixels(self, *arguments: Any, out: Any = None, **options: Any) -> Any:
        return self.placed(super().pixels(*arguments, **options), out)


def _placing(name: str) -> Any:
    def operation(self: Engine, x: Any, *arguments: Any, **options: Any) -> Any:
        return self.placed(getattr(NumpyEngine, name)(self, np.array(x), *arguments, **options))

    return operation


for _name in ("batch_norm2d", "relu", "add", "max_pool2d", "global_avg_pool2d", "linear", "pad_channels"):
    setattr(Engine, _name, _placing(_name))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "cupy", gpu.cupy)
    return gpu


SIZE = 32


def checked(network: Network, engine: Engine) -> Arena:
    """Runs a network in an arena, each time with other pixels and with the right results, as a plan does."""
    arena = Arena(network, engine, (2, SIZE, SIZE, 3))
    addresses = set()
    kept: Any = None
    for run in range(2):
        if run == 1 and arena.occupied:
            arena = Arena(network, engine, (2, SIZE, SIZE, 3))
            addresses.clear()
        x = normal((2, SIZE, SIZE, 3), run)
        network.front(engine, x, out=arena.input)
        logits, features = arena.run()
        expected = network(PLAIN, x)
        np.testing.assert_array_equal(logits, expected[0])
        np.testing.assert_array_equal(features, expected[1])
        addresses.add((logits.data.ptr, features.data.ptr))
        kept = logits, features, kept  # as a captured graph keeps its own
    if not engine.gpu.elsewhere[1:]:
        assert len(addresses) == 1, "one run's results take the place of another's"
    return arena


@pytest.mark.parametrize(
    ("name", "fuse"),
    [("resnet18", True), ("resnet18", False), ("resnet50", True), ("resnet20", True), ("resnet20", False)],
)
def test_passes_run_in_one_piece_of_memory(gpu: Gpu, name: str, fuse: bool) -> None:
    network = bound(name, fuse=fuse)
    arena = checked(network, Engine(gpu))
    _, lifetimes = foresee(network, (2, SIZE, SIZE, 3), "fp32")
    assert gpu.elsewhere == [most_needed(lifetimes)], "the arena, and nothing beside it, in all runs"
    assert arena.largest == max(array.nbytes for array in lifetimes)


@pytest.mark.parametrize(("name", "levels"), [("resnet18", ("all",)), ("resnet50", ("shortcuts", "some", "all"))])
def test_what_is_done_in_one_is_foreseen(gpu: Gpu, name: str, levels: tuple[str, ...]) -> None:
    network, engine = bound(name), Engine(gpu)
    for level in levels:
        engine.fused = LEVELS[level]
        gpu.elsewhere.clear()
        checked(network, engine)
        _, lifetimes = foresee(network, (2, SIZE, SIZE, 3), "fp32", engine.fused)
        assert gpu.elsewhere == [most_needed(lifetimes)], level


class WithWorkspaces(Engine):
    """Each convolution has a workspace while it runs, of its result's size or another."""

    more = 0

    def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        y = super().conv2d(x, weight, bias, **options)
        before = np.array(y)
        workspace = self.gpu.array((y.nbytes + self.more,), np.uint8)
        workspace[...] = 0xFF
        np.testing.assert_array_equal(y, before)
        return y


@pytest.mark.parametrize("more", [0, 4, 4096])
def test_workspaces_lie_in_nobodys_way(gpu: Gpu, more: int) -> None:
    engine = WithWorkspaces(gpu)
    engine.more = more
    checked(bound("resnet18"), engine)


class Keeping(Engine):
    """At its first convolutions it makes something that it keeps, as filters in another form."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.kept: list[Any] = []

    def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        y = super().conv2d(x, weight, bias, **options)
        if len(self.kept) < 12:
            self.kept.append(self.gpu.array(y.shape, y.dtype))
            self.kept[-1][...] = len(self.kept)
        for number, array in enumerate(self.kept, 1):
            assert bool((array == number).all()), "it was overwritten"
        return y


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_what_is_kept_stays_as_it_is(gpu: Gpu, name: str) -> None:
    """Of the size that is next: such an arena is not used a second time."""
    network, engine = bound(name), Keeping(gpu)
    arena = Arena(network, engine, (2, SIZE, SIZE, 3))
    arena.run()
    assert arena.occupied
    assert not checked(network, Keeping(gpu)).occupied


def test_an_arena_in_which_only_results_stay_is_not_occupied(gpu: Gpu) -> None:
    assert not checked(bound("resnet20"), Engine(gpu)).occupied


class Clinging(Engine):
    """Refers to every input for two operations more."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.last: list[Any] = []

    def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        self.last = [x, *self.last[:2]]
        return super().conv2d(x, weight, bias, **options)


def test_what_is_still_referred_to_is_not_overwritten(gpu: Gpu) -> None:
    checked(bound("resnet50"), Clinging(gpu))
    assert len(gpu.elsewhere) > 1


def test_the_memory_goes_with_the_last_array(gpu: Gpu) -> None:
    """Not before: an array of a plan that is gone may be in use."""
    pool = SimpleNamespace(malloc=gpu.malloc)
    gpu.allocators.append(pool.malloc)
    engine = Keeping(gpu)
    Arena(bound("resnet18"), engine, (2, SIZE, SIZE, 3)).run()
    owners = [array.data.mem.owner for array in engine.kept if hasattr(array.data.mem, "owner")]
    assert owners
    assert all(pool.malloc in owner._kept for owner in owners)
