"""Large matrix products on a GPU, by whatever library is there: what the compute ceilings are measured with.

cuBLAS is no requirement of this package. It is taken from CuPy where CuPy finds it, else from torch, whose wheels may
bring one of another CUDA version; where neither has it, this package's own convolution stands in.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT = 68, 77, -1
"""Of cuBLAS's public header. The sums are float32 in every precision."""


@dataclass(frozen=True)
class Product:
    """A way to multiply two square matrices.

    Args:
        precision: of the operands: ``"float32"``, ``"tf32"``, ``"float16"`` or ``"bfloat16"``.
        library: whose product it is.
        prepare: puts the operands, `normal_matrix` 0 and 1, in place and returns the call to be timed, so that only one
            product's operands are in memory at a time. The call returns the product, as the library has it.
    """

    precision: str
    library: str
    prepare: Callable[[], Callable[[], Any]]


def gpu_products(device: int, size: int) -> list[Product]:
    """Returns the products of size × size matrices that can be computed on a GPU, by one library.

    Args:
        device: index of the GPU, which is the current one.
        size: rows and columns.
    """
    for source in (_cublas, _torch):
        try:
            return source(device, size)
        except ImportError as error:
            logger.info("no matrix products by %s: %s", source.__name__.strip("_"), error)
    return [own_product(_cuda_engine(device), size)]


def normal_matrix(size: int, seed: int) -> np.ndarray:
    """Returns a size × size float32 matrix of normal deviates, a million different ones: zeros take less power."""
    return np.resize(np.random.default_rng(seed).standard_normal(2**20, np.float32), (size, size))


def own_product(ops: Any, size: int) -> Product:
    """The product as a 1×1 convolution on an engine of this package: a ceiling that a better kernel would lift.

    The call returns (1, size, 1, size).
    """

    def prepare() -> Callable[[], Any]:
        x = ops.asarray(normal_matrix(size, 0).reshape(1, size, 1, size))
        weight = ops.filter(np.ascontiguousarray(normal_matrix(size, 1).T).reshape(size, 1, 1, size))
        return partial(ops.conv2d, x, weight)

    return Product("float32", "this package's own conv2d, since neither CuPy nor torch has cuBLAS", prepare)


def _cublas(device: int, size: int) -> list[Product]:
    """CuBLAS through CuPy; ImportError where CuPy finds none."""
    import cupy

    cublas, runtime = cupy.cuda.cublas, cupy.cuda.runtime
    handle = cupy.cuda.device.get_cublas_handle()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def prepare(convert: Callable[[np.ndarray], np.ndarray], dtype: int, compute: int) -> Callable[[], Any]:
        a, b = (cupy.asarray(convert(normal_matrix(size, seed))) for seed in (0, 1))
        c = cupy.empty_like(a)

        def call() -> Any:
            # cuBLAS counts along columns: read as rows, this is c = a · b.
            cublas.gemmEx(
                *(handle, 0, 0, size, size, size, one.ctypes.data, b.data.ptr, dtype, size, a.data.ptr, dtype, size),
                *(zero.ctypes.data, c.data.ptr, dtype, size, compute, CUBLAS_GEMM_DEFAULT),
            )
            return c

        return call

    forms = {
        "float32": partial(prepare, np.asarray, runtime.CUDA_R_32F, CUBLAS_COMPUTE_32F),
        "tf32": partial(prepare, np.asarray, runtime.CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32),
        "float16": partial(prepare, _float16, runtime.CUDA_R_16F, CUBLAS_COMPUTE_32F),
        "bfloat16": partial(prepare, _bfloat16_bits, runtime.CUDA_R_16BF, CUBLAS_COMPUTE_32F),
    }
    library = f"cublasGemmEx {cublas.getVersion(handle)} through CuPy"
    return [Product(precision, library, forms[precision]) for precision in _precisions(device)]


def _float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16)


def _bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """NumPy has no bfloat16: its bits are the upper half of a float32's."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _torch(device: int, size: int) -> list[Product]:
    """Torch's matrix product; ImportError where torch cannot use this GPU."""
    import cupy
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch is installed without CUDA")

    def prepare(dtype: Any, tf32: bool) -> Callable[[], Any]:
        a, b = (torch.from_numpy(normal_matrix(size, seed)).to(f"cuda:{device}", dtype) for seed in (0, 1))
        torch.cuda.synchronize(device)

        def call() -> Any:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = tf32
            try:
                # On CuPy's stream, where the clock's events are.
                stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr, device=device)
                with torch.cuda.stream(stream):
                    return torch.matmul(a, b)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = before

        return call

    forms = {
        "float32": partial(prepare, torch.float32, False),
        "tf32": partial(prepare, torch.float32, True),
        "float16": partial(prepare, torch.float16, False),
        "bfloat16": partial(prepare, torch.bfloat16, False),
    }
    library = f"torch.matmul {torch.__version__}"
    return [Product(precision, library, forms[precision]) for precision in _precisions(device)]


def _precisions(device: int) -> list[str]:
    """What a GPU's matrix products come in, exact to coarse; TF32 and bfloat16 came with sm_80."""
    from ..engines.cuda_engine import describe_device

    recent = describe_device(device).compute_capability >= (8, 0)
    return ["float32", "tf32", "float16", "bfloat16"] if recent else ["float32", "float16"]


def _cuda_engine(device: int) -> Any:
    from ..engines.cuda_engine import CudaEngine

    return CudaEngine(device)
