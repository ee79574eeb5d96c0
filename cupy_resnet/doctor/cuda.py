"""What the CUDA engine needs: driver, CuPy, GPU, NVRTC, headers, and a kernel that compiles and runs."""

import ctypes
import importlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata

from .. import environment, jit
from ..errors import CompileError, EngineUnavailableError
from .finding import Finding

_PROBE_KERNEL = "relu"
"""Small, without CUDA's headers: what fails here fails everywhere."""

_INSTALL_DRIVER = "if there is an NVIDIA GPU, install its driver: https://www.nvidia.com/drivers"
_USUAL_ARCH = 90
_REMEDY = "with: "
"""What stands before the command in the messages of `jit`."""


def obstacle() -> str | None:
    """Returns why the CUDA engine cannot run, None if it can."""
    from ..engines.cuda_engine import cuda_obstacle

    return cuda_obstacle()


def examine_driver() -> Iterator[Finding]:
    version = _driver_version()
    if version is None:
        yield Finding(
            name="driver",
            status="missing",
            detail="no NVIDIA driver (libcuda); the CUDA engine needs one",
            fix=_INSTALL_DRIVER,
        )
    else:
        yield Finding(name="driver", status="ok", detail=f"for CUDA {version // 1000}.{version % 1000 // 10}")


