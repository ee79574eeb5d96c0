"""What the tests of the benchmark share: a device whose time is what a test says, and reports made by hand."""

from collections.abc import Callable
from typing import Any

from cupy_resnet.proof.bench.fusion import Pass
from cupy_resnet.proof.bench.report import Entry, Report, Row
from cupy_resnet.proof.bench.timing import Effort

QUICK = Effort(samples=5, warmup=1, seconds=0.2)

MACHINE: dict[str, Any] = {
    "device": "CPU",
    "processor": "Abacus",
    "processors": 2,
    "driver_cuda": None,
    "driver": None,
    "versions": {"python": "3.11", "numpy": "2.0", "torch": "2.5"},
    "date": "2026-01-02",
    "commit": None,
}


class FakeMeter:
    """A device on which work takes as long as it is said to, and is done only when somebody waits for it.

    Calls made by `work` advance the time by `host` at once and by the rest when `synchronize` is called.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.time = 0.0
        self.pending = 0.0
        self.log: list[Any] = []

    def now(self) -> float:
        return self.time

    def synchronize(self) -> None:
        self.time += self.pending
        self.pending = 0.0

    def work(self, name: str, seconds: float, host: float = 0.0) -> Callable[[Any], None]:
        def call(x: Any) -> None:
            self.log.append((name, x))
            self.time += host
            self.pending += seconds - host

        return call

    def device_ms(self, call: Callable[[], Any], repeats: int = 1) -> float:
        self.synchronize()
        begin = self.time
        for _ in range(repeats):
            call()
        self.synchronize()
        return (self.time - begin) * 1e3 / repeats

    def memory_mark(self) -> int | None:
        return None

    def memory_peak(self, mark: int | None) -> int | None:
        return None


def entry(name: str, ms: float, *, stream_ms: float | None = None, spread: float = 0.01, **fields: Any) -> Entry:
    """A contender with this median and, relative to it, this spread; ours if its name begins so."""
    offsets = [-spread / 2, -spread / 4, 0.0, spread / 4, spread / 2]
    stream = ms if stream_ms is None else stream_ms
    known: dict[str, Any] = {
        "kernel": "auto" if name.startswith("ours") else None,
        "first_call_s": 0.5,
        "peak_bytes": 25_000_000,
        "error": 1e-6,
        "wrong": None,
    }
    return Entry(
        name=name,
        latency_ms=[float(f"{ms * (1 + offset):.6g}") for offset in offsets],
        stream_calls=10,
        stream_ms=[float(f"{stream * (1 + offset):.6g}") for offset in offsets],
        **known | fields,
    )


def fused(name: str, host: float, device: float = 0.0, **fields: Any) -> Pass:
    """A stage of fusion whose passes all take so many milliseconds, of the host and of the GPU."""
    known: dict[str, Any] = {"stage": name, "operations": 10, "nbytes": 10**6, "error": 1e-6, "wrong": None}
    return Pass(name=name, host_ms=[host] * 5, device_ms=[device] * 5 if device else [], **known | fields)


def row(*entries: Entry, N: int = 1, **fields: Any) -> Row:
    known: dict[str, Any] = {
        "model": "resnet20",
        "size": 32,
        "precision": "fp32",
        "engine": "numpy",
        "flops": 10**9,
        "bound_ms": None,
        "eager_error": 1e-6,
    }
    return Row(N=N, entries=list(entries), **known | fields)


def report(*rows: Row) -> Report:
    return Report(machine=MACHINE, settings={"samples": 5}, rows=list(rows))
