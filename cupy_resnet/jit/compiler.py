"""One function from CUDA C text to a cubin: NVRTC, called directly.

CuPy's own compile path is not used because it appends ``-ftz=true``, which flushes denormals, and because it cannot
spell ``sm_90a`` with every NVRTC. No GPU and no driver are needed.
"""

import logging
from collections.abc import Sequence
from typing import Any

from ..errors import CompileError
from . import toolchain
from .arch import Arch
from .headers import find_headers
from .sources import Program

logger = logging.getLogger(__name__)

COMMON_OPTIONS = ("--std=c++17", "--ptxas-options=-v")
"""Options of every compilation; ``-v`` makes the log tell registers, shared memory and spills."""


def compile_source(program: Program, options: Sequence[str], arch: Arch) -> tuple[bytes, str]:
    """Compiles a program for one architecture.

    Args:
        program: the text and the headers of ours that it includes.
        options: further options, as ``-DTILE_M=64``.
        arch: what to compile for.

    Returns:
        The cubin, and NVRTC's log (ptxas's statistics and warnings).

    Raises:
        EngineUnavailableError: no CuPy.
        CompileError: no NVRTC, an architecture it does not know, or an error in the source; the message has file and
            line, versions, and where headers were searched.
    """
    nvrtc = toolchain.import_nvrtc()
    check_known(arch)
    headers = find_headers() if program.needs_system_headers else None
    include_options = [f"--include-path={path}" for path in headers.folders] if headers else []
    own_cache = toolchain.no_cache_option()
    arguments = (f"--gpu-architecture={arch}", *COMMON_OPTIONS, *options, *own_cache, *include_options)
    logger.debug("NVRTC: %s %s", program.name, " ".join(arguments))

    names = [name.encode() for name, _ in program.headers]
    texts = [text.encode() for _, text in program.headers]
    handle = nvrtc.createProgram(program.text, program.name, texts, names)
    try:
        try:
            nvrtc.compileProgram(handle, arguments)
        except nvrtc.NVRTCError as error:
            lines = [
                f"NVRTC cannot compile {program.name} for {arch} ({error}):",
                _log(nvrtc, handle),
                f"Options: {' '.join((*COMMON_OPTIONS, *options))}",
                toolchain.describe_versions(),
            ]
            if headers:
                lines.append(headers.report())
            raise CompileError("\n".join(lines)) from None
        return bytes(nvrtc.getCUBIN(handle)), _log(nvrtc, handle)
    finally:
        nvrtc.destroyProgram(handle)


def check_known(arch: Arch) -> None:
    """Raises CompileError if the loaded NVRTC does not know an architecture."""
    known = toolchain.supported_archs()
    if arch.number not in known:
        advice = "a newer" if arch.number > max(known) else "an older" if arch.number < min(known) else "another"
        raise CompileError(
            f"this NVRTC does not know {arch}; it knows {', '.join(f'sm_{number}' for number in known)} "
            f"({toolchain.describe_versions()}). Install {advice} NVRTC or ask for one of these."
        )


def _log(nvrtc: Any, handle: int) -> str:
    return str(nvrtc.getProgramLog(handle)).rstrip("\0 \n")
