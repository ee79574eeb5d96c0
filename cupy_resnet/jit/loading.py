"""From a kernel's name to a function that can be launched on a device."""

import os
import threading
from typing import Any

from ..errors import CompileError, EngineUnavailableError
from . import toolchain
from .arch import Arch, best_for_device
from .building import Compiled, Defines, compile_kernel
from .cache import file_of
from .sources import find_kernel

_SPAWN_ADVICE = (
    "CUDA was started in the parent process before fork(), and a forked child cannot use it. Start workers with "
    'multiprocessing.get_context("spawn") (torch: DataLoader(multiprocessing_context="spawn")), or use the GPU only '
    "after forking."
)

_INITIALIZATION_ERROR = 3  # cudaErrorInitializationError and CUDA_ERROR_NOT_INITIALIZED: what a forked child gets


class _Loaded:
    """What one process has loaded; modules stay loaded as long as the process lives."""

    def __init__(self) -> None:
        self.functions: dict[tuple[Any, ...], Any] = {}
        self.modules: dict[tuple[str, int], tuple[Compiled, Any]] = {}
        self.lock = threading.RLock()


_loaded = _Loaded()
_inherited: _Loaded | None = None
"""The parent's, in a forked child: kept so that no destructor touches CUDA there, never used."""


def _after_fork_in_child() -> None:
    global _loaded, _inherited
    _inherited = _inherited if _inherited is not None and _inherited.modules else _loaded
    _loaded = _Loaded()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def get_function(
    name: str,
    function: str | None = None,
    *,
    defines: Defines | None = None,
    device: int | None = None,
    arch: str | None = None,
) -> Any:
    """Returns a kernel's function, compiled and loaded; a repeated call is one dictionary look-up.

    Args:
        name: of a file ``kernels_cu/<name>.cu``.
        function: an ``extern "C" __global__`` function in it; its public one, named as the file, by default.
        defines: macros, as ``{"TILE_M": 64}``.
        device: the device's number; the current device by default.
        arch: what to compile for; by default the device's own architecture, with the ``a`` of ``sm_90a`` where the
            kernel asks for it, or the next lower one that NVRTC knows.

    Returns:
        A ``cupy.RawKernel``, to be launched while `device` is current.

    Raises:
        EngineUnavailableError: no CuPy, no GPU or driver, or a process forked after CUDA was started.
        CompileError: the kernel cannot be compiled for, or loaded on, this device.
        ValueError: no such kernel or function.
    """
    if device is None:
        device = _current_device()
    key = (name, function, tuple(defines.items()) if defines else None, device, arch)
    kernel = _loaded.functions.get(key)
    if kernel is None:
        kernel = _loaded.functions.setdefault(key, _load(name, function or name, defines, device, arch))
    return kernel


def _load(name: str, function: str, defines: Defines | None, device: int, arch: str | None) -> Any:
    if _inherited is not None and _inherited.modules:
        raise EngineUnavailableError(_SPAWN_ADVICE)
    cupy = toolchain.import_cupy()
    compiled = compile_kernel(name, defines=defines, arch=arch or _arch_for(name, defines, device))
    if compiled.resources and function not in compiled.resources:
        raise ValueError(f"kernel {name} has no function {function!r}; it has: {', '.join(compiled.resources)}")
    with _loaded.lock:
        try:
            with cupy.cuda.Device(device):
                _, module = _loaded.modules.get((compiled.key, device), (None, None))
                if module is None:
                    module = cupy.RawModule(path=str(file_of(compiled.entry)))
                kernel = module.get_function(function)
                _ = kernel.kernel  # loads now, on this device, while the file is certainly there
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise _explain(error, f"kernel {name}, compiled for {compiled.arch}, cannot be loaded", device) from error
        _loaded.modules[compiled.key, device] = (compiled, module)
    return kernel


def _arch_for(name: str, defines: Defines | None, device: int) -> str:
    """Returns the architecture to compile a form of a kernel for, to run it on a device."""
    cupy = toolchain.import_cupy()
    try:
        capability = cupy.cuda.Device(device).compute_capability
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise _explain(error, "the GPU cannot be asked for its architecture", device) from error
    major, minor = int(capability[:-1]), int(capability[-1])
    arch = best_for_device((major, minor), toolchain.supported_archs())
    if arch is None:
        raise CompileError(
            f"this NVRTC knows no architecture that runs on device {device} (compute capability {major}.{minor}); it "
            f"knows {', '.join(f'sm_{n}' for n in toolchain.supported_archs())} ({toolchain.describe_versions()})"
        )
    minimum = find_kernel(name).min_arch_of(defines or {})
    special = arch.specialised(Arch.parse(minimum))
    if special is None:
        raise CompileError(f"kernel {name} needs {minimum}; device {device} is sm_{major}{minor}")
    return str(special)


def _current_device() -> int:
    cupy = toolchain.import_cupy()
    try:
        return int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise _explain(error, "there is no usable GPU", None) from error


def _explain(error: Any, what: str, device: int | None) -> Exception:
    """Turns a CUDA error into one that says what to do."""
    if _inherited is not None and error.status == _INITIALIZATION_ERROR:
        return EngineUnavailableError(_SPAWN_ADVICE)
    cupy = toolchain.import_cupy()
    where = "" if device is None else f" on device {device}"
    if isinstance(error, cupy.cuda.runtime.CUDARuntimeError):
        return EngineUnavailableError(f"{what}{where}: {error} ({toolchain.describe_versions()})")
    return CompileError(f"{what}{where}: {error} ({toolchain.describe_versions()})")
