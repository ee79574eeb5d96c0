"""One piece of memory for all arrays of a forward pass, each where others lay that nobody needs any more.

A pool that is asked for one array after the other cannot know what comes: it ends up holding gaps that nothing fits
into, for ResNet-50 two fifths more than is ever in use. But which arrays a pass makes, and how long each is needed, a
walk through the network with shapes alone tells beforehand. With that each gets its place: the largest first, at the
lowest address that is free for its whole life ("greedy by size" of Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", 2020, as in TensorFlow Lite).

That the pass then does what the walk foresaw is not relied upon. An array of another size than the next, as a kernel's
workspace, and one in whose place some other is still referred to, come from elsewhere: that costs memory, nothing else.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .binding import bind_shapes
from .engines.base import NONE_FUSED, Array, Fusions, Ops
from .engines.shape_engine import ShapeArray, ShapeEngine
from .networks import Network

if TYPE_CHECKING:
    import cupy

ALIGNMENT = 512
"""Of each array in bytes: CuPy's own pools give no less."""


class Lifetime(NamedTuple):
    """An array of a pass, by the order in which they are made.

    Args:
        nbytes: its size, a multiple of `ALIGNMENT`.
        end: the number of the first array that is made when this one is no longer needed. Its own number is its place
            in the list; for a result, `end` is the list's length.
    """

    nbytes: int
    end: int


class _Walk(ShapeEngine):
    """Notes each array that an operation would allocate, and when the last reference to it goes."""

    def __init__(self, precision: str, fusions: Fusions) -> None:
        super().__init__(precision, fusions=fusions)
        self._sizes: list[int] = []
        self._ends: dict[int, int] = {}
        self._references: list[weakref.ref[ShapeArray]] = []

    def noted(self, array: ShapeArray) -> ShapeArray:
        number = len(self._sizes)

        def gone(_: "weakref.ref[ShapeArray]") -> None:
            self._ends[number] = len(self._sizes)

        self._references.append(weakref.ref(array, gone))
        self._sizes.append(_aligned(array.nbytes))
        return array

    def lifetimes(self) -> list[Lifetime]:
        count = len(self._sizes)
        return [Lifetime(nbytes, self._ends.get(number, count)) for number, nbytes in enumerate(self._sizes)]

    def conv2d(self, *arguments: Any, **options: Any) -> ShapeArray:
        """As the CUDA engine: the result takes its residual's memory where it may."""
        before = len(self.records)
        y = super().conv2d(*arguments, **options)
        by_parts = len(self.records) > before + 1
        return y if by_parts else self._placed(y, **options)

    def conv2d_back_to_back(self, *arguments: Any, **options: Any) -> tuple[ShapeArray, ShapeArray | None]:
        """As `conv2d`, where it is one kernel; what is between its convolutions lies nowhere then."""
        y, z = super().conv2d_back_to_back(*arguments, **options)
        if self.records[-1].pair is None:  # by parts
            return y, z
        return self._placed(y, **options), None if z is None else self.noted(z)

    def _placed(
        self, y: ShapeArray, *, residual: ShapeArray | None = None, overwrite_residual: bool = False, **_: Any
    ) -> ShapeArray:
        return residual if residual is not None and overwrite_residual else self.noted(y)

    def _record(self, *arguments: Any, **options: Any) -> ShapeArray:
        return self.noted(super()._record(*arguments, **options))


def foresee(
    network: Network, shape: tuple[int, ...], precision: str, fusions: Fusions = NONE_FUSED
) -> tuple[ShapeArray, list[Lifetime]]:
    """Tells which arrays the network's body makes and how long each is needed.

    Args:
        network: a description or a bound network.
        shape: (N, H, W, in_channels) of the pixels.
        precision: the engine's.
        fusions: likewise: they decide which arrays there are.

    Returns:
        What the body is given, and the arrays in the order in which they are made; that is the first of them.
    """
    walk = _Walk(precision, fusions)
    network = bind_shapes(network, fuse=False)  # what is folded already stays so
    given = network.front(ShapeEngine(precision, fusions=Fusions(stem=True)), ShapeArray(shape))
    given = ShapeArray(given.shape, dtype=walk.arithmetic.storage)
    # The body holds the only reference to its input, here as in `Arena.run`: its memory is free after the first block.
    results = network.body(walk, walk.noted(ShapeArray(given.shape, dtype=given.dtype)))
    lifetimes = walk.lifetimes()  # while the results are still referred to
    del results
    return given, lifetimes


