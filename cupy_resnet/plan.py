"""Plans: a network's forward pass for one shape, captured once as a CUDA graph and replayed by a single launch.

Enqueueing a ResNet kernel by kernel costs the host several microseconds each, which at small batches is longer than the
GPU computes. A plan pays that once. What reads the caller's array (`Network.front`) stays outside the graph, so that
input of any type, layout and address needs no copy; it writes to the plan's own memory, from which the graph goes on.
Results are copied out of the plan's memory: those of different calls never share any.

Calls that resemble an earlier one go a shorter way still: `replay`.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from .arena import Arena
from .engines.base import Array, Ops
from .networks import Network
from .replay import Captured, Passes, Replays

if TYPE_CHECKING:
    from .engines.cuda_engine import CudaEngine

logger = logging.getLogger(__name__)

MAX_PLANS = 16
MAX_SHARE_OF_MEMORY = 0.25
"""Bounds of what one model's plans may hold: their number, and their share of the GPU's memory."""


class Runner:
    """Runs a bound network on its engine, with plans where they apply.

    Several threads may call it at once: a plan serves one call after the other, on the GPU as well, whatever streams
    the callers use.

    Args:
        network: bound to `ops`.
        ops: the engine.
        plans: whether forward passes on the CUDA engine are captured and replayed.
        max_plans: plans kept; the least recently used goes first.
        max_bytes: memory they may hold together; by default `MAX_SHARE_OF_MEMORY` of the GPU's.
        tuner: called with (N, H, W) before each pass, as `cupy_resnet.tuning.Tuner` is; None for no tuning.

    Attributes:
        replay: runs a pass as an earlier one: `Replays.repeat`, with nothing in between.
    """

    def __init__(
        self,
        network: Network,
        ops: Ops,
        *,
        plans: bool = True,
        max_plans: int = MAX_PLANS,
        max_bytes: int | None = None,
        tuner: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.network = network
        self.ops = ops
        self.plans = plans and ops.name == "cuda"
        self.max_plans = max_plans
        self.max_bytes = max_bytes
        self._tuner = tuner
        self._plans: OrderedDict[tuple[int, ...], _Plan] = OrderedDict()
        self._kept_for_callers_graphs: list[Any] = []
        self._lock = threading.Lock()
        self._replays = Replays(_without_reference(self._count_as_used))
        self.replay = self._replays.repeat

    def __call__(
        self,
        x: Array,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        features: bool = True,
        out: Array | None = None,
        given: Any = None,
    ) -> tuple[Array, Array | None]:
        """Runs one forward pass on the current stream.

        While that is being captured, its kernels become part of the caller's graph, and so does memory that is kept
        for it as long as this object lives.

        Args:
            x: (N, H, W, in_channels) pixels, as `Network.__call__` takes them.
            mean, std: likewise.
            features: whether the pooled features are wanted.
            out: a C-contiguous float32 array (N, num_classes) of the engine for the logits; a new one by default.
            given: the caller's array (N, in_channels, H, W) that `x` was made from, if `replay` may run others like it
                later; only without `mean` and `std`.

        Returns:
            Logits (N, num_classes) and, if wanted, features (N, num_features), which nothing else refers to.

        Raises:
            MemoryError: the GPU has no room, after all plans were dropped.
        """
        if self.ops.name != "cuda" or x.shape[0] == 0:
            return self._once(x, mean, std, features, out)
        import cupy

        with x.device:
            if cupy.cuda.get_current_stream().is_capturing():
                return self._in_callers_graph(x, mean, std, features, out)
            if self._tuner is not None:
                self._tuner(*x.shape[:3])
            if self.plans:
                try:
                    return self._planned(x, mean, std, features, out, given)
                except MemoryError:
                    self.drop()
                    release = getattr(self.ops, "close", None)
                    if release is not None:  # other pools than the plan's may hold memory that nobody uses
                        release()
            return self._once(x, mean, std, features, out)

    @property
    def planned(self) -> list[tuple[int, ...]]:
        """(N, H, W) of the passes that are captured, the least recently used first."""
        with self._lock:
            return list(self._plans)

    def drop(self) -> bool:
        """Drops all plans and gives their memory back to the GPU. Returns whether there were any."""
        with self._lock:
            plans = list(self._plans.values())
            self._plans.clear()
        for plan in plans:
            plan.close()
        return bool(plans)

    def _once(
        self,
        x: Array,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        features: bool,
        out: Array | None,
    ) -> tuple[Array, Array | None]:
        logits, pooled = self.network(self.ops, x, mean=mean, std=std)
        if out is not None:
            out[...] = logits
            logits = out
        return logits, pooled if features else None

    def _in_callers_graph(
        self,
        x: Array,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        features: bool,
        out: Array | None,
    ) -> tuple[Array, Array | None]:
        """As `_once`, in memory that nobody else is given: the graph will write to it whenever it is replayed."""
        import cupy

        from . import jit
        from .conv2d.scratch import new_counters, scratch

        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc), jit.allocating_during_capture():
            counters = new_counters()  # zeroed by the graph's first node, and by each kernel that used them
            with scratch(counters):
                results = self._once(x, mean, std, features, out)
        with self._lock:
            self._kept_for_callers_graphs.append((pool, counters))
        return results

    def _planned(
        self,
        x: Array,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        features: bool,
        out: Array | None,
        given: Any,
    ) -> tuple[Array, Array | None]:
        key = x.shape[:3]
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
        if plan is None:
            plan = self._capture(x, mean, std, key)
        try:
            results = plan.run(x, mean, std, features, out, given)
        except MemoryError:
            with self._lock:
                if self._plans.get(key) is plan:
                    raise
            return self._once(x, mean, std, features, out)  # another thread dropped it meanwhile: that is no shortage
        return results

    def _capture(
        self, x: Array, mean: Sequence[float] | None, std: Sequence[float] | None, key: tuple[int, ...]
    ) -> "_Plan":
        plan = _Plan(self.network, cast("CudaEngine", self.ops), x, mean, std, self._replays)
        logger.info("%s: captured a plan for %s, %.1f MiB", self.network.name, x.shape, plan.nbytes / 2**20)
        with self._lock:
            other = self._plans.get(key)
            if other is None:
                self._plans[key] = plan
            surplus = self._surplus()
        if other is not None:  # another thread was faster
            plan.close()
            return other
        for old in surplus:
            old.close()
        return plan

    def _count_as_used(self, key: tuple[int, ...]) -> None:
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)

    def _surplus(self) -> list["_Plan"]:
        """Takes out the least recently used plans until the bounds hold; the newest stays whatever its size."""
        import cupy

        limit = self.max_bytes
        if limit is None:
            limit = int(cupy.cuda.runtime.memGetInfo()[1] * MAX_SHARE_OF_MEMORY)
        surplus = []
        while len(self._plans) > 1 and (
            len(self._plans) > self.max_plans or sum(plan.nbytes for plan in self._plans.values()) > limit
        ):
            surplus.append(self._plans.popitem(last=False)[1])
        return surplus


def _without_reference(method: Callable[[tuple[int, ...]], None]) -> Callable[[tuple[int, ...]], None]:
    """Returns a function that calls a method as long as its object lives, which it does not keep alive.

    So that object goes, and the GPU's memory with it, as soon as nobody else refers to it.
    """
    reference = weakref.WeakMethod(method)

    def call(key: tuple[int, ...]) -> None:
        method = reference()
        if method is not None:
            method(key)

    return call


def _begun(work: Callable[[], None], stream: Any) -> Any:
    """Enqueues `work` beside what `stream` will get from here on, on a stream of its own, which is returned."""
    import cupy

    beside = cupy.cuda.Stream(non_blocking=True)
    beside.wait_event(stream.record(cupy.cuda.Event(disable_timing=True)))
    with beside:
        work()
    return beside


class _Plan:
    """One captured graph with the memory that it uses."""

    def __init__(
        self,
        network: Network,
        ops: "CudaEngine",
        x: Array,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        replays: Replays,
    ) -> None:
        import cupy

        from .conv2d.scratch import new_counters, scratch

        self._cupy, self._network, self._ops, self._replays = cupy, network, ops, replays
        self._pool: Any = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        caller = cupy.cuda.get_current_stream()
        filters = [conv.weight for _, block in network.blocks for conv in block.convolutions()]
        with self._stream:
            self._stream.wait_event(caller.record())
            with cupy.cuda.using_allocator(self._pool.malloc):
                self._counters = new_counters()  # stays referenced: the graph has its address
                self._arena: Any = Arena(network, ops, x.shape)
            with scratch(self._counters):
                # Compiles and loads kernels, and prepares filters: those outlive the plan, so they are not in its pool.
                network.front(ops, x, mean=mean, std=std, out=self._arena.input)
                self._arena.run()
                with cupy.cuda.using_allocator(self._pool.malloc):
                    if self._arena.occupied:
                        self._arena = Arena(network, ops, x.shape)
                        network.front(ops, x, mean=mean, std=std, out=self._arena.input)
                    self._arena.run()  # fills the pool, so that the capture allocates nothing
                    self._prefetch: Any = ops.prefetch(filters)
            self._stream.synchronize()
        cupy.get_default_memory_pool().free_all_blocks(stream=self._stream)  # nobody else can use what is free there
        # With few images the filters are most of what is read, and waiting for them most of the time.
        self._few = self._prefetch.nbytes > max(2 * self._arena.largest, self._pool.total_bytes())
        self._passes = Passes(x.shape[:3], self._captured(), cupy.cuda.Event(disable_timing=True))

    def _captured(self, front: Callable[[], Any] | None = None) -> Captured:
        """Captures the network's body, behind its front where one is given, in the plan's memory.

        All captures of a plan use the same: their graphs run one after the other. An array that a record of launches
        kept alive could not share its place.
        """
        from . import jit
        from .conv2d.scratch import scratch

        with self._cupy.cuda.using_allocator(self._pool.malloc), self._stream, scratch(self._counters):
            self._stream.begin_capture()
            beside = None
            try:
                beside = _begun(self._prefetch, self._stream) if self._few else None
                with jit.overlapping():
                    with jit.recording(arrays=False) as launches:
                        if front is not None:
                            front()
                    with jit.recording(arrays=False) as of_body:
                        logits, features = self._arena.run()
            finally:
                if beside is not None:
                    self._stream.wait_event(beside.record())
                graph = self._stream.end_capture()
        self.nbytes = int(self._pool.total_bytes())
        return Captured(graph, logits, features, launches, of_body[-1] if of_body else None)

    def run(
        self,
        x: Array,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        features: bool,
        out: Array | None,
        given: Any,
    ) -> tuple[Array, Array | None]:
        """Runs front, graph and the copy of the results on the current stream, and notes how to do that again."""
        from . import jit

        cupy = self._cupy
        stream, passes = cupy.cuda.get_current_stream(), self._passes
        with passes.lock:
            body = passes.body
            if body is None:
                raise MemoryError("the plan was dropped")
            logits = cupy.empty_like(body.logits) if out is None else out
            pooled = cupy.empty_like(body.features) if features else None
            stream.wait_event(passes.done)  # of the call before, which may have used another stream
            target = self._arena.input
            with jit.recording() as launches:
                self._network.front(self._ops, x, mean=mean, std=std, out=target)
            body.graph.launch(stream)
            logits.data.copy_from_device_async(body.logits.data, body.logits.nbytes, stream)
            if pooled is not None:
                pooled.data.copy_from_device_async(body.features.data, body.features.nbytes, stream)
            passes.done.record(stream)
            passes.stream = stream.ptr
            if given is not None:
                front = partial(self._network.front, self._ops, x, mean=None, std=None, out=target)
                self._replays.note(passes, given, launches, partial(self._captured, front))
        return logits, pooled

    def close(self) -> None:
        """Waits for the last call and gives the memory back to the GPU."""
        with self._passes.lock:
            self._passes.done.synchronize()
            self._replays.forget(self._passes)
            self._arena = self._counters = self._prefetch = None
            self._pool.free_all_blocks()
