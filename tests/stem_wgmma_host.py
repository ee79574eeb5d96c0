"""A stem on Hopper as a library of the host: its own text; C++ plays threads, barriers, shuffles and tensor cores.

This is conv2d_stem_wgmma.cu or conv2d_stem_wgmma_tf32.cu.

A block runs with all its threads, in turns at random. Instructions on warps and warpgroups exchange their operands as
the PTX ISA tells. Products are computed as soon as they are asked for, so that an operand that is not there yet gives a
wrong result, or no sooner than they are waited for, so that one that is overwritten too early does: by turns. Shared
memory and the output begin as NaN.
"""

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stem_wgmma_machine import HOST, MAIN
from wgmma_host import Defines, HostSource, Program, plain_operand, split_tf32

from cupy_resnet.conv2d.stem import pooled_shape, stem_params
from cupy_resnet.conv2d.stem_wgmma import FILTERS
from cupy_resnet.jit.sources import find_kernel

PTX = {
    "max.NaN.f32": "result = larger(a, b);",
    "ldmatrix": ";",  # of other kernels
    "stmatrix": "store_matrices(address, words);",
    "bar.sync": "warpgroup_sync();",
    "setmaxnreg": ";",
    '""': ";",
}
"""What an instruction of a kernel's own files becomes."""

PLAYED = ("dependent_launch.cuh", "element.cuh", "tensor_memory.cuh")
"""Files whose functions C++ plays."""


def host_source(kernel: str = "conv2d_stem_wgmma") -> HostSource:
    """The library's text."""
    path = find_kernel(kernel).path

    def included(found: re.Match[str]) -> str:
        if found[1] in ("warpgroup.cuh", "warpgroup_registers.cuh"):
            return plain_operand()
        if found[1] == "tensor_core.cuh":
            return split_tf32()
        if found[1] in PLAYED:
            return ""
        text = (path.parent / "include" / found[1]).read_text("utf-8")
        return re.sub(r"#include .*|#pragma once", "", text)

    def replaced(statement: re.Match[str]) -> str:
        return next(code for name, code in PTX.items() if name in statement[0])

    text = re.sub(r'#include "(.+?)"', included, path.read_text(encoding="utf-8"))
    text = re.sub(r"asm(?: volatile)?\(.*?\);", replaced, text, flags=re.DOTALL)
    text = re.sub(r"extern __shared__.*;", "", text).replace("__shared__", "static")
    return HostSource(HOST, text, kernel, MAIN)


def build(compiler: str, folder: Path, text: str, name: str, defines: Defines) -> Program:
    """Compiles the library."""
    (folder / f"{name}.cpp").write_text(text, encoding="utf-8")
    options = [
        "-std=c++20",
        "-O2",
        "-w",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        *(f"-D{key}={value}" for key, value in defines.items()),
    ]
    subprocess.run([compiler, *options, f"{name}.cpp", "-o", f"{name}.so"], cwd=folder, check=True)
    return Program(folder / f"{name}.so")


@dataclass
class Result:
    """(N, PP, PQ, K) outputs as bits, how often each 8 bytes were written, and what went wrong, if anything.

    Args:
        fetched: bytes that the accelerator has brought.
    """

    y: np.ndarray
    writes: np.ndarray
    error: str | None
    fetched: int


def run(
    library: Program,
    x: np.ndarray,
    cells: np.ndarray,
    bias: np.ndarray,
    *,
    stripe_rows: int,
    grid: int,
    normalization: tuple[np.ndarray, np.ndarray] | None = None,
    seed: int = 0,
) -> Result:
    """Runs all blocks, one after the other.

    Args:
        library: from `build`.
        x: (N, H, W, C) pixels of any strides.
        cells: the filter as the kernel wants it, as bits of 2 bytes, or float32.
        bias: (K,) float32.
        stripe_rows: pooled rows of a unit.
        grid: blocks per 64 filters.
        normalization: mean and std, (C,) float32 each.
        seed: of the order in which threads go on.
    """
    host = ctypes.CDLL(str(library.path))
    run_block: Any = host.run_block
    run_block.restype = ctypes.c_char_p
    K = len(bias)
    params = stem_params(x.shape, tuple(stride // x.itemsize for stride in x.strides), K)
    size = cells.itemsize
    y = np.full(pooled_shape(x.shape, K), 2 ** (8 * size) - 1, f"u{size}")
    writes = np.zeros(y.nbytes // 8, np.uint8)
    mean, std = (
        (None, None) if normalization is None else (array.ctypes.data_as(ctypes.c_void_p) for array in normalization)
    )
    pointer = ctypes.c_void_p
    for group in range(K // FILTERS):
        for block in range(grid):
            error = run_block(
                *(library.kernel_number, seed + block, grid, block, group),
                *(array.ctypes.data_as(pointer) for array in (x, cells, bias)),
                *(mean, std),
                *(array.ctypes.data_as(pointer) for array in (y, writes)),
                *(ctypes.c_longlong(array.nbytes) for array in (y, cells)),
                params.ctypes.data_as(pointer),
                stripe_rows,
            )
            if error is not None:
                return Result(y, writes.reshape(*y.shape[:3], -1), error.decode(), host.count_bytes_fetched())
    return Result(y, writes.reshape(*y.shape[:3], -1), None, host.count_bytes_fetched())


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """−1, 0 and 1, as float32."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


def expected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The pooled map by torch, for (N, H, W, C) values; the padding is multiplied too."""
    pixels, filters = (torch.tensor(np.ascontiguousarray(a)).permute(0, 3, 1, 2) for a in (x, weight))
    y = torch.nn.functional.conv2d(torch.nn.functional.pad(pixels, (3, 3, 3, 3)), filters, torch.tensor(bias), 2)
    return torch.nn.functional.max_pool2d(torch.relu(y), 3, 2, 1).permute(0, 2, 3, 1).numpy()
