"""Turns ``engine="auto" | "cuda" | "numpy"`` into an engine, or into one clear sentence why there is none."""

import importlib.util
import logging
from typing import Any

from .. import environment
from .._names import unknown_name
from ..errors import EngineUnavailableError
from .base import Ops

logger = logging.getLogger(__name__)


def make_engine(engine: str = "auto", *, kernel: str = "auto", strict: bool = False, device: int | None = None) -> Ops:
    """Returns an engine.

    Args:
        engine: ``"cuda"``, ``"numpy"``, or ``"auto"``: what ``CUPY_RESNET_ENGINE`` says, else CUDA where a GPU can
            be used, else NumPy.
        kernel: the convolution kernel to use wherever it applies, or ``"auto"``; only for the CUDA engine.
        strict: whether a convolution that `kernel` does not support is an error rather than a fallback.
        device: index of the GPU, by default CuPy's current one; only for the CUDA engine.

    Raises:
        EngineUnavailableError: the CUDA engine was asked for and cannot run here.
        ValueError: an unknown engine or kernel, or arguments of the CUDA engine for the NumPy engine.
    """
    if engine not in environment.ENGINES:
        raise ValueError(unknown_name("engine", engine, environment.ENGINES))
    if kernel != "auto":
        from ..conv2d import variant_names

        if kernel not in variant_names():
            raise ValueError(unknown_name("kernel", kernel, ["auto", *variant_names()]))
    wanted = environment.engine() if engine == "auto" else engine
    obstacle = None if wanted == "numpy" else cuda_obstacle()
    if wanted == "cuda" and obstacle:
        raise EngineUnavailableError(obstacle)
    if wanted == "numpy" or obstacle:
        given = {"kernel": kernel != "auto", "strict": strict, "device": device is not None}
        useless = [name for name, present in given.items() if present]
        if useless:
            why = f" (chosen because: {obstacle})" if obstacle else ""
            raise ValueError(f"{', '.join(useless)} applies to the CUDA engine, but this is the NumPy engine{why}")
        from .numpy_engine import NumpyEngine

        return NumpyEngine()
    from .cuda_engine import CudaEngine

    # A classifier pools over the image, so that how far a NaN spreads before that does not matter.
    return CudaEngine(device, kernel=kernel, strict=strict, allow_winograd=True)


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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
