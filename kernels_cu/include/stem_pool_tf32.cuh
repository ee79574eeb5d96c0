// How a consumer of conv2d_stem_wgmma_tf32 pools its half of a row of the convolution, which it has in registers, and stores
// it. Included by the kernel behind its constants.
#pragma once

#include "element.cuh"

// Of every 8 columns, columns 2t and 2t + 1 of the thread's first filter, then of its second one.
using Row = float[COLUMNS / 2];
// A column that pooled columns on both sides need, of all filters.
using Border = float2[FILTERS / 2];

// NaN if either is, in one instruction.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Replaces column `past`, which is odd and the first behind the map, by its left neighbour.
__device__ __forceinline__ void leave_out(Row& row, int past) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
        if (i / 4 * 8 + 2 * t + 1 == past) row[i + 1] = row[i];
    }
}

// A warp's last column goes to the warp with the same filters: lanes with t = 3 have it, those with t = 0 need it.
__device__ __forceinline__ void give_border(Border& border, const Row& row) {
    if (threadIdx.x % 4 == 3) {
        border[threadIdx.x % WARPGROUP / 4] = make_float2(row[COLUMNS / 2 - 3], row[COLUMNS / 2 - 1]);
    }
}
__device__ __forceinline__ float2 take_border(const Border& border) { return border[threadIdx.x % WARPGROUP / 4]; }

// Pools the columns of a row: pooled column i is the largest of columns 2i − 1, 2i, 2i + 1 and 0. Where t = 0 `left` is
// column −1. Stores pooled columns from `first`, at most 1, up to the one before `behind`, counted from the thread's first,
// which goes to `place`.
__device__ __forceinline__ void pool(float* place, int first, int behind, int K, const Row& row, float2 left) {
    const int lane = threadIdx.x % 32, t = lane % 4, left_lane = lane / 4 * 4 + (t + 3) % 4;
    float before[2] = {};  // where t = 3 the neighbour on the right counts from the next 8 columns
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
        float pooled[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const float even = row[4 * j + 2 * m], odd = row[4 * j + 2 * m + 1];
            float neighbour = __shfl_sync(~0u, t == 3 ? before[m] : odd, left_lane);
            if (j == 0 && t == 0) neighbour = m == 0 ? left.x : left.y;
            pooled[m] = larger_or_nan(larger_or_nan(even, odd), larger_or_nan(neighbour, 0));
            before[m] = odd;
        }
        if ((j > 0 || first <= 0) && 4 * j < behind) {
            store_pair<float>(place + static_cast<long long>(4 * j) * K, pooled[0], pooled[1]);
        }
    }
}
