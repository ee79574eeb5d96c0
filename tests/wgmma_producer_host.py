"""conv2d_wgmma.cu's producer as a program of the host, in TF32: what it asks for is multiplied as it comes.

Its own text walks the tiles of all blocks, one after the other. The consumers' part, the barriers and the order of
events are not here but for what may come before earlier kernels have finished: a slice is multiplied as soon as its
pixels are there, and the product of as many as the kernel counts is a tile.
"""

import re

import numpy as np
from wgmma_host import IM2COL, HostSource, place

from cupy_resnet.jit.sources import find_kernel

HOST = r"""
#include <cstdio>
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <vector>
#define __device__
#define __forceinline__ inline
struct Index { int x; } blockIdx, gridDim, threadIdx;
struct TensorMap { int id; };
enum { PIXELS, FILTERS, SHORTCUT_PIXELS, SHORTCUT_FILTERS };
[[noreturn]] void fail(const char* what) { fprintf(stderr, "%s\n", what); _Exit(1); }
unsigned shared_address(const void*) { return 0; }
using std::min;
void barrier_wait(unsigned, int) {}
void wait_for_earlier_kernels();
void prefetch_map(const TensorMap&) {}
void barrier_arrive_expecting(unsigned, int bytes);
void fetch_im2col(unsigned, const TensorMap&, unsigned, int, int, int, int, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
void prefetch_box(const TensorMap&, int, int) {}
int slices;  // of a tile, as many as the kernel counts
"""

WALK = r"""
void walk(const Factors& factors, const Factors& shortcut, const Conv2dParams& params, int tiles, int tiles_n) {
    static Barriers barriers;
    slices = SLICES;
    produce(factors, shortcut, nullptr, barriers, 0, params, tiles, tiles_n, slices);
}
"""

MAIN = r"""
Conv2dParams params, alone;  // alone: the shortcut as a convolution of its own
std::vector<float> x, weight, shortcut_x, shortcut_weight, y, sums;
std::deque<std::vector<float>> filters;  // of the slices whose pixels have not come
int asked, taken;                        // slices of this block: whose filters are asked for, and that are multiplied
bool waited;

int tiles_n() { return (params.K + TILE_N - 1) / TILE_N; }

void barrier_arrive_expecting(unsigned, int bytes) {
    if (bytes != STAGE_BYTES) fail("a slice is expected to be of another size");
}
void wait_for_earlier_kernels() { waited = true; }
void fetch_im2col(unsigned place, const TensorMap& map, unsigned, int c, int w, int h, int n, int s, int r) {
    if (map.id % 2 != PIXELS) fail("these are no pixels");
    if (!waited) fail("pixels are asked for that an earlier kernel may not have written");
    if (place != taken % NUM_STAGES * STAGE_BYTES) fail("this is another stage's place");
    const bool first = map.id == PIXELS;
    if (c < 0 || c + 32 > (first ? params.C : alone.C)) fail("there are no such channels");
    const std::vector<float> pixels =
        im2col_rows(first ? params : alone, first ? x : shortcut_x, TILE_M, c, w, h, n, s, r);
    if (filters.empty()) fail("pixels come before the stage is claimed");
    if (taken % slices == 0) sums.assign(TILE_M * TILE_N, 0.0f);
    for (int m = 0; m < TILE_M; ++m) {
        for (int k = 0; k < TILE_N; ++k) {
            for (int i = 0; i < 32; ++i) sums[m * TILE_N + k] += pixels[m * 32 + i] * filters.front()[k * 32 + i];
        }
    }
    filters.pop_front();
    if (++taken % slices) return;
    const int tile = blockIdx.x + (taken / slices - 1) * gridDim.x;
    const int m0 = tile / tiles_n() * TILE_M, n0 = tile % tiles_n() * TILE_N;
    for (int m = 0; m < TILE_M && m0 + m < params.gemm_m; ++m) {
        float* const row = &y[long(m0 + m) * params.K + n0];
        for (int k = 0; k < TILE_N && n0 + k < params.K; ++k) row[k] = sums[m * TILE_N + k];
    }
}
void fetch_box(unsigned place, const TensorMap& map, unsigned, int column, int first) {
    if (map.id % 2 != FILTERS) fail("these are no filters");
    if (asked - taken >= NUM_STAGES) fail("there are no more stages than that");
    if (place != asked % NUM_STAGES * STAGE_BYTES + PIXEL_BYTES) fail("this is another stage's place");
    const int tile = blockIdx.x + asked++ / slices * gridDim.x;
    if (first != tile % tiles_n() * TILE_N) fail("these are another tile's filters");
    const auto& of = map.id == FILTERS ? weight : shortcut_weight;
    const int depth = map.id == FILTERS ? params.gemm_k : alone.C;
    if (column < 0 || column + 32 > depth) fail("there is no such depth");
    filters.push_back(filter_rows(of, TILE_N, first, params.K, depth, column));
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
    const int tiles = (params.gemm_m + TILE_M - 1) / TILE_M * tiles_n();
    gridDim.x = min(head[0], tiles);  // as many as are launched
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        asked = taken = 0, waited = false;
        KERNEL({maps[0], maps[1]}, {maps[2], maps[3]}, params, tiles, tiles_n());
        if (taken % slices || !filters.empty()) fail("a tile's slices are not all there");
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
