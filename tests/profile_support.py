"""A clock that tells the times it was given, and a profile made with it."""

from collections.abc import Callable, Iterable
from typing import Any

from cupy_resnet.proof.ceilings import Ceilings

LIMITS = Ceilings(
    device="A device",
    driver="driver 1.2",
    copy_bytes_per_s=1e11,
    matmul_flops_per_s={"float32": 1e12, "tf32": 6e12},
    method={"copy": "by hand", "float32": "by heart", "tf32": "by guess"},
    date="2024-02-29",
)


class FakeClock:
    """Runs every call, and says that it took what the lists say, in turn; a list that ends begins again."""

    def __init__(self, alone: Iterable[float] = (1e-6,), as_called: Iterable[float] = (1e-3,)) -> None:
        self._alone, self._as_called = list(alone), list(as_called)
        self.log: list[str] = []

    def alone(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self.log.append("alone")
        return call(), self._alone[(self.log.count("alone") - 1) % len(self._alone)]

    def as_called(self, call: Callable[[], Any]) -> float:
        call()
        self.log.append("as_called")
        return self._as_called[(self.log.count("as_called") - 1) % len(self._as_called)]
