"""What this machine can do at best: bytes copied and matrix products per second. Measured, not taken from a leaflet.

Measured once and kept in the cache folder, under ``ceilings``, by the device's name and its driver's version.
"""

import datetime
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import environment
from ..weights_store.writing import write_file
from .clock import Clock, CudaClock, ProcessorClock
from .machine import describe_machine
from .matrix_products import Product, gpu_products, normal_matrix

logger = logging.getLogger(__name__)

REPEATS = 20
"""Times that each ceiling is tried; the fastest counts, since nothing slows a device down but something else."""

GPU_MATRIX, PROCESSOR_MATRIX = 8192, 1024
"""Rows and columns of the matrices that are multiplied."""

GPU_COPY_BYTES, PROCESSOR_COPY_BYTES = 2**30, 2**28
"""Bytes that are copied: far more than any cache holds."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The fastest that a device was seen to copy and to multiply.

    Args:
        device: its name.
        driver: what else the figures depend on: the GPU's driver, or the processor's NumPy and its threads.
        copy_bytes_per_s: bytes read plus bytes written per second by a large copy within the device's memory.
        matmul_flops_per_s: precision (``"float32"``, ``"tf32"``, ``"float16"``, ``"bfloat16"``) to operations per
            second of a large product of normally distributed matrices, a multiply-add counted as two; what could not
            be measured is absent.
        method: ``"copy"`` and each precision to how it was measured.
        date: when, ISO 8601.
    """

    device: str
    driver: str
    copy_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]
    method: dict[str, str]
    date: str

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can store; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Ceilings":
        """Reads what `to_dict` returned.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = cls(**stored)
            rates = [found.copy_bytes_per_s, *found.matmul_flops_per_s.values()]
            good = all(isinstance(rate, float) and rate > 0 for rate in rates) and isinstance(found.method, dict)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"these are no ceilings: {error}") from error
        if not good:
            raise ValueError(f"these are no ceilings: rates must be positive numbers, got {rates}")
        return found


def ceilings(device: int | None = None, *, refresh: bool = False) -> Ceilings:
    """Returns the ceilings of a device: those kept in the cache folder, else measured now, which takes seconds.

    Args:
        device: index of a GPU, or None for the processor.
        refresh: measure again, whatever is kept: after a cooler was cleaned, or a busy machine was measured.
    """
    name, driver = _processor() if device is None else _gpu(device)
    path = _path(name, driver)
    if not refresh and (kept := _read(path, name, driver)) is not None:
        return kept
    measured = measure_processor() if device is None else measure_gpu(device)
    if path.is_absolute():  # else the system knows no folder for caches
        try:
            write_file(path, json.dumps(measured.to_dict(), indent=1).encode())
        except OSError as error:
            logger.warning("the measured ceilings cannot be kept in %s: %s", path.parent, error)
    return measured


def _path(name: str, driver: str) -> Path:
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name} {driver}").strip("-")
    return environment.cache_dir() / "ceilings" / f"{slug}.json"


def _read(path: Path, name: str, driver: str) -> Ceilings | None:
    try:
        kept = Ceilings.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is damaged and is measured anew: %s", path, error)
        return None
    return kept if (kept.device, kept.driver) == (name, driver) else None


# Measuring ------------------------------------------------------------------------------------------------------------


def measure_processor(
    clock: Clock | None = None, *, matrix: int = PROCESSOR_MATRIX, copy_bytes: int = PROCESSOR_COPY_BYTES
) -> Ceilings:
    """Measures the processor: a NumPy copy, and a float32 product by NumPy's BLAS.

    Args:
        clock: by default the processor's own.
        matrix: rows and columns of the matrices.
        copy_bytes: size of the copy.
    """
    x, y = np.ones(copy_bytes, np.uint8), np.empty(copy_bytes, np.uint8)
    a, b = (normal_matrix(matrix, seed) for seed in (0, 1))
    out = np.empty_like(a)
    products = [Product("float32", "numpy.matmul", lambda: lambda: np.matmul(a, b, out=out))]
    copy = ("numpy.copyto", lambda: np.copyto(y, x))
    return _measure(clock or ProcessorClock(), *_processor(), copy, copy_bytes, products, matrix)


def measure_gpu(
    device: int, clock: Clock | None = None, *, matrix: int = GPU_MATRIX, copy_bytes: int = GPU_COPY_BYTES
) -> Ceilings:
    """Measures a GPU: a copy within its memory, and products by cuBLAS in each precision it has.

    The products are those of `matrix_products.gpu_products`; `Ceilings.method` says whose they are.

    Args:
        device: index of the GPU.
        clock: by default the GPU's own.
        matrix: rows and columns of the matrices.
        copy_bytes: size of the copy; less where the GPU's memory is small.
    """
    import cupy

    with cupy.cuda.Device(device):
        size = min(copy_bytes, cupy.cuda.runtime.memGetInfo()[0] // 8)
        x, y = cupy.zeros(size, cupy.uint8), cupy.empty(size, cupy.uint8)
        copy = ("cudaMemcpyAsync within the device", lambda: y.data.copy_from_device_async(x.data, size))
        products = gpu_products(device, matrix)
        return _measure(clock or CudaClock(device), *_gpu(device), copy, size, products, matrix)


def _measure(
    clock: Clock,
    name: str,
    driver: str,
    copy: tuple[str, Callable[[], Any]],
    copy_bytes: int,
    products: Sequence[Product],
    matrix: int,
) -> Ceilings:
    method = {"copy": f"{copy[0]}, {copy_bytes / 2**20:.0f} MiB, read plus written"}
    bytes_per_s = 2 * copy_bytes / _best(clock, copy[1])
    rates = {}
    for product in products:
        rates[product.precision] = 2 * matrix**3 / _best(clock, product.prepare())
        method[product.precision] = f"{product.library}, {matrix}×{matrix}×{matrix}"
    today = datetime.date.today().isoformat()
    return Ceilings(
        device=name,
        driver=driver,
        copy_bytes_per_s=bytes_per_s,
        matmul_flops_per_s=rates,
        method=method,
        date=today,
    )


def _best(clock: Clock, call: Callable[[], Any]) -> float:
    """Seconds of the fastest of `REPEATS` calls, after one that does not count."""
    call()
    return min(clock.alone(call)[1] for _ in range(REPEATS))


# Names ----------------------------------------------------------------------------------------------------------------

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that change how many threads NumPy's BLAS takes."""


def _gpu(device: int) -> tuple[str, str]:
    """A GPU's name, and its driver's version."""
    from ..engines.cuda_engine import describe_device

    machine = describe_machine(engine="cuda")
    return describe_device(device).name, f"driver {machine['driver']}, CUDA {machine['driver_cuda']}"


def _processor() -> tuple[str, str]:
    """The processor's name; NumPy's version, the processors that may be used and the thread limits that are set."""
    machine = describe_machine(engine="numpy")
    limits = [f"{key}={os.environ[key]}" for key in THREAD_LIMITS if os.environ.get(key)]
    facts = [f"NumPy {np.__version__}", f"{machine['processors']} processors", *limits]
    return str(machine["processor"]), ", ".join(facts)