def lay_out(lifetimes: Sequence[Lifetime]) -> list[int]:
    """Returns an offset for each array, such that no two overlap that are needed at the same time."""
    offsets: dict[int, int] = {}
    for number in sorted(range(len(lifetimes)), key=lambda number: -lifetimes[number].nbytes):
        nbytes, offset = lifetimes[number].nbytes, 0
        beside = (other for other in offsets if max(number, other) < lifetimes[min(number, other)].end)
        for begin, end in sorted((offsets[other], offsets[other] + lifetimes[other].nbytes) for other in beside):
            if begin - offset >= nbytes:
                break
            offset = max(offset, end)
        offsets[number] = offset
    return [offsets[number] for number in range(len(lifetimes))]


class Arena:
    """Runs a network's body in memory that was laid out for it. For one thread at a time.

    The memory comes from the allocator of CuPy's that is current when it is made, and goes with the last array there.

    Args:
        network: bound to `ops`.
        ops: the CUDA engine.
        shape: (N, H, W, in_channels) of the pixels, N > 0.

    Attributes:
        input: what the network's front fills and `run` reads, and then may overwrite.
        largest: bytes of the largest array.
    """

    def __init__(self, network: Network, ops: Ops, shape: tuple[int, ...]) -> None:
        import cupy

        self._cupy: Any = cupy
        self._network, self._ops = network, ops
        self._given, self._lifetimes = foresee(network, shape, ops.precision, ops.fusions())
        self._offsets = lay_out(self._lifetimes)
        sizes = [array.nbytes for array in self._lifetimes]
        places = [(offset, offset + nbytes) for offset, nbytes in zip(self._offsets, sizes, strict=True)]
        # Each array's number, and those of the arrays that lie there at another time.
        self._sharing = [
            [number for number, (first, last) in enumerate(places) if first < end and begin < last]
            for begin, end in places
        ]
        self.largest = max(sizes)
        self._malloc = cupy.cuda.get_allocator()
        self._memory = self._malloc(max(end for _, end in places))
        self._owners: list[Callable[[], object | None]] = [_nobody] * len(places)
        self._next = 0
        self.input: cupy.ndarray = self._input(self._memory + self._offsets[0])

    def run(self) -> tuple[Array, Array]:
        """Runs the network's body on `input`, on the current stream.

        Other arrays than the arena is for come from CuPy's current allocator. An array's place is given away as soon
        as nothing refers to it, though kernels may still be going to read it: those that write there come later on the
        stream, and wait, also where they are started early.

        Returns:
            Logits and features, which stay until the next run.
        """
        elsewhere = self._cupy.cuda.get_allocator()

        def allocate(nbytes: int) -> "cupy.cuda.MemoryPointer":
            memory = self._place(nbytes)
            return elsewhere(nbytes) if memory is None else memory

        self._next = 0
        with self._cupy.cuda.using_allocator(allocate):
            results = self._network.body(self._ops, self._input(self._take()))
        addresses = {array.data.ptr for array in results}
        for number, offset in enumerate(self._offsets):
            if self._memory.ptr + offset in addresses:
                self._owners[number] = _nobody  # though the caller refers to it: the next run may overwrite it
        return results

    @property
    def occupied(self) -> bool:
        """Whether a run has left something that is still referred to, beside its results: other runs must not follow.

        A form of a filter, for instance, that was derived when an array of just its size was next.
        """
        return any(owner() is not None for owner in self._owners)

    def _input(self, memory: "cupy.cuda.MemoryPointer") -> "cupy.ndarray":
        return self._cupy.ndarray(self._given.shape, self._given.dtype, memory)

    def _place(self, nbytes: int) -> "cupy.cuda.MemoryPointer | None":
        """Returns the next array's place; None if it is of another size, or something there is still referred to."""
        number = self._next
        if number == len(self._lifetimes) or _aligned(nbytes) != self._lifetimes[number].nbytes:
            return None
        if any(self._owners[other]() is not None for other in self._sharing[number]):
            return None
        return self._take()

    def _take(self) -> "cupy.cuda.MemoryPointer":
        """Returns the next array's place, which is taken as long as what is returned is referred to."""
        number, nbytes = self._next, self._lifetimes[self._next].nbytes
        self._next += 1
        owner = _Owner(self._memory, self._malloc)
        self._owners[number] = weakref.ref(owner)
        cuda, place = self._cupy.cuda, self._memory + self._offsets[number]
        return cuda.MemoryPointer(cuda.UnownedMemory(place.ptr, nbytes, owner, place.device_id), 0)


class _Owner:
    """What all references to one array's memory have in common. It keeps the arena's, and the pool that that is from.

    A pool of CuPy's frees its memory when it goes, whoever uses it.
    """

    def __init__(self, *kept: Any) -> None:
        self._kept = kept


def _nobody() -> None:
    """In the place of a reference to an owner that is gone."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
