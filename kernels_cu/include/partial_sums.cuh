// Partial sums that meet in a cluster: how they lie in the shared memory of the block that adds them up, and how it turns
// them into outputs. conv2d_mma, conv2d_mma_patch and conv2d_wgmma_split_k share it.
//
// The including file defines ELEMENT.
#pragma once

#include "conv2d_params.cuh"
#include "epilogue.cuh"
#include "tensor_memory.cuh"

// A block's share of a tile, ROWS × COLUMNS, as PARTS parts of the depth: [part][row][column] in fp32, swizzled. The first
// THREADS threads of the block add them up.
template <int PARTS, int ROWS, int COLUMNS, int THREADS>
struct PartialSums {
    static constexpr int EIGHTS = COLUMNS / 8;  // in a row: 8 neighbouring outputs are finished by one thread
    static constexpr int PASSES = (ROWS * EIGHTS + THREADS - 1) / THREADS;
    static constexpr int ROW_SIZE = COLUMNS * 4;
    static constexpr int BYTES = PARTS * ROWS * ROW_SIZE;
    static_assert(COLUMNS % 32 == 0, "rows begin at the first bank");
    static_assert(THREADS % EIGHTS == 0, "a thread's outputs lie below each other");

    static __device__ __forceinline__ int row_offset(int part, int row) { return (part * ROWS + row) * ROW_SIZE; }

    // Where in a row its `quad`-th 4 columns lie, in bytes. The XOR spreads the rows that a warp writes at once, and the
    // eights that it reads at once, over all banks.
    static __device__ __forceinline__ int swizzled_quad(int row, int quad) { return (quad ^ row % 4 * 2) * 16; }

    // Once `all_received` completes its first phase, adds up the parts in the order of the depth, so that the result is the
    // same every time, applies the epilogue, and stores the share, whose first output is that of pixel m and of the group's
    // filter n. Bias and residual are fetched meanwhile. WHOLE: as for Epilogue8.
    template <bool WHOLE>
    static __device__ __forceinline__ void finish(const unsigned char* received, unsigned all_received,
                                                  const Epilogue8<ELEMENT>& epilogue, ELEMENT* y, const Conv2dParams& params,
                                                  int m, int n, int group) {
        const int eight = threadIdx.x % EIGHTS, column = n + eight * 8;
        const int k = group * params.group_filters + column;
        const int columns = min(max(params.group_filters - column, 0), 8);
        float bias[8];
        epilogue.load_bias(bias, k, columns);
        Chunk residuals[PASSES][Epilogue8<ELEMENT>::CHUNKS];
        const auto row_of = [](int pass) { return static_cast<int>(threadIdx.x) / EIGHTS + pass * (THREADS / EIGHTS); };
        const auto exists = [&](int pass) { return row_of(pass) < ROWS && m + row_of(pass) < params.gemm_m; };
        const auto offset_of = [&](int pass) { return static_cast<long long>(m + row_of(pass)) * params.K + k; };
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            epilogue.load_residual<WHOLE>(residuals[pass], offset_of(pass), exists(pass) ? columns : 0);
        }
        barrier_wait(all_received, 0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (!exists(pass)) continue;
            float sums[8];
            add_up(sums, received, row_of(pass), eight);
            epilogue.store<WHOLE>(y, offset_of(pass), columns, sums, bias, residuals[pass]);
        }
    }

  private:
    static __device__ __forceinline__ void add_up(float (&sums)[8], const unsigned char* received, int row, int eight) {
        const int first = threadIdx.x / 4 % 2;  // half the lanes begin with the second 4, again because of the banks
        float4 totals[2] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int quad = eight * 2 + (i ^ first);
                const float4 v =
                    *reinterpret_cast<const float4*>(received + row_offset(part, row) + swizzled_quad(row, quad));
                totals[i].x += v.x, totals[i].y += v.y, totals[i].z += v.z, totals[i].w += v.w;
            }
        }
        const float4 low = first ? totals[1] : totals[0], high = first ? totals[0] : totals[1];
        sums[0] = low.x, sums[1] = low.y, sums[2] = low.z, sums[3] = low.w;
        sums[4] = high.x, sums[5] = high.y, sums[6] = high.z, sums[7] = high.w;
    }
};
