"""What the choice of a kernel needs to know of a GPU. Imports no CuPy: usable anywhere."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as the heuristics see it.

    Args:
        name: as the driver reports it.
        compute_capability: (major, minor).
        sm_count: streaming multiprocessors.
        shared_memory_per_block: bytes of dynamic shared memory one block may ask for (opt-in limit).
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory_per_block: int

    @property
    def arch(self) -> str:
        """The real architecture NVRTC compiles for, as ``"sm_90"``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"

    @property
    def number(self) -> str:
        """The compute capability as people write it, ``"9.0"``."""
        return f"{self.compute_capability[0]}.{self.compute_capability[1]}"


H100 = Device(name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), sm_count=132, shared_memory_per_block=232448)
"""The GPU the heuristics were tuned on; also what `explain` assumes where there is none."""
