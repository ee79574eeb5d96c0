"""conv2d_wgmma_patch.cu in TF32 as a program of the host: its own text, all threads, with data (see `wgmma_machine`).

What its barriers are for is told by `wgmma_patch_host`; here the result counts, and what is stored by which thread.
"""

import re
from dataclasses import astuple
from typing import Any

import numpy as np
from wgmma_host import READ, HostSource, Program, headers, kernel_text, place, run_blocks
from wgmma_machine import BLOCK, MACHINE

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.wgmma_patch import PatchTile

HOST = r"""
#define WARPGROUP_MMA_OF_ALL(...)
using std::min;
struct alignas(16) Chunk { unsigned words[4]; };
struct alignas(16) float4 { float x, y, z, w; };
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
enum { PIXELS_OF_X, FILTER, RESIDUAL, OUTPUT };

template <typename Element, int N>
void warpgroup_mma(float (&sums)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    issue(N, sums, nullptr, a, b, accumulate);
}
// What lanes of a warp trade: two places, of which one may still be read while the other is written.
struct Trade { long count; int arrived; float values[2][32]; } trades[16];
float __shfl_sync(unsigned mask, float value, int from) {
    Trade& trade = trades[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    if (mask != ~0u) fail("some lanes are left out");
    const long number = trade.count;
    trade.values[number % 2][lane] = value;
    if (++trade.arrived == 32) {
        trade.arrived = 0, ++trade.count;
    } else {
        self().count = &trade.count, self().seen = number;
        rest();
        self().count = nullptr;
    }
    return trade.values[number % 2][from];
}
void __syncwarp() { __shfl_sync(~0u, 0.0f, 0); }
void store_chunk(void* place, const Chunk& chunk) { memcpy(place, &chunk, 16); }
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int, int, int);
void prefetch_box(const TensorMap&, int, int, int, int);
void written_for_storing() {}
// A tile of 2-byte elements goes by way of shared memory.
[[noreturn]] void staged() { fail("no tile is staged"); }
template <int = 0> void store_wait() { staged(); }
void store_box(const TensorMap&, unsigned, int, int, int, int) { staged(); }
void store_commit() { staged(); }
void warpgroup_sync(int) { staged(); }
unsigned floor_word(int, float) { staged(); }
template <typename Element, bool ADD, int COUNT>
void finish_matrices_of_rows(unsigned (&)[COUNT], const float*, float2, unsigned) { staged(); }
"""

MAIN = r"""
PatchTile shape;
Conv2dParams params;
int with_bias, with_residual, in_place;
std::vector<float> x, weight, bias, residual, y;
std::vector<int> prefetched;  // how often, of every residual

void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int first) {
    if (map.id != FILTER || place % 1024) fail("no place for filters");
    std::vector<float> rows(64 * 32);
    for (int i = 0; i < 64 * 32; ++i) {
        if (first + i / 32 < params.K) rows[i] = weight[long(first + i / 32) * params.gemm_k + column + i % 32];
    }
    fetch(place, std::move(rows), barrier);
}
// Calls f with the offset of every element of a box in an array of C channels, -1 outside of it.
template <typename F>
void box_of(int c, int w, int h, int n, int images, int height, int C, F f) {
    for (int i = 0; i < images * height * shape.columns; ++i) {
        const int image = n + i / (height * shape.columns);
        const int row = h + i / shape.columns % height, q = w + i % shape.columns;
        const bool inside = image < params.N && row >= 0 && row < params.H && q >= 0 && q < params.W;
        for (int channel = c; channel < c + 32; ++channel) {
            f(inside && channel < C ? ((long(image) * params.H + row) * params.W + q) * C + channel : -1);
        }
    }
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n) {
    if (map.id != PIXELS_OF_X || place % 1024) fail("no place for pixels");
    std::vector<float> rows;
    box_of(c, w, h, n, shape.images, shape.patch_rows, params.C, [&](long at) { rows.push_back(at < 0 ? 0 : x[at]); });
    fetch(place, std::move(rows), barrier);
}
void prefetch_box(const TensorMap& map, int c, int w, int h, int n) {
    if (map.id != RESIDUAL) fail("this is no residual");
    const int height = shape.images == 1 ? shape.rows : shape.patch_rows;
    box_of(c, w, h, n, shape.images, height, params.K, [&](long at) { if (at >= 0) ++prefetched[at]; });
}
void carry_out(const Store&) { staged(); }
void call_kernel() {
    KERNEL({PIXELS_OF_X}, {FILTER}, {RESIDUAL}, {OUTPUT}, with_bias ? bias.data() : nullptr,
           in_place ? y.data() : with_residual ? residual.data() : nullptr, y.data(), shape, params);
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[5];
    if (fread(head, 4, 5, stdin) != 5 || fread(&shape, sizeof shape, 1, stdin) != 1) return 2;
    if (fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), gridDim.x = head[1], with_bias = head[2], with_residual = head[3], in_place = head[4];
    const long outputs = long(params.gemm_m) * params.K;
    read(x, long(params.N) * params.H * params.W * params.C), read(weight, long(params.K) * params.gemm_k);
    read(bias, params.K), read(residual, outputs);
    y = residual, prefetched.resize(outputs);
    if (!in_place) for (float& value : y) value = NAN;
    std::vector<int> threads;
    for (int thread = 0; thread < THREADS; ++thread) threads.push_back(thread);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) block(threads);
    for (int times : prefetched) if (times != with_residual) fail("not every residual is brought to L2 once");
    fwrite(y.data(), 4, outputs, stdout);
}
"""


def host_source() -> HostSource:
    """The program's text."""
    names = "patch_tile.cuh", "transposed_matrices.cuh", "turns.cuh"
    text = kernel_text("conv2d_wgmma_patch", {name: headers(name) for name in names})
    text = re.sub(r"asm volatile\(.*?\);", "", text, flags=re.DOTALL)  # setmaxnreg, and what stages tiles
    before = "\n".join([MACHINE, HOST, headers("conv2d_params.cuh"), place()])
    return HostSource(before, text, "conv2d_wgmma_patch", f"{READ}\n{BLOCK}\n{MAIN}")


def run(
    program: Program, problem: Conv2dProblem, tile: PatchTile, arrays: dict[str, np.ndarray], **options: Any
) -> np.ndarray | str:
    """Runs a launch on x, weight, bias and residual, a tile of the form's pixels, with the options of `run_blocks`."""
    read = {name: arrays[name] for name in ("x", "weight", "bias", "residual")}
    return run_blocks(program, problem, read, *astuple(tile), **options)
