"""The CUDA engine: this project's kernels, on CuPy arrays. Imports CuPy only when an engine is made."""

from typing import Any

from .._names import unknown_name
from ..conv2d import PRECISIONS, check_kernel
from ..errors import EngineUnavailableError
from .cuda.convolution import Convolutions
from .cuda.device import (
    PREFERRED,
    cuda_obstacle,
    describe_device,
    find_device,
    precision_obstacle,
    resolve_precision,
)
from .cuda.forms import SPECIALISATIONS
from .cuda.pointwise import Pointwise
from .cuda.pooling import POOL2D_DTYPE, POOL2D_FIELDS, Pooling

__all__ = [
    "POOL2D_DTYPE",
    "POOL2D_FIELDS",
    "PREFERRED",
    "SPECIALISATIONS",
    "CudaEngine",
    "cuda_obstacle",
    "describe_device",
    "find_device",
    "precision_obstacle",
    "resolve_precision",
]


class CudaEngine(Convolutions, Pointwise, Pooling):
    """The operations of `base.Ops` on CuPy arrays.

    Every operation runs on the device of its input and on that device's current stream, whatever the current device
    is, and returns at once; errors of the GPU surface at the next synchronisation.

    Args:
        device: number of the GPU that `asarray`, `upload` and `filter` put arrays on; the current one by default.
        precision: how activations are stored and convolutions multiply, a key of `conv2d.precision.PRECISIONS`.
        kernel: ``"auto"`` or the name of a convolution kernel, used wherever it applies.
        strict: raise `UnsupportedProblemError` where it does not apply, instead of falling back.
        spread_nan: whether ``"auto"`` may choose kernels that let a NaN reach further than it should; see
            `conv2d.choose`.

    Raises:
        EngineUnavailableError: CuPy is not installed, there is no GPU or driver, or the GPU has no tensor cores for
            `precision`.
        ValueError: unknown kernel or precision.
    """

    name = "cuda"

    def __init__(
        self,
        device: int | None = None,
        *,
        precision: str = "fp32",
        kernel: str = "auto",
        strict: bool = False,
        spread_nan: bool = False,
    ) -> None:
        check_kernel(kernel)
        if precision not in PRECISIONS:
            raise ValueError(unknown_name("precision", precision, PRECISIONS))
        obstacle = cuda_obstacle()
        if obstacle:
            raise EngineUnavailableError(obstacle)
        import cupy

        device = find_device(device)
        obstacle = precision_obstacle(precision, describe_device(device))
        if obstacle:
            raise EngineUnavailableError(obstacle)
        self._cupy: Any = cupy
        self._normalizations = {}
        self.device = device
        self.precision = precision
        self.arithmetic = PRECISIONS[precision]
        self.kernel = kernel
        self.strict = strict
        self.spread_nan = spread_nan

    def __repr__(self) -> str:
        return (
            f"CudaEngine(device={self.device}, precision={self.precision!r}, kernel={self.kernel!r}, "
            f"strict={self.strict})"
        )

    def close(self) -> None:
        """Returns CuPy's cached memory to the GPU: once a model's weights are dropped, nothing of it stays."""
        with self._cupy.cuda.Device(self.device):
            self._cupy.get_default_memory_pool().free_all_blocks()