def _driver_version() -> int | None:
    """Returns the newest CUDA the driver runs, as 12040; None without a driver. Starts no CUDA."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def _extra() -> str:
    """Returns the command that installs CuPy and its compiler for the driver here."""
    version = _driver_version()
    return f"pip install 'cupy-resnet[{'cuda13' if version and version >= 13000 else 'cuda12'}]'"


def _cupy_wheels() -> list[str]:
    names = {(distribution.metadata["Name"] or "").lower() for distribution in metadata.distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")))


def examine_cupy() -> Iterator[Finding]:
    wheels = _cupy_wheels()
    if importlib.util.find_spec("cupy") is None:
        yield Finding(name="CuPy", status="missing", detail="not installed; the CUDA engine needs it", fix=_extra())
        return
    reinstall = f"pip uninstall -y {' '.join(wheels)} && {_extra()}"
    if len(wheels) > 1:
        detail = f"{' and '.join(wheels)} are installed at once, and overwrite each other's files"
        yield Finding(name="CuPy", status="warning", detail=detail, fix=reinstall)
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a broken installation can raise anything
        detail = f"cannot be imported: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
        yield Finding(name="CuPy", status="missing", detail=detail, fix=reinstall if wheels else _extra())
        return
    driver, built = _driver_version(), cupy.cuda.driver.get_build_version()
    detail = f"{cupy.__version__} ({', '.join(wheels) or 'built from source'})"
    if driver is not None and driver // 1000 < built // 1000:
        detail += f" is for CUDA {built // 1000}, the driver only for CUDA {driver // 1000}"
        yield Finding(name="CuPy", status="missing", detail=detail, fix=reinstall)
    else:
        yield Finding(name="CuPy", status="ok", detail=detail)


def examine_gpu() -> Iterator[Finding]:
    reason = obstacle()
    if reason is not None:
        if importlib.util.find_spec("cupy") is None:
            return  # said already
        if _driver_version() is None:
            yield Finding(name="GPU", status="missing", detail="none can be used without a driver", fix=_INSTALL_DRIVER)
            return
        fix = "nvidia-smi" if shutil.which("nvidia-smi") else "use a machine with an NVIDIA GPU, or engine numpy"
        yield Finding(name="GPU", status="missing", detail=reason, fix=fix)
        return
    import cupy

    for device in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        major, minor = properties["major"], properties["minor"]
        detail = (
            f"{device}: {properties['name'].decode()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB, "
            f"compute capability {major}.{minor}"
        )
        if (major, minor) < (7, 0):
            detail += ": too old, 7.0 is the least"
            yield Finding(name="GPU", status="warning", detail=detail, fix=f"export {environment.ENGINE.name}=numpy")
        else:
            yield Finding(name="GPU", status="ok", detail=detail)


def examine_nvrtc() -> Iterator[Finding]:
    if importlib.util.find_spec("cupy") is None:
        return
    from ..jit import toolchain

    try:
        major, minor = toolchain.nvrtc_version()
    except (CompileError, EngineUnavailableError) as error:
        yield Finding(name="NVRTC", status="missing", detail=str(error), fix=_remedy(str(error)) or _extra())
        return
    archs = toolchain.supported_archs()
    detail = f"{major}.{minor}, compiles for sm_{archs[0]} to sm_{archs[-1]}"
    driver = _driver_version()
    if driver is not None and driver // 1000 < major:
        detail += f"; the driver is for CUDA {driver // 1000} and may refuse what it compiles"
        package = toolchain.NVRTC_PACKAGES.get(driver // 1000, "")
        fix = f"update the driver; or, in an environment without CUDA {major} packages: pip install {package}".strip()
        yield Finding(name="NVRTC", status="warning", detail=detail, fix=fix)
    else:
        yield Finding(name="NVRTC", status="ok", detail=detail)


def examine_headers() -> Iterator[Finding]:
    if not _compiler_answers():
        return
    from ..jit.headers import find_headers

    headers = find_headers()
    if headers.missing:
        detail = f"CUDA {headers.major}'s {' and '.join(headers.missing)} not found; some kernels need it"
        yield Finding(name="headers", status="missing", detail=detail, fix=_remedy(headers.report()))
    else:
        folders = ", ".join(map(str, headers.folders))
        yield Finding(name="headers", status="ok", detail=f"CUDA {headers.major}, with crt/mma.h, in {folders}")


def examine_compiling() -> Iterator[Finding]:
    if not _compiler_answers():
        return
    from ..jit.arch import best_for_device
    from ..jit.compiler import compile_source
    from ..jit.sources import find_kernel, load_program
    from ..jit.toolchain import supported_archs

    archs = supported_archs()
    if obstacle() is not None:
        arch = jit.Arch(_USUAL_ARCH if _USUAL_ARCH in archs else archs[-1])
    else:
        from ..engines.cuda_engine import describe_device

        capability = describe_device(0).compute_capability
        best = best_for_device(capability, archs)
        if best is None:
            detail = f"this NVRTC knows nothing that runs on compute capability {capability[0]}.{capability[1]}"
            yield Finding(name="compiling", status="missing", detail=detail, fix=_extra())
            return
        arch = best
    begin = time.perf_counter()
    try:
        compile_source(load_program(find_kernel(_PROBE_KERNEL)), (), arch)  # past the cache
    except CompileError as error:
        yield Finding(name="compiling", status="missing", detail=str(error), fix=_remedy(str(error)) or _extra())
        return
    seconds = time.perf_counter() - begin
    yield Finding(name="compiling", status="ok", detail=f"kernel {_PROBE_KERNEL} for {arch} in {seconds:.2f} s")


def examine_running() -> Iterator[Finding]:
    if obstacle() is not None or not _compiler_answers():
        return
    import numpy as np

    from ..engines.cuda_engine import CudaEngine

    mend = f"update the driver; then: rm -r '{environment.cache_dir() / 'kernels'}'"
    x = np.arange(-8, 8, dtype=np.float32)
    try:
        ops = CudaEngine()
        right = np.array_equal(ops.to_numpy(ops.relu(ops.asarray(x))), np.maximum(x, 0))
    except (CompileError, EngineUnavailableError, RuntimeError) as error:
        yield Finding(name="running", status="missing", detail=str(error), fix=_remedy(str(error)) or mend)
        return
    if right:
        yield Finding(name="running", status="ok", detail=f"kernel {_PROBE_KERNEL} on GPU {ops.device}, result right")
    else:
        yield Finding(name="running", status="missing", detail=f"kernel {_PROBE_KERNEL} gives a wrong result", fix=mend)


def _compiler_answers() -> bool:
    from ..jit import toolchain

    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        toolchain.nvrtc_version()
    except (CompileError, EngineUnavailableError):
        return False
    return True


def _remedy(message: str) -> str | None:
    """Returns the command that a message of `jit` ends in, None if it has none."""
    for line in message.splitlines():
        if _REMEDY in line:
            return line.partition(_REMEDY)[2].strip()
    return None
