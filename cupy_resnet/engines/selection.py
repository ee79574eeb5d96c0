"""Turns ``engine="auto" | "cuda" | "numpy"`` into an engine, or into one clear sentence why there is none."""

import logging

from .. import environment
from .._names import unknown_name
from ..conv2d import PRECISIONS, check_kernel
from ..errors import EngineUnavailableError
from .base import Ops
from .cuda_engine import CudaEngine, cuda_obstacle, describe_device, find_device, resolve_precision

logger = logging.getLogger(__name__)


def make_engine(
    engine: str = "auto",
    *,
    kernel: str = "auto",
    strict: bool = False,
    device: int | None = None,
    precision: str = "fp32",
) -> Ops:
    """Returns an engine.

    Args:
        engine: ``"cuda"``, ``"numpy"``, or ``"auto"``: what ``CUPY_RESNET_ENGINE`` says, else CUDA where a GPU can
            be used, else NumPy.
        kernel: the convolution kernel to use wherever it applies, or ``"auto"``; only for the CUDA engine.
        strict: whether a convolution that `kernel` does not support is an error rather than a fallback.
        device: index of the GPU, by default CuPy's current one; only for the CUDA engine.
        precision: a key of `conv2d.precision.PRECISIONS`, or ``"auto"``: fp16 on a GPU with tensor cores, unless
            `kernel` cannot; otherwise fp32, or fp32-tc for a kernel that knows nothing else. The NumPy engine computes
            in fp32.

    Raises:
        EngineUnavailableError: the CUDA engine was asked for and cannot run here, or not in this precision.
        ValueError: an unknown engine, kernel or precision, or arguments of the CUDA engine for the NumPy engine.
    """
    if engine not in environment.ENGINES:
        raise ValueError(unknown_name("engine", engine, environment.ENGINES))
    if precision not in ("auto", *PRECISIONS):
        raise ValueError(unknown_name("precision", precision, ("auto", *PRECISIONS)))
    check_kernel(kernel)
    wanted = environment.engine() if engine == "auto" else engine
    obstacle = None if wanted == "numpy" else cuda_obstacle()
    if wanted == "cuda" and obstacle:
        raise EngineUnavailableError(obstacle)
    if wanted == "numpy" or obstacle:
        given = {
            "kernel": kernel != "auto",
            "strict": strict,
            "device": device is not None,
            f"precision={precision!r}": precision not in ("auto", "fp32"),
        }
        useless = [name for name, present in given.items() if present]
        if useless:
            why = f" (chosen because: {obstacle})" if obstacle else ""
            raise ValueError(f"{', '.join(useless)} applies to the CUDA engine, but this is the NumPy engine{why}")
        from .numpy_engine import NumpyEngine

        return NumpyEngine()
    if precision == "auto":
        precision = resolve_precision(precision, describe_device(find_device(device)), kernel)
    # A classifier pools over the image, so that how far a NaN spreads before that does not matter.
    return CudaEngine(device, precision=precision, kernel=kernel, strict=strict, spread_nan=True)
