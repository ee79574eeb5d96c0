"""A small folder of kernels for the jit's tests, so that they do not depend on the real ones."""

from pathlib import Path

import pytest

from cupy_resnet.jit import sources

SCALE = """\
// scale: multiplies by FACTOR.
// @solves y = FACTOR * x
// @arch sm_70
#include "scale.cuh"

extern "C" __global__ void scale(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = scaled(x[i]);
}
"""
SCALE_HEADER = """\
#include "inner/factor.cuh"
__device__ __forceinline__ float scaled(float x) { return factor() * x; }
"""
FACTOR_HEADER = """\
#ifndef FACTOR
#define FACTOR 2
#endif
__device__ __forceinline__ float factor() { return FACTOR; }
"""
WMMA = """\
// @solves one 16x16x16 tensor core product
// @arch sm_70
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda::wmma;

extern "C" __global__ void wmma_tile(const half* a, const half* b, float* c) {
    fragment<matrix_a, 16, 16, 16, half, row_major> a_fragment;
    fragment<matrix_b, 16, 16, 16, half, col_major> b_fragment;
    fragment<accumulator, 16, 16, 16, float> sum;
    fill_fragment(sum, 0.0f);
    load_matrix_sync(a_fragment, a, 16);
    load_matrix_sync(b_fragment, b, 16);
    mma_sync(sum, a_fragment, b_fragment, sum);
    store_matrix_sync(c, sum, 16, mem_row_major);
}
"""
HOPPER = """\
// @solves nothing: it moves registers between warps, which only sm_90a can
// @arch sm_90a
extern "C" __global__ void __launch_bounds__(128) hopper(int* y) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    asm volatile("wgmma.fence.sync.aligned;");
    y[threadIdx.x] = 1;
}
"""
KERNELS = {
    "scale.cu": SCALE,
    "wmma_tile.cu": WMMA,
    "hopper.cu": HOPPER,
    "include/scale.cuh": SCALE_HEADER,
    "include/inner/factor.cuh": FACTOR_HEADER,
}


def write_kernels(root: Path, files: dict[str, str] = KERNELS) -> Path:
    """Writes files below `root` and returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def use_kernels(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Makes the jit look for kernels in `root`."""
    monkeypatch.setattr(sources, "folder", lambda name: root)
