// How the consumer of conv2d_stem_wgmma pools a row of the convolution that it has in registers, rounded. Included by the kernel
// behind its constants.
#pragma once

#include "element.cuh"

// Of every 8 columns, for filters g and g + 8 of the warp, a word of columns 2t and 2t + 1.
using Row = unsigned[2][BLOCKS];

__device__ __forceinline__ void copy(Row& to, const Row& from) {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) to[i % 2][i / 2] = from[i % 2][i / 2];
}

// Replaces column `past`, which is odd and the first behind the map, by its left neighbour.
__device__ __forceinline__ void leave_out(Row& row, int past) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (j * 8 + 2 * t + 1 == past) row[i][j] = __byte_perm(row[i][j], 0, 0x1010);
        }
    }
}

// Pools the columns of a row: pooled column i is the largest of columns 2i − 1, 2i, 2i + 1, and of 2i, 2i + 1 for i = 0. The
// tile gets pooled columns as rows of 64 filters.
__device__ __forceinline__ void pool(unsigned tile, const Row& row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, t = lane % 4;
    const int left_lane = lane / 4 * 4 + (t + 3) % 4;
    // Where t = 3 the neighbour on the right counts from the next 8 columns: it is given those of 8 columns earlier.
    const unsigned offer = t == 3 ? 0x5432 : 0x7654, take = t == 0 ? 0x7610 : 0x7654;
    unsigned pooled[BLOCKS / 2][2];  // of 16 columns: pooled column t in the lower half, t + 4 in the upper
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        unsigned before = 0;
#pragma unroll
        for (int j = 0; j < BLOCKS / 2; ++j) {
            const unsigned even = __byte_perm(row[m][2 * j], row[m][2 * j + 1], 0x5410);
            const unsigned odd = __byte_perm(row[m][2 * j], row[m][2 * j + 1], 0x7632);
            unsigned left = __shfl_sync(~0u, __byte_perm(before, odd, offer), left_lane);
            if (j == 0) left = __byte_perm(even, left, take);
            pooled[j][m] = larger_word(larger_word(even, odd, ELEMENT{}), left, ELEMENT{});
            before = odd;
        }
    }
    const int column = lane / 16 * 8 + lane % 8 / 2 + lane % 2 * 4, chunk = warp * 2 + lane / 8 % 2;
    const unsigned address = tile + column * TILE_PITCH + chunk * 16;
#pragma unroll
    for (int j = 0; j + 1 < BLOCKS / 2; j += 2) {
        const unsigned words[4] = {pooled[j][0], pooled[j][1], pooled[j + 1][0], pooled[j + 1][1]};
        store_transposed(address + j * 8 * TILE_PITCH, words);
    }
    if constexpr (BLOCKS / 2 % 2 == 1) store_transposed(address + (BLOCKS / 2 - 1) * 8 * TILE_PITCH, pooled[BLOCKS / 2 - 1]);
}
