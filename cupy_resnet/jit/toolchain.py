"""CuPy and the NVRTC it loads: imported on first use, their versions, and what to say when they are missing.

CuPy decides which NVRTC is loaded, and that need not be its own major: beside torch's CUDA 13 wheels
``cupy-cuda12x`` loads NVRTC 13. So nothing here is inferred from the wheel's name; NVRTC is asked.
"""

import importlib
import threading
from functools import cache
from typing import Any

from ..errors import CompileError, EngineUnavailableError

_INSTALL = "pip install 'cupy-resnet[cuda12]' for a CUDA 12 driver, or 'cupy-resnet[cuda13]' for CUDA 13"

_loading_nvrtc = threading.Lock()

NVRTC_PACKAGES = {12: "nvidia-cuda-nvrtc-cu12", 13: "'nvidia-cuda-nvrtc==13.*'"}
"""The wheel that holds NVRTC, by CUDA major, as pip is given it."""


def import_cupy() -> Any:
    """Returns the module ``cupy``.

    Raises:
        EngineUnavailableError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise EngineUnavailableError(f"CuPy cannot be imported ({error}). Install it with: {_INSTALL}") from error


@cache
def import_nvrtc() -> Any:
    """Returns the module ``cupy.cuda.nvrtc`` once the library behind it answers.

    Raises:
        EngineUnavailableError: no CuPy.
        CompileError: CuPy finds no NVRTC.
    """
    cupy = import_cupy()
    try:
        # The first call loads the library, then, beside it, its built-ins. CuPy lets a second thread through in
        # between, whose compilations fail with "failed to open libnvrtc-builtins".
        with _loading_nvrtc:
            cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        major = cupy.cuda.driver.get_build_version() // 1000
        package = NVRTC_PACKAGES.get(major, NVRTC_PACKAGES[13])
        raise CompileError(
            f"CuPy {cupy.__version__} finds no NVRTC, the compiler of CUDA kernels ({error}). "
            f"Install it with: pip install {package}"
        ) from error
    return cupy.cuda.nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    """Returns NVRTC's (major, minor)."""
    major, minor = import_nvrtc().getVersion()
    return int(major), int(minor)


@cache
def supported_archs() -> tuple[int, ...]:
    """Returns the architecture numbers this NVRTC knows, as (75, 80, …), without the ``a`` variants."""
    return tuple(sorted(int(number) for number in import_nvrtc().getSupportedArchs()))


@cache
def no_cache_option() -> tuple[str, ...]:
    """Returns the option that switches off NVRTC's own cache, which newer releases have; nothing for older ones.

    Where a driver is installed NVRTC looks results up in the user's compute cache. A hit has an empty log, so
    registers and spills would be unknown, and its key does not tell all options apart (seen with NVRTC 13.0:
    ``--ftz=true`` was served the cubin of ``--ftz=false``).
    """
    nvrtc = import_nvrtc()
    option = ("--no-cache",)
    handle = nvrtc.createProgram("", "probe.cu", (), ())
    try:
        nvrtc.compileProgram(handle, option)
    except nvrtc.NVRTCError:
        return ()
    finally:
        nvrtc.destroyProgram(handle)
    return option


def describe_versions() -> str:
    """Returns ``"CuPy 14.2.0, NVRTC 13.0, driver for CUDA 13.0"`` for messages."""
    cupy = import_cupy()
    try:
        version = cupy.cuda.runtime.driverGetVersion()
    except RuntimeError:  # CUDARuntimeError is one
        version = 0
    driver = f"driver for CUDA {version // 1000}.{version % 1000 // 10}" if version else "no NVIDIA driver"
    major, minor = nvrtc_version()
    return f"CuPy {cupy.__version__}, NVRTC {major}.{minor}, {driver}"
