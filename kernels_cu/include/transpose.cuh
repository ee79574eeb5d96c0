// Turns each of N matrices around: the body of both layout changes, NCHW ↔ NHWC, whose images are C × pixels matrices.
#pragma once

#include "element.cuh"

constexpr int TRANSPOSE_TILE = 32, TRANSPOSE_ROWS = 8;

// y[n, column, row] = convert(x[n, row, column], row), a float that is rounded to Output. A tile of 32 × 32 is turned in
// shared memory, so that reads and writes both touch neighbours. Grid x: N × tiles of columns (grid-stride), y: tiles of
// rows (grid-stride); block 32 × 8.
template <typename Input, typename Output, typename Convert>
__device__ __forceinline__ void transpose(const Input* __restrict__ x, Output* __restrict__ y, int N, int rows, int columns,
                                          Convert convert) {
    __shared__ float tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 1];
    const int column_tiles = (columns + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    for (long long block = blockIdx.x; block < static_cast<long long>(N) * column_tiles; block += gridDim.x) {
        const long long n = block / column_tiles;
        const int column0 = static_cast<int>(block % column_tiles) * TRANSPOSE_TILE;
        for (int row0 = blockIdx.y * TRANSPOSE_TILE; row0 < rows; row0 += gridDim.y * TRANSPOSE_TILE) {
#pragma unroll 1
            for (int i = threadIdx.y; i < TRANSPOSE_TILE; i += TRANSPOSE_ROWS) {
                const int row = row0 + i, column = column0 + threadIdx.x;
                if (row < rows && column < columns) {
                    tile[i][threadIdx.x] = convert(x[(n * rows + row) * columns + column], row);
                }
            }
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.y; i < TRANSPOSE_TILE; i += TRANSPOSE_ROWS) {
                const int row = row0 + threadIdx.x, column = column0 + i;
                if (row < rows && column < columns) {
                    y[(n * columns + column) * rows + row] = from_float<Output>(tile[threadIdx.x][i]);
                }
            }
            __syncthreads();
        }
    }
}
