"""conv2d_wgmma_patch_split_k.cu as a program of the host, with whole clusters: see `wgmma_cluster_host`."""

from dataclasses import astuple
from typing import Any

import numpy as np
from wgmma_cluster_host import cluster_source
from wgmma_host import READ, HostSource, Program, run_blocks

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.wgmma_patch import PatchTile

NAMES = r"""
enum { PIXELS_OF_X, FILTER };
constexpr int CHANNELS = 128 / sizeof(Value);  // of a row in shared memory
void fetch_box(unsigned, const TensorMap&, unsigned, int, int);
void fetch_box(unsigned, const TensorMap&, unsigned, int, int, int, int);
"""

MAIN = r"""
PatchTile shape;
Conv2dParams params;
int with_bias, with_residual, in_place;
std::vector<Value> x, weight, residual, y;
std::vector<float> bias;

void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int column, int first) {
    if (map.id != FILTER || place % 1024) fail("no place for filters");
    if (column < 0 || column + CHANNELS > params.gemm_k) fail("there is no such depth");
    std::vector<Value> rows(64 * CHANNELS);
    for (int row = 0; row < 64 && first + row < params.K; ++row) {
        std::copy_n(&weight[long(first + row) * params.gemm_k + column], CHANNELS, &rows[row * CHANNELS]);
    }
    fetch(place, std::move(rows), barrier);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n) {
    if (map.id != PIXELS_OF_X || place % 1024) fail("no place for a patch");
    if (!self().waited) fail("earlier kernels may not have written the pixels");
    if (c < 0 || c + CHANNELS > params.C) fail("there are no such channels");
    std::vector<Value> rows;
    for (int image = n; image < n + shape.images; ++image) {
        for (int line = h; line < h + shape.patch_rows; ++line) {
            for (int column = w; column < w + shape.columns; ++column) {
                rows.resize(rows.size() + CHANNELS);
                if (image >= params.N || line < 0 || line >= params.H || column < 0 || column >= params.W) continue;
                const Value* const pixel = &x[((long(image) * params.H + line) * params.W + column) * params.C + c];
                std::copy_n(pixel, CHANNELS, &rows.end()[-CHANNELS]);
            }
        }
    }
    if (rows.size() * sizeof(Value) != unsigned(shape.box_bytes)) fail("a box of another size is waited for");
    fetch(place, std::move(rows), barrier);
}
void run() {
    if (2 * shape.patch_bytes + shape.num_stages * 8192 + 256 * PIXELS + 1024 > SHARED) fail("there is no such memory");
    if (shape.patch_bytes - shape.box_bytes > 257 * 16) fail("the threads that run leave zeros out");
    KERNEL({PIXELS_OF_X}, {FILTER}, with_bias ? bias.data() : nullptr,
           in_place ? y.data() : with_residual ? residual.data() : nullptr, y.data(), shape, params);
    self().ended = true;
    rest();
}
CLUSTER
void read_values(std::vector<Value>& values, long count) {
    std::vector<float> floats;
    read(floats, count);
    values.clear();
    for (float value : floats) values.push_back(from_float<Value>(value));
}
int main(int, char** arguments) {
    kernel_number = atoi(arguments[1]);
    int head[5];
    if (fread(head, 4, 5, stdin) != 5 || fread(&shape, sizeof shape, 1, stdin) != 1) return 2;
    if (fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), with_bias = head[2], with_residual = head[3], in_place = head[4];
    const long outputs = long(params.gemm_m) * params.K;
    read_values(x, long(params.N) * params.H * params.W * params.C);
    read_values(weight, long(params.K) * params.gemm_k), read(bias, params.K), read_values(residual, outputs);
    y = residual;
    if (!in_place) std::fill(y.begin(), y.end(), from_float<Value>(NAN));
    for (int tile = 0; tile < head[1]; ++tile) cluster(tile);
    for (Value value : y) {
        const float result = to_float(value);
        fwrite(&result, 4, 1, stdout);
    }
}
"""


def host_source() -> HostSource:
    """The program's text."""
    headers = ("partial_sums.cuh", "patch_tile.cuh")
    return cluster_source("conv2d_wgmma_patch_split_k", headers, NAMES, f"{READ}\n{MAIN}")


def run(
    program: Program, problem: Conv2dProblem, tile: PatchTile, arrays: dict[str, np.ndarray], **options: Any
) -> np.ndarray | str:
    """Runs a launch on integers: x, weight, bias and residual, with the options of `run_blocks` but for the grid.

    `tile` is the problem's in the form that the program was compiled in.
    """
    read = {name: arrays[name] for name in ("x", "weight", "bias", "residual")}
    clusters = tile.pixel_tiles * -(-problem.K // 64)
    return run_blocks(program, problem, read, *astuple(tile), grid=clusters, **options)
