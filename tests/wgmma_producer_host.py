"""conv2d_wgmma.cu's producer as a program of the host, in TF32: what it asks for is multiplied as it comes.

Its own text walks the tiles of all blocks, one after the other. The consumers' part, the barriers and the order of
events are not here: every slice is there at once, and the product of as many as the kernel counts is a tile.
"""

import re

import numpy as np
from wgmma_host import IM2COL, HostSource, place

from cupy_resnet.jit.sources import find_kernel

HOST = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#define __device__
#define __forceinline__ inline
#define WARPGROUP_MMA_OF_ALL(columns, accumulators)
struct Index { int x; } blockIdx, gridDim, threadIdx;
struct TensorMap { int id; };
enum { PIXELS, FILTERS, SHORTCUT_PIXELS, SHORTCUT_FILTERS };
[[noreturn]] void fail(const char* what) { fprintf(stderr, "%s\n", what); _Exit(1); }
unsigned shared_address(const void*) { return 0; }
void barrier_wait(unsigned, int) {}
void barrier_arrive_expecting(unsigned, int bytes);
void fetch_im2col(unsigned, const TensorMap&, unsigned, int, int, int, int, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
void prefetch_box(const TensorMap&, int, int) {}
int slices;  // of a tile, as many as the kernel counts
"""

WALK = r"""
void walk(const Factors& factors, const Factors& shortcut, const Conv2dParams& params, int tiles_n) {
    static Barriers barriers;
    slices = SLICES;
    produce(factors, shortcut, nullptr, barriers, 0, params, tiles_n);
}
"""

MAIN = r"""
Conv2dParams params, alone;  // alone: the shortcut as a convolution of its own
std::vector<float> x, weight, shortcut_x, shortcut_weight, y, pixels, sums;
int taken, turn;  // slices and tiles of this block

int tiles_n() { return (params.K + TILE_N - 1) / TILE_N; }

void barrier_arrive_expecting(unsigned, int bytes) {
    if (bytes != STAGE_BYTES) fail("a slice is expected to be of another size");
}
void fetch_im2col(unsigned place, const TensorMap& map, unsigned, int c, int w, int h, int n, int s, int r) {
    if (map.id % 2 != PIXELS) fail("these are no pixels");
    if (place != (turn * slices + taken) % NUM_STAGES * STAGE_BYTES) fail("this is another stage's place");
    const bool first = map.id == PIXELS;
    if (c < 0 || c + 32 > (first ? params.C : alone.C)) fail("there are no such channels");
    pixels = im2col_rows(first ? params : alone, first ? x : shortcut_x, TILE_M, c, w, h, n, s, r);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned, int column, int first) {
    if (map.id % 2 != FILTERS) fail("these are no filters");
    const int tile = blockIdx.x + turn * gridDim.x, m0 = tile / tiles_n() * TILE_M, n0 = tile % tiles_n() * TILE_N;
    if (first != n0) fail("these are another tile's filters");
    const auto& of = map.id == FILTERS ? weight : shortcut_weight;
    const int depth = map.id == FILTERS ? params.gemm_k : alone.C;
    if (column < 0 || column + 32 > depth) fail("there is no such depth");
    const std::vector<float> filters = filter_rows(of, TILE_N, first, params.K, depth, column);
    if (taken == 0) sums.assign(TILE_M * TILE_N, 0.0f);
    for (int m = 0; m < TILE_M; ++m) {
        for (int k = 0; k < TILE_N; ++k) {
            for (int i = 0; i < 32; ++i) sums[m * TILE_N + k] += pixels[m * 32 + i] * filters[k * 32 + i];
        }
    }
    if (++taken < slices) return;
    for (int m = 0; m < TILE_M && m0 + m < params.gemm_m; ++m) {
        float* const row = &y[long(m0 + m) * params.K + n0];
        for (int k = 0; k < TILE_N && n0 + k < params.K; ++k) row[k] = sums[m * TILE_N + k];
    }
    taken = 0, ++turn;
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[3];
    if (fread(head, 4, 3, stdin) != 3 || fread(&params, sizeof params, 1, stdin) != 1) return 2;
    alone = params;
    alone.C = params.shortcut_channels, alone.H = head[1], alone.W = head[2], alone.pad_h = alone.pad_w = 0;
    alone.stride_h = alone.stride_w = params.shortcut_stride;
    read(x, long(params.N) * params.H * params.W * params.C), read(weight, long(params.K) * params.gemm_k);
    read(shortcut_x, long(params.N) * alone.H * alone.W * alone.C), read(shortcut_weight, long(params.K) * alone.C);
    y.assign(long(params.gemm_m) * params.K, NAN_FLOAT);
    const TensorMap maps[] = {{PIXELS}, {FILTERS}, {SHORTCUT_PIXELS}, {SHORTCUT_FILTERS}};
    gridDim.x = head[0];
    for (blockIdx.x = 0; blockIdx.x < head[0]; ++blockIdx.x) {
        taken = turn = 0;
        KERNEL({maps[0], maps[1]}, {maps[2], maps[3]}, params, tiles_n());
        if (taken) fail("a tile's slices are not all there");
    }
    fwrite(y.data(), 4, y.size(), stdout);
}
"""


def host_source() -> HostSource:
    """The program's text."""
    path = find_kernel("conv2d_wgmma").path
    kernel = path.read_text(encoding="utf-8")
    (slices,) = re.findall(r"const int slices = (.*?);", kernel, re.DOTALL)
    declarations = re.sub(r'#include "[^"]+"', "", kernel[: kernel.index("// The products of one tile")])
    params = (path.parent / "include" / "conv2d_params.cuh").read_text(encoding="utf-8")
    main = MAIN.replace("NAN_FLOAT", '__builtin_nanf("")')
    before = "\n".join([HOST, params.replace("#pragma once", ""), place()])
    return HostSource(before, declarations + WALK.replace("SLICES", slices), "walk", f"{IM2COL}\n{main}")


def tensors(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What the program reads, of arrays by name."""
    return [arrays[name] for name in ("x", "weight", "x0", "weight0")]
