"""Captures and times a network's whole forward pass on the GPU, as its users run it.

Before a single image the L2 cache is filled with something else, as it is when the caller has other things to do; the
call is enqueued meanwhile, and timed between two events, since what the host needs for it has nothing to do with which
kernels are chosen. Larger batches follow each other without a pause, between two events as well.
"""

import contextlib
import statistics
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..binding import bind
from ..conv2d.variants import Filter
from ..engines.cuda_engine import CudaEngine
from ..networks import Conv2d, Network, random_state_dict
from ..networks.network import Layer
from ..plan import Runner

SAMPLE_SECONDS = 0.015
"""How long a sample takes, about; what goes on between single calls not counted."""

FEWEST, MOST = 3, 200
"""Calls of a sample."""

INPUTS = 3
"""Different ones in turn."""

L2_TIMES = 6
"""How many times the size of the L2 cache is written between single calls: for longer than it takes to enqueue one."""


def bind_at_random(network: Network, precision: str, device_id: int) -> tuple[Network, CudaEngine]:
    """Returns a network with random weights, and the engine that it is bound to, to be timed.

    Args:
        network: a description.
        precision: the arithmetic, a key of `cupy_resnet.conv2d.PRECISIONS`.
        device_id: number of the GPU.
    """
    ops = CudaEngine(device_id, precision=precision, spread_nan=True)
    return bind(network, random_state_dict(network), ops), ops


class GpuPasses:
    """Captures passes of one network for one shape: `duels.Passes`. A context, within which it is used.

    On a stream and with memory of its own. Weights are the network's; what kernels derive from them is shared by all
    passes, and goes in the end.

    Args:
        network: bound to `ops`.
        ops: the engine, whose kernel is ``"auto"``.
        shape: (N, C, H, W) of the input.
    """

    def __init__(self, network: Network, ops: CudaEngine, shape: tuple[int, int, int, int]) -> None:
        def with_own_forms(layer: Layer) -> Layer:
            if not isinstance(layer, Conv2d):
                return layer
            assert isinstance(layer.weight, Filter)
            return replace(layer, weight=Filter(layer.weight.weight))

        self.network, self.ops, self.shape = network.map_layers(with_own_forms), ops, shape
        self.inputs: list[Any] = []
        self.calls: int | None = None
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        import cupy

        with contextlib.ExitStack() as entered:
            entered.enter_context(cupy.cuda.Device(self.ops.device))
            cupy.cuda.runtime.deviceSynchronize()  # weights may be on their way, on another stream
            self.pool = cupy.cuda.MemoryPool()
            entered.callback(self.pool.free_all_blocks)
            entered.enter_context(cupy.cuda.using_allocator(self.pool.malloc))
            self.stream = cupy.cuda.Stream(non_blocking=True)
            entered.enter_context(self.stream)
            entered.callback(self._forget)
            N, C, H, W = self.shape
            dtype = np.float16 if self.ops.precision == "fp16" else np.float32
            rng = np.random.default_rng(0)
            for _ in range(INPUTS):
                self.inputs.append(cupy.asarray(rng.standard_normal((N, H, W, C), np.float32).astype(dtype)))
            if N == 1:
                size = cupy.cuda.runtime.getDeviceProperties(self.ops.device)["l2CacheSize"]
                self.other = cupy.empty(L2_TIMES * size, np.uint8)
            self._exit = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()

    def capture(self) -> "GpuPass":
        """Captures the pass with the kernels that are chosen now; see `duels.Passes.capture`."""
        self.pool.free_all_blocks()
        return GpuPass(self)

    def _forget(self) -> None:
        self.stream.synchronize()
        self.inputs.clear()
        self.other = self.network = None  # type: ignore[assignment]  # as good as deleted


class GpuPass:
    """A captured pass, `duels.CapturedPass`, on the current device, stream and allocator of its `GpuPasses`."""

    def __init__(self, passes: GpuPasses) -> None:
        self._passes = passes
        self._runner = Runner(passes.network, passes.ops)
        try:
            results = [self._runner(x, features=False, given=_nchw(x))[0] for x in passes.inputs]
            if not self._runner.planned:
                raise MemoryError("there is no room for another captured pass")
            self.logits: np.ndarray = passes.ops.to_numpy(results[0])
            if passes.calls is None:
                passes.calls = self._suitable_calls()
        except BaseException:
            self.close()
            raise

    def sample(self) -> float:
        """Returns microseconds per pass, measured once: of single images the median of some, else the mean."""
        assert self._passes.calls is not None
        if self._passes.shape[0] == 1:
            return statistics.median(self._single(call) for call in range(self._passes.calls))
        return self._in_a_row(self._passes.calls)

    def close(self) -> None:
        """Drops the plan."""
        self._passes.stream.synchronize()
        self._runner.drop()

    def _suitable_calls(self) -> int:
        if self._passes.shape[0] == 1:
            one = statistics.median(self._single(call) for call in range(FEWEST))
        else:
            one = self._in_a_row(FEWEST)
        return min(MOST, max(FEWEST, round(1e6 * SAMPLE_SECONDS / one)))

    def _single(self, call: int) -> float:
        """Microseconds of one call that finds nothing of the network's in the cache."""
        import cupy

        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        stream, other = self._passes.stream, self._passes.other
        other.data.memset_async(call % 256, other.nbytes, stream)
        start.record(stream)
        self._run(call)
        stop.record(stream)
        stop.synchronize()
        return 1000 * float(cupy.cuda.get_elapsed_time(start, stop))

    def _in_a_row(self, calls: int) -> float:
        """Microseconds per call, behind others that keep the GPU busy until all are enqueued."""
        import cupy

        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        for call in range(2):
            self._run(call)
        start.record(self._passes.stream)
        for call in range(calls):
            self._run(call)
        stop.record(self._passes.stream)
        stop.synchronize()
        return 1000 * float(cupy.cuda.get_elapsed_time(start, stop)) / calls

    def _run(self, call: int) -> None:
        x = self._passes.inputs[call % INPUTS]
        given = _nchw(x)
        if self._runner.replay(given) is None:
            self._runner(x, features=False, given=given)


def _nchw(x: Any) -> Any:
    """(N, H, W, C) as callers have it, a view (N, C, H, W)."""
    return x.transpose(0, 3, 1, 2)
