"""Compiles the kernels in ``kernels_cu/`` at run time and hands them out.

The way of a kernel, one module per step: `sources` finds its text, `headers` the CUDA headers that fit the loaded
NVRTC, `compiler` makes a cubin of it, `cache` keeps that, `building` ties these together, `loading` puts the cubin on
a device, `launching` starts it. `report` compiles everything for the command line; `arch`, `ptxas` and `toolchain` know
architectures, the assembler's statistics, and CuPy's NVRTC.

Importing this package imports no CuPy; compiling needs CuPy and NVRTC but no GPU; only `get_function` needs one.
"""

from .arch import Arch
from .building import Compiled, CompileEvent, Defines, compile_kernel, compile_listeners, on_compile
from .launching import (
    ExecutableGraph,
    Launch,
    PreparedGraph,
    PreparedLaunch,
    allocating_during_capture,
    graphs_can_be_prepared,
    launch,
    overlapping,
    recording,
)
from .loading import get_function
from .ptxas import KernelResources
from .report import Report, compile_reports
from .sources import KernelSource, list_kernels, sources_digest

__all__ = [
    "Arch",
    "CompileEvent",
    "Compiled",
    "Defines",
    "ExecutableGraph",
    "KernelResources",
    "KernelSource",
    "Launch",
    "PreparedGraph",
    "PreparedLaunch",
    "Report",
    "allocating_during_capture",
    "compile_kernel",
    "compile_listeners",
    "compile_reports",
    "get_function",
    "graphs_can_be_prepared",
    "launch",
    "list_kernels",
    "on_compile",
    "overlapping",
    "recording",
    "sources_digest",
]
