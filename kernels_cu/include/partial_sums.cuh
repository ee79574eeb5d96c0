// Partial sums that meet in a cluster: how they lie in the shared memory of the block that adds them up, and how it turns
// them into outputs. conv2d_mma, conv2d_mma_patch, conv2d_wgmma_split_k and conv2d_wgmma_patch_split_k share it.
//
// The including file defines ELEMENT.
#pragma once

#include "cluster.cuh"
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
    static constexpr int PART_SIZE = ROWS * ROW_SIZE, BYTES = PARTS * PART_SIZE;
    static_assert(COLUMNS % 32 == 0, "rows begin at the first bank");
    static_assert(THREADS % EIGHTS == 0, "a thread's outputs lie below each other");

    static __device__ __forceinline__ int row_offset(int part, int row) { return part * PART_SIZE + row * ROW_SIZE; }

    // Where in a row its `quad`-th 4 columns lie, in bytes. The XOR spreads the rows that a warp writes at once, and the
    // eights that it reads at once, over all banks.
    static __device__ __forceinline__ int swizzled_quad(int row, int quad) { return (quad ^ row % 4 * 2) * 16; }

    // Hands pairs of this thread's sums to the block that finishes them: pair(j), a float2, belongs at offset_of(j) of what that
    // block receives. What others finish is announced to their barrier `all_received`; what one finishes oneself is written as
    // usual, which takes a fraction of the time.
    template <int PAIRS, typename Offset, typename Pair>
    static __device__ __forceinline__ void send(unsigned char* received, unsigned all_received, int finisher,
                                                const Offset& offset_of, const Pair& pair) {
        if (finisher == static_cast<int>(blockIdx.z)) {
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) store_pair<float>(received + offset_of(j), pair(j).x, pair(j).y);
        } else {
            const unsigned target = address_in_block(shared_address(received), finisher);
            const unsigned barrier = address_in_block(all_received, finisher);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) store_in_cluster(target + offset_of(j), pair(j).x, pair(j).y, barrier);
        }
    }

    // The same for pairs of columns of a row of the tile, the first in quad `quad` of the row, each 8 columns behind the one
    // before.
    template <int PAIRS, typename Pair>
    static __device__ __forceinline__ void send_row(unsigned char* received, unsigned all_received, int part, int row, int quad,
                                                    const Pair& pair) {
        const int begin = row_offset(part, row % ROWS) + threadIdx.x % 2 * 8;
        const auto offset_of = [&](int j) { return begin + swizzled_quad(row % ROWS, quad + j * 2); };
        send<PAIRS>(received, all_received, row / ROWS, offset_of, pair);
    }

    // The parts' 8 sums, the `eight`-th of a row, added up in the order of the depth.
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

    // What a thread finishes: 8 columns, or how many of them there are, in a row of each pass. WHOLE: as for Epilogue8.
    template <bool WHOLE>
    class Share {
      public:
        // Loads what the outputs need beside sums, early, to be there when they are. The first of the block's outputs is that of
        // pixel m and of the group's filter n.
        __device__ __forceinline__ Share(const Epilogue8<ELEMENT>& epilogue, const Conv2dParams& params, int m, int n, int group)
            : params(params),
              m(m),
              k(group * params.group_filters + n + threadIdx.x % EIGHTS * 8),
              columns(min(max(params.group_filters - n - static_cast<int>(threadIdx.x) % EIGHTS * 8, 0), 8)) {
            epilogue.load_bias(bias, k, columns);
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                epilogue.load_residual<WHOLE>(residuals[pass], offset(pass), exists(pass) ? columns : 0);
            }
        }

        // Once `all_received` completes its first phase, and behind a barrier of those who send, adds up the parts in the order
        // of the depth, so that the result is the same every time, applies the epilogue, and stores the outputs.
        __device__ __forceinline__ void finish(const unsigned char* received, unsigned all_received,
                                               const Epilogue8<ELEMENT>& epilogue, ELEMENT* y) const {
            barrier_wait(all_received, 0);
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                if (!exists(pass)) continue;
                float sums[8];
                add_up(sums, received, row_of(pass), threadIdx.x % EIGHTS);
                epilogue.store<WHOLE>(y, offset(pass), columns, sums, bias, residuals[pass]);
            }
        }

      private:
        static __device__ __forceinline__ int row_of(int pass) {
            return static_cast<int>(threadIdx.x) / EIGHTS + pass * (THREADS / EIGHTS);
        }
        __device__ __forceinline__ bool exists(int pass) const {
            return row_of(pass) < ROWS && m + row_of(pass) < params.gemm_m;
        }
        __device__ __forceinline__ long long offset(int pass) const {
            return static_cast<long long>(m + row_of(pass)) * params.K + k;
        }

        const Conv2dParams& params;
        const int m, k, columns;
        float bias[8];
        Chunk residuals[PASSES][Epilogue8<ELEMENT>::CHUNKS];
    };
};
