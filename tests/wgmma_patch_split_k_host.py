"""conv2d_wgmma_patch_split_k.cu as a program of the host, with whole clusters: see `wgmma_cluster_host`."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
from wgmma_cluster_host import CLUSTER, HOST, kernel_text
from wgmma_host import ask, place

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.wgmma_patch import PatchTile

NAMES = r"""
enum { PIXELS_OF_X, FILTER };
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
    if (column < 0 || column + 64 > params.gemm_k) fail("there is no such depth");
    std::vector<Value> rows(64 * 64);
    for (int row = 0; row < 64 && first + row < params.K; ++row) {
        std::copy_n(&weight[long(first + row) * params.gemm_k + column], 64, &rows[row * 64]);
    }
    fetch(place, std::move(rows), barrier);
}
void fetch_box(unsigned place, const TensorMap& map, unsigned barrier, int c, int w, int h, int n) {
    if (map.id != PIXELS_OF_X || place % 1024) fail("no place for a patch");
    if (!self().waited) fail("earlier kernels may not have written the pixels");
    if (c < 0 || c + 64 > params.C) fail("there are no such channels");
    std::vector<Value> rows;
    for (int image = n; image < n + shape.images; ++image) {
        for (int line = h; line < h + shape.patch_rows; ++line) {
            for (int column = w; column < w + shape.columns; ++column) {
                rows.resize(rows.size() + 64);
                if (image >= params.N || line < 0 || line >= params.H || column < 0 || column >= params.W) continue;
                std::copy_n(&x[((long(image) * params.H + line) * params.W + column) * params.C + c], 64, &rows.end()[-64]);
            }
        }
    }
    if (int(rows.size()) * 2 != shape.box_bytes) fail("a box of another size is waited for");
    fetch(place, std::move(rows), barrier);
}
void run() {
    if (2 * shape.patch_bytes + shape.num_stages * 8192 + 256 * PIXELS + 1024 > SHARED) fail("there is no such memory");
    conv2d_wgmma_patch_split_k({PIXELS_OF_X}, {FILTER}, with_bias ? bias.data() : nullptr,
                               in_place ? y.data() : with_residual ? residual.data() : nullptr, y.data(), shape, params);
    self().ended = true;
    rest();
}
CLUSTER
void read(std::vector<float>& values, long count) {
    values.resize(count);
    if (long(fread(values.data(), 4, count, stdin)) != count) fail("too little input");
}
void read(std::vector<Value>& values, long count) {
    std::vector<float> floats;
    read(floats, count);
    for (float value : floats) values.push_back(from_float<Value>(value));
}
int main() {
    int head[5];
    if (fread(head, 4, 5, stdin) != 5 || fread(&shape, sizeof shape, 1, stdin) != 1) return 2;
    if (fread(&params, sizeof params, 1, stdin) != 1) return 2;
    draw.seed(head[0]), with_bias = head[2], with_residual = head[3], in_place = head[4];
    const long outputs = long(params.gemm_m) * params.K;
    read(x, long(params.N) * params.H * params.W * params.C), read(weight, long(params.K) * params.gemm_k);
    read(bias, params.K), read(residual, outputs);
    y = residual;
    if (!in_place) std::fill(y.begin(), y.end(), Half{-1});
    for (int tile = 0; tile < head[1]; ++tile) cluster(tile);
    for (Value value : y) {
        const float result = to_float(value);
        fwrite(&result, 4, 1, stdout);
    }
}
"""


def host_source() -> str:
    """The program's text."""
    kernel = kernel_text("conv2d_wgmma_patch_split_k", ("partial_sums.cuh", "patch_tile.cuh"))
    return "\n".join([HOST, NAMES, place(), kernel, MAIN.replace("CLUSTER\n", CLUSTER)])


def run(
    program: Path,
    problem: Conv2dProblem,
    tile: PatchTile,
    arrays: dict[str, np.ndarray],
    *,
    seed: int,
    bias: bool,
    residual: bool,
    in_place: bool,
    relu: bool,
) -> np.ndarray | str:
    """Runs all clusters of a launch, one after the other; returns the output, or what went wrong.

    Args:
        program: from `build`.
        problem: the convolution.
        tile: its tile in the form that the program was compiled in.
        arrays: x, weight (K, R, S, C), bias and residual, integers as float32.
        seed: of the order.
        bias, residual, relu: the epilogue.
        in_place: whether the output lies in the residual's place.
    """
    tiles = tile.pixel_tiles * -(-problem.K // 64)
    head = seed, tiles, bias, residual, in_place, *astuple(tile)
    tensors = [arrays[name] for name in ("x", "weight", "bias", "residual")]
    return ask(program, problem, head, tensors, relu=relu)
