"""Tunes a model when it is called: ``load(..., tune=True)``."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..conv2d import tuned
from ..engines.cuda_engine import CudaEngine
from ..networks import Network
from .bench import Bench, GpuBench
from .duels import Passes
from .in_network import SHARE, tune_in_network
from .passes import GpuPasses
from .remembering import remember
from .rounds import BUDGET_SECONDS, Report, tune
from .workloads import network_problems

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int, int]
MakePasses = Callable[[Network, CudaEngine, Shape], AbstractContextManager[Passes]]


class Tuner:
    """Sees to it that the convolutions of a network have been timed on this GPU, shape by shape.

    Convolutions that the user's own table knows, from whatever network, are not timed again. Several threads may call
    it at once; the others wait for the one that measures, so as not to disturb it.

    Args:
        network: bound to a CUDA engine whose kernel is ``"auto"``.
        precision: the arithmetic of that engine.
        device_id: number of its GPU.
        budget_s: seconds of measuring per shape; see `rounds.tune`.
        ops: that engine, if its passes are captured: what was timed is then tried in the whole network too.
        make_bench: makes what times, when it is first needed; given the number of the GPU.
        make_passes: likewise what times whole passes; given the network, `ops` and (N, C, H, W).
    """

    def __init__(
        self,
        network: Network,
        precision: str,
        device_id: int,
        *,
        budget_s: float = BUDGET_SECONDS,
        ops: CudaEngine | None = None,
        make_bench: Callable[[int], Bench] = GpuBench,
        make_passes: MakePasses = GpuPasses,
    ) -> None:
        self._network, self._precision, self._device_id = network, precision, device_id
        self._budget_s, self._ops = budget_s, ops
        self._make_bench, self._make_passes = make_bench, make_passes
        self._seen: set[tuple[int, int, int]] = set()
        self._lock = threading.Lock()

    def __call__(self, batch_size: int, height: int, width: int) -> None:
        """Times what is not known yet for inputs of this shape, at the first call; must not run during a capture."""
        shape = (batch_size, height, width)
        if shape in self._seen:
            return
        with self._lock:
            if shape not in self._seen:
                self._tune(shape)
                self._seen.add(shape)

    def _tune(self, shape: tuple[int, int, int]) -> None:
        N, H, W = shape
        input_shape = (N, self._network.in_channels, H, W)
        bench = self._make_bench(self._device_id)
        workloads = network_problems(self._network, input_shape, self._precision, bench.device, fuse=False)
        gpu = bench.device.name
        own = tuned.lookup(gpu).own
        new = [workload for workload in workloads if (workload.problem, True) not in own]
        if not new:
            return
        logger.info("%s: timing %d convolutions for %s", self._network.name, len(new), input_shape)
        budget_s = self._budget_s if self._ops is None else (1 - SHARE) * self._budget_s
        report = tune(new, bench, budget_s=budget_s, found=lambda result: remember(gpu, [result.entry]))
        for workload, reason in report.skipped.items():
            logger.info("%s is left to the cost model: %s", workload.problem, reason)
        if self._ops is not None and report.results:
            self._tune_in_network(self._ops, bench, input_shape, report)

    def _tune_in_network(self, ops: CudaEngine, bench: Bench, shape: Shape, report: Report) -> None:
        """Tries what was just timed in the network, and nothing that another one was tuned with."""
        try:
            with self._make_passes(self._network, ops, shape) as passes:
                found = tune_in_network(
                    *(self._network, shape, self._precision, bench, passes),
                    fuse=False,
                    results=report.results,
                    only={result.workload.problem for result in report.results},
                    budget_s=self._budget_s - report.seconds,
                )
        except MemoryError as error:
            logger.info("%s is not tuned in the network: %s", self._network.name, error)
            return
        if found.changes:
            remember(bench.device.name, found.entries)
        logger.info(
            "%s: in the network %d choices changed, %.1f → %.1f µs",
            *(self._network.name, len(found.entries), found.before, found.after),
        )
