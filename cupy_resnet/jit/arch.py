"""GPU architectures as NVRTC spells them: ``sm_80``, ``sm_90a``.

A plain cubin runs on its own architecture and on later ones of the same major. An architecture with a letter
(``sm_90a``: wgmma, setmaxnreg) promises its instructions on exactly that number and nowhere else.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SPELLING = re.compile(r"sm_(\d{2,3})([af]?)")


@dataclass(frozen=True)
class Arch:
    """One architecture: 90 and ``"a"`` for ``sm_90a``."""

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> "Arch":
        """Reads ``"sm_90a"``.

        Raises:
            ValueError: another spelling.
        """
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise ValueError(f"an architecture is spelled like sm_80 or sm_90a, got {text!r}")
        return cls(int(match[1]), match[2])

    @property
    def major(self) -> int:
        """The compute capability's major number: 9 for ``sm_90``, 12 for ``sm_120``."""
        return self.number // 10

    def provides(self, minimum: "Arch") -> bool:
        """Whether code that needs `minimum` may be compiled for this architecture."""
        return self == minimum if minimum.suffix else self.number >= minimum.number

    def specialised(self, minimum: "Arch") -> "Arch | None":
        """Returns what to compile for, to run code that needs `minimum` on a GPU of this architecture.

        ``sm_90`` becomes ``sm_90a`` for a kernel that needs ``sm_90a``. None where such a GPU cannot run it.
        """
        if self.provides(minimum):
            return self
        return minimum if self == Arch(minimum.number) else None

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


def best_for_device(compute_capability: tuple[int, int], known: Iterable[int]) -> Arch | None:
    """Returns the newest architecture among `known` whose cubins run on a device.

    Args:
        compute_capability: the device's (major, minor).
        known: architecture numbers that the compiler knows, as 80 or 120.

    Returns:
        The device's own architecture if known, else the next lower of the same major, else None.
    """
    major, minor = compute_capability
    fitting = [number for number in known if number // 10 == major and number % 10 <= minor]
    return Arch(max(fitting)) if fitting else None
