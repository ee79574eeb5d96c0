"""conv2d_wgmma_3xtf32.cu as a program of the host: its own text; C++ plays barriers, accelerator and tensor cores.

A block runs with all threads of its consumers, its producer, and who carries for each consumer, as `wgmma_machine`
tells.
"""

import re
from typing import Any

import numpy as np
from wgmma_host import IM2COL, HostSource, Program, headers, kernel_text, place, run_blocks, split_tf32, staged_pair
from wgmma_machine import BLOCK, MACHINE

from cupy_resnet.conv2d import Conv2dProblem

HOST = r"""
enum { PIXELS, FILTERS, RESIDUALS, OUTPUTS };
template <int N>
void warpgroup_mma_tf32(float (&sums)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    issue(N, sums, a, 0, b, accumulate);
}
template <typename Element> float2 load_pair(const float* source) { return {source[0], source[1]}; }
template <typename Element> void store_pair(float* place, float x, float y) { place[0] = x, place[1] = y; }
void fetch_im2col(unsigned, const TensorMap&, unsigned, int, int, int, int, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
void store_box(const TensorMap& map, unsigned place, int column, int row) {
    if (map.id != OUTPUTS) fail("this is no output");
    store(place, column, row);
}
void written_for_storing() {}
void store_commit() {}
void store_wait() { wait_for_stores(); }
void prefetch_box(const TensorMap& map, int, int) { if (map.id != RESIDUALS) fail("this is no residual"); }
"""

MAIN = r"""
Conv2dParams params;
int with_bias, with_residual, in_place;
std::vector<float> x, parts, bias, residual, y;

void fetch_im2col(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n, int s, int r) {
    if (map.id != PIXELS || place % 1024) fail("no place for pixels");
    fetch(place, im2col_rows(params, x, TILE_M, c, w, h, n, s, r), barrier);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int first) {
    if (place % 1024) fail("no place for a box");
    if (map.id == FILTERS) {
        fetch(place, filter_rows(parts, TILE_N, first, 2 * params.K, params.gemm_k, column), barrier);
        return;
    }
    if (map.id != RESIDUALS || !with_residual) fail("this is no box");
    std::vector<float> rows(CONSUMER_M * 32);
    for (int i = 0; i < CONSUMER_M * 32; ++i) {
        const int m = first + i / 32, k = column + i % 32;
        if (m < params.gemm_m && k < params.K) rows[i] = (in_place ? y : residual)[long(m) * params.K + k];
    }
    fetch(place, std::move(rows), barrier);
}
void carry_out(const Store& store) {
    for (int i = 0; i < CONSUMER_M * 32; ++i) {
        const int m = store.row + i / 32, k = store.column + i % 32;
        if (m < params.gemm_m && k < params.K) y[long(m) * params.K + k] = at(store.place + i * 4);
    }
}
void call_kernel() {
    KERNEL({PIXELS}, {FILTERS}, {RESIDUALS}, {OUTPUTS}, with_bias ? bias.data() : nullptr,
           in_place ? y.data() : with_residual ? residual.data() : nullptr, y.data(), params);
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[5];
    if (fread(head, 4, 5, stdin) != 5 || fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), gridDim.x = head[1], with_bias = head[2], with_residual = head[3], in_place = head[4];
    const long outputs = long(params.gemm_m) * params.K;
    read(x, long(params.N) * params.H * params.W * params.C), read(parts, 2l * params.K * params.gemm_k);
    read(bias, params.K), read(residual, outputs);
    y = residual;
    if (!in_place) for (float& value : y) value = NAN;
    std::vector<int> threads{0, 32, 64};
    for (int thread = 128; thread < 384; ++thread) threads.push_back(thread);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) block(threads);
    fwrite(y.data(), 4, outputs, stdout);
}
"""


def host_source() -> HostSource:
    """The program's text."""
    text = kernel_text("conv2d_wgmma_3xtf32", {})
    text = re.sub(r'asm volatile\("setmaxnreg.*?\);', "", text)
    text = re.sub(r'asm volatile\("mov.u32 %0, %%tid.x;.*?\);', "thread = threadIdx.x;", text)
    text = re.sub(r'asm volatile\("mov.u32 %0, %%nctaid.x;.*?\);', "blocks = gridDim.x;", text)
    before = "\n".join([MACHINE, HOST, headers("conv2d_params.cuh"), place(), staged_pair(), split_tf32()])
    return HostSource(before, text, "conv2d_wgmma_3xtf32", f"{IM2COL}\n{BLOCK}\n{MAIN}")


def run(program: Program, problem: Conv2dProblem, arrays: dict[str, np.ndarray], **options: Any) -> np.ndarray | str:
    """Runs a launch on x, parts (2, K, R, S, C), bias and residual, with the options of `run_blocks`."""
    read = {name: arrays[name] for name in ("x", "parts", "bias", "residual")}
    return run_blocks(program, problem, read, **options)
