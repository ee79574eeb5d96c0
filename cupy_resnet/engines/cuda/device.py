"""What there is to run on: whether the CUDA engine can be had, and in which precisions. Imports CuPy when asked."""

import importlib.util
from functools import lru_cache
from typing import Any

from ...conv2d import PRECISIONS, VARIANTS, Device
from ...errors import EngineUnavailableError

MIN_COMPUTE_CAPABILITY = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "fp32-tc": (8, 0)}
"""The oldest tensor cores that multiply in a precision."""

PREFERRED = ("fp16", "fp32", "fp32-tc")
"""What ``precision="auto"`` means: the first of them that the GPU and the demanded kernel can compute in."""


@lru_cache(maxsize=64)
def describe_device(device_id: int) -> Device:
    """Asks the driver what the heuristics need to know of a GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        sm_count=properties["multiProcessorCount"],
        shared_memory_per_block=properties["sharedMemPerBlockOptin"],
    )


def find_device(device: int | None) -> int:
    """Returns the number of a GPU that exists, the current one for None, or raises EngineUnavailableError."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    device = int(cupy.cuda.runtime.getDevice()) if device is None else device
    if not 0 <= device < count:
        raise EngineUnavailableError(f"there is no GPU {device}; this machine has {count}, numbered from 0")
    return device


def cuda_obstacle() -> str | None:
    """Returns None where the CUDA engine can run, else a sentence with the reason and the remedy."""
    if importlib.util.find_spec("cupy") is None:
        return (
            "the CUDA engine needs CuPy, which is not installed: pip install 'cupy-resnet[cuda12]' (or cuda13), "
            "or use engine='numpy'"
        )
    try:
        import cupy
    except Exception as error:  # a broken installation can raise anything
        return f"the CUDA engine needs CuPy, which cannot be imported ({_first_line(error)}); reinstall it"
    try:
        count: Any = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return (
            f"the CUDA engine needs an NVIDIA GPU and its driver, and CuPy finds none that it can use "
            f"({_first_line(error)}); install or update the driver, or use engine='numpy'"
        )
    if count < 1:
        return "the CUDA engine needs an NVIDIA GPU, and CuPy finds none; check CUDA_VISIBLE_DEVICES and nvidia-smi"
    return None


def precision_obstacle(precision: str, device: Device) -> str | None:
    """Returns None where `device` has tensor cores for a precision (or needs none), else a sentence that says so."""
    major, minor = MIN_COMPUTE_CAPABILITY.get(precision, (0, 0))
    if device.compute_capability >= (major, minor):
        return None
    possible = ["fp32", *(name for name, least in MIN_COMPUTE_CAPABILITY.items() if device.compute_capability >= least)]
    return (
        f"precision {precision} needs a GPU of compute capability {major}.{minor} or newer, and {device.name} has "
        f"{device.number}; it can run in {' and '.join(possible)}"
    )


def resolve_precision(precision: str, device: Device, kernel: str = "auto") -> str:
    """Returns the arithmetic that a name, ``"auto"`` or itself, stands for on a GPU with a demanded kernel."""
    if precision != "auto":
        return precision
    possible = PRECISIONS if kernel == "auto" else VARIANTS[kernel].precisions
    usable = (name for name in PREFERRED if name in possible and not precision_obstacle(name, device))
    return next(usable, "fp32")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
