"""Reads what ``--ptxas-options=-v`` writes into NVRTC's log: registers, shared memory and spills of each kernel."""

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelResources:
    """What one entry function takes.

    Args:
        registers: per thread.
        shared_memory: static, bytes per block.
        stack_frame: bytes of local memory per thread, spilled registers and indexed arrays together.
        spill_stores, spill_loads: bytes of spilled registers per thread, called device functions included.
    """

    registers: int = 0
    shared_memory: int = 0
    stack_frame: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def spills(self) -> bool:
        """Whether registers were spilled to local memory."""
        return self.spill_stores > 0 or self.spill_loads > 0


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Returns the resources of every entry function that a log of NVRTC tells of, by function name.

    A function that is called and not inlined has a line of its own below its entry's; its spills count as the entry's.
    """
    _, *sections = _ENTRY.split(log)
    return {name: _parse_section(text) for name, text in zip(sections[::2], sections[1::2], strict=True)}


def _parse_section(text: str) -> KernelResources:
    frames = [tuple(int(number) for number in match) for match in _STACK.findall(text)]
    used = _USED.search(text)
    shared = _SHARED.search(text)
    return KernelResources(
        registers=int(used[1]) if used else 0,
        shared_memory=int(shared[1]) if shared else 0,
        stack_frame=sum(frame for frame, _, _ in frames),
        spill_stores=sum(stores for _, stores, _ in frames),
        spill_loads=sum(loads for _, _, loads in frames),
    )
