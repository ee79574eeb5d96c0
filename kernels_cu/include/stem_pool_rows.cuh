// The warpgroup that makes pooled rows of the rows of a convolution that conv2d_stem_wgmma_tf32 has pooled along themselves.
// Included by the kernel behind its constants and stem_units.cuh.
#pragma once

#include "element.cuh"

// NaN if either is, in one instruction.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Filters k and k + 1 of a group's pooled column, or, as column GROUP_POOLED, of what it adds to the next group's first. 32 bytes
// change places with others, so that the columns that a warp stores at once lie in different banks.
__device__ __forceinline__ float2* pooled_pair(unsigned char* group, int column, int k) {
    return reinterpret_cast<float2*>(group + column * COLUMN_BYTES + (k / 8 ^ column % GROUP_POOLED) * 32 + k % 8 * 4);
}

// Pools the rows of all units of the block, adds the bias, and stores what ReLU leaves. Rounding and maximum do not mind which
// comes first, so the bias is added once to each pooled value.
__device__ __forceinline__ void pool_rows(float* y, const float* bias, unsigned char* rows, Barriers& barriers, const Units& units,
                                          const StemParams& params) {
    const int thread = threadIdx.x % WARPGROUP, k = thread % 16 * 4, column = thread / 16;  // of every GROUP_POOLED columns
    const int k0 = blockIdx.y * FILTERS + k;
    unsigned char* const own = reinterpret_cast<unsigned char*>(pooled_pair(rows, column, k));
    // What the group on the left adds to it; where that is nothing, the column again.
    unsigned char* const left = reinterpret_cast<unsigned char*>(pooled_pair(rows - GROUP_BYTES, GROUP_POOLED, k));
    unsigned char* const added = column == 0 ? left : own;
    float biases[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) biases[i] = bias[k0 + i];
    unsigned number = 0;  // of the row, of all that the block computes
#pragma unroll 1
    for (unsigned of = blockIdx.x; of < units.count; of += gridDim.x) {
        const Unit unit(of, units, params);
        const int q0 = unit.column / 2 + column;
        unsigned exists = 0;  // bit i: its column of group i is one of the map, and not one of the tile on the left
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            exists |= (q0 + i * GROUP_POOLED < params.PQ && (i > 0 || column > 0 || unit.column == 0) ? 1 : 0) << i;
        }
        float* pooled_row = y + ((static_cast<long long>(unit.n) * params.PP + unit.first / 2) * params.PQ + q0) * params.K + k0;
        float kept[GROUPS][4];  // of the rows above those that belong to the next pooled row, the largest
#pragma unroll
        for (int i = 0; i < GROUPS * 4; ++i) kept[0][i] = __int_as_float(0xff800000);
#pragma unroll 1
        for (int p = unit.first; p <= unit.last; ++p, ++number) {
            const bool ends = p % 2 == 1 || p == params.P - 1;
            const bool stored = ends && (p > unit.first || p % 2 == 0);  // otherwise it belongs to the unit above
            const int row = number % ROWS * POOLED_ROW_BYTES;
            barrier_wait(shared_address(&barriers.computed[number % ROWS]), number / ROWS & 1);
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                if (i % 2 == 0) __syncwarp();  // not all are loaded at once: registers are few
                const Chunk a = load_chunk(own + row + i * GROUP_BYTES);
                const Chunk b = load_chunk((i > 0 ? added : own) + row + i * GROUP_BYTES);
                Chunk output;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float value = larger_or_nan(__uint_as_float(a.words[j]), __uint_as_float(b.words[j]));
                    const float largest = larger_or_nan(kept[i][j], value);
                    output.words[j] = __float_as_uint(larger_or_nan(largest + biases[j], 0));
                    kept[i][j] = ends ? value : largest;
                }
                if (stored && exists >> i & 1) store_chunk(pooled_row + i * (GROUP_POOLED * params.K), output);
            }
            if (ends) pooled_row += static_cast<long long>(params.PQ) * params.K;
            warp_arrive(shared_address(&barriers.pooled[number % ROWS]));
        }
    }
}
