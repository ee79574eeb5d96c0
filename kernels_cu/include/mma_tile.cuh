// A tile of the matrix product on tensor cores, as conv2d_mma and conv2d_mma_patch share it: fragments, sums, epilogue.
//
// The including file defines ELEMENT, PRODUCTS, TILE_M, TILE_N, WARP_M, WARP_N, VECTOR, MIN_BLOCKS and SPLIT_K_CLUSTER.
//
// Split-K cuts the depth into slices, each the work of a block. They meet in one of two ways:
//
// * SPLIT_K_CLUSTER = 1: in a workspace in L2, by any number of slices (`Accumulator::reduce`).
// * SPLIT_K_CLUSTER > 1: as a cluster of so many blocks, in shared memory (`ClusterReduction`, sm_90 and newer).
#pragma once

#if SPLIT_K_CLUSTER > 1
#include "cluster.cuh"
#include "partial_sums.cuh"
#define SLICES_IN_A_CLUSTER __cluster_dims__(1, 1, SPLIT_K_CLUSTER)
#else
#define SLICES_IN_A_CLUSTER
#endif
#include "conv2d_params.cuh"
#include "element.cuh"
#include "epilogue.cuh"
#include "implicit_gemm.cuh"
#include "tensor_core.cuh"

constexpr int TILE_K = ROW_BYTES / static_cast<int>(sizeof(ELEMENT));  // depth per slice
constexpr int STEPS = ROW_BYTES / 32;                                  // mma steps per slice
constexpr int WARPS_M = TILE_M / WARP_M, WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;
constexpr int BUFFERS = PRODUCTS == 1 ? 2 : 1;  // fragments of the next step beside this one's, where registers allow
static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "warps must cover the tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 32 == 0, "the epilogue trades 32 columns at a time");
static_assert(PRODUCTS == 1 || (PRODUCTS == 3 && sizeof(ELEMENT) == 4), "only fp32 is split");

// One warp's share of a step: WARP_M pixels and WARP_N filters, 32 bytes deep.
struct Fragments {
    unsigned pixels[FRAGMENTS_M][4];
    unsigned filters[FRAGMENTS_N][2];

    // `pixel_address(i, step)` is this lane's address for the i-th 16 rows of pixels, `filter_row` that of its row of
    // filters at step 0; a step moves 32 bytes along the swizzled row.
    template <typename PixelAddress>
    __device__ __forceinline__ void load(PixelAddress pixel_address, unsigned filter_row, int step) {
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) load_matrices(pixels[i], pixel_address(i, step));
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; j += 2) {
            unsigned words[4];
            load_matrices(words, (filter_row ^ step * 32) + j * 8 * ROW_BYTES);
            filters[j][0] = words[0], filters[j][1] = words[1];
            filters[j + 1][0] = words[2], filters[j + 1][1] = words[3];
        }
    }

    __device__ __forceinline__ void round() {
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) round_to_tf32(pixels[i]);
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) round_to_tf32(filters[j]);
    }
};

// What the epilogue adds to the outputs that a lane stores of 32 columns: 8 neighbouring ones in each of ROWS rows.
struct EpilogueInputs {
    static constexpr int ROWS = 2 * FRAGMENTS_M;  // of 8 pixels: their 8 lanes

    float bias[8];
    Chunk residuals[ROWS][Epilogue8<ELEMENT>::CHUNKS];

    // For rows `m` and columns `n` (of the group) on.
    __device__ __forceinline__ void load(const Epilogue8<ELEMENT>& epilogue, const Conv2dParams& params, int m, int n,
                                         int group) {
        const int lane = threadIdx.x % 32, column = n + lane % 4 * 8;
        const int k = group * params.group_filters + column;
        const int columns = min(max(params.group_filters - column, 0), 8);
        epilogue.load_bias(bias, k, columns);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int pixel = min(m + row * 8 + lane / 4, params.gemm_m - 1);
            epilogue.load_residual<(VECTOR > 1)>(residuals[row], static_cast<long long>(pixel) * params.K + k, columns);
        }
    }
};

// Whether they are loaded while the sums are formed, rather than after: where registers are left for them. So it is with
// small tiles, of which there are few, so that nothing else hides the time that they take to come.
constexpr bool INPUTS_EARLY = VECTOR > 1 && PRODUCTS == 1 && SPLIT_K_CLUSTER == 1 && FRAGMENTS_M * FRAGMENTS_N <= 8 &&
                              THREADS * MIN_BLOCKS <= 512;

struct Accumulator {
    static constexpr int FRAGMENTS = FRAGMENTS_M * FRAGMENTS_N;

    float sums[FRAGMENTS_M][FRAGMENTS_N][4] = {};
    float slice_sums[FRAGMENTS_M][FRAGMENTS_N][4];  // PRODUCTS = 3: of the slice's steps so far

    // `number` is that of the step in its slice. All steps of a slice have to come, one after the other.
    __device__ __forceinline__ void add(Fragments& step, int number) {
        if constexpr (PRODUCTS == 1) {
            if constexpr (sizeof(ELEMENT) == 4) step.round();
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
                for (int j = 0; j < FRAGMENTS_N; ++j) mma<ELEMENT>(sums[i][j], step.pixels[i], step.filters[j]);
            }
        } else {
            unsigned pixels_low[FRAGMENTS_M][4];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) split_tf32(step.pixels[i], pixels_low[i]);
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j) {
                unsigned filters_low[2];
                split_tf32(step.filters[j], filters_low);
                make_up_for_truncation(step.filters[j], filters_low);
#pragma unroll
                for (int i = 0; i < FRAGMENTS_M; ++i) {
                    float product[4] = {};
                    mma<ELEMENT>(product, pixels_low[i], step.filters[j]);
                    mma<ELEMENT>(product, step.pixels[i], filters_low);
                    mma<ELEMENT>(product, step.pixels[i], step.filters[j]);
#pragma unroll
                    for (int v = 0; v < 4; ++v) {
                        float& slice_sum = slice_sums[i][j][v];
                        slice_sum = number == 0 ? product[v] : slice_sum + product[v];
                        if (number == STEPS - 1) sums[i][j][v] += slice_sum;
                    }
                }
            }
        }
    }

    // Split-K: leaves this block's sums in the workspace. The block that comes last adds those of all, in the order of
    // the depth, so that the result does not depend on who that is; it returns true and leaves the counter at 0.
    __device__ __forceinline__ bool reduce(float* workspace, int* counters) {
        const int slices = gridDim.z, tile = blockIdx.y * gridDim.x + blockIdx.x;
        float4* const partial = reinterpret_cast<float4*>(workspace) +
                                static_cast<long long>(tile) * slices * (FRAGMENTS * THREADS) + threadIdx.x;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            const float* v = sums[f / FRAGMENTS_N][f % FRAGMENTS_N];
            __stcg(&partial[(blockIdx.z * FRAGMENTS + f) * THREADS], make_float4(v[0], v[1], v[2], v[3]));
        }
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(&counters[tile], 1) == slices - 1;
            if (last) counters[tile] = 0;
        }
        __syncthreads();
        if (!last) return false;
        __threadfence();
        // Several loads are under way at a time: their latency is what a small layer's split-K costs.
        constexpr int TOGETHER = FRAGMENTS < 8 ? FRAGMENTS : 8;
#pragma unroll
        for (int first = 0; first < FRAGMENTS; first += TOGETHER) {
            float4 totals[TOGETHER] = {};
#pragma unroll(FRAGMENTS <= 8 ? 16 / TOGETHER : 1)
            for (int slice = 0; slice < slices; ++slice) {
                const float4* const source = partial + (slice * FRAGMENTS + first) * THREADS;
                float4 values[TOGETHER];
#pragma unroll
                for (int f = 0; f < TOGETHER; ++f) values[f] = __ldcg(&source[f * THREADS]);
#pragma unroll
                for (int f = 0; f < TOGETHER; ++f) {
                    totals[f].x += values[f].x, totals[f].y += values[f].y;
                    totals[f].z += values[f].z, totals[f].w += values[f].w;
                }
            }
#pragma unroll
            for (int f = 0; f < TOGETHER; ++f) {
                float* v = sums[(first + f) / FRAGMENTS_N][(first + f) % FRAGMENTS_N];
                v[0] = totals[f].x, v[1] = totals[f].y, v[2] = totals[f].z, v[3] = totals[f].w;
            }
        }
        return true;
    }

    // Applies the epilogue to rows `m` and columns `n` (of the group, this warp's first) on, and stores. LOADED: `inputs` are
    // there already.
    template <bool LOADED>
    __device__ __forceinline__ void store(EpilogueInputs (&inputs)[FRAGMENTS_N / 4], const Epilogue8<ELEMENT>& epilogue,
                                          ELEMENT* y, const Conv2dParams& params, int m, int n, int group) const {
        constexpr bool WHOLE = VECTOR > 1;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; j += 4) {
            EpilogueInputs& input = inputs[j / 4];
            if constexpr (!LOADED) input.load(epilogue, params, m, n + j * 8, group);
            const int column = n + j * 8 + lane % 4 * 8;
            const int k = group * params.group_filters + column;
            const int columns = min(max(params.group_filters - column, 0), 8);
#pragma unroll
            for (int row = 0; row < EpilogueInputs::ROWS; ++row) {
                float values[4][2];
#pragma unroll
                for (int f = 0; f < 4; ++f) {
                    values[f][0] = sums[row / 2][j + f][row % 2 * 2];
                    values[f][1] = sums[row / 2][j + f][row % 2 * 2 + 1];
                }
                transpose_quad(values, lane);
                const int pixel = m + row * 8 + lane / 4;
                if (pixel < params.gemm_m) {
                    epilogue.store<WHOLE>(y, static_cast<long long>(pixel) * params.K + k, columns,
                                          reinterpret_cast<const float(&)[8]>(values), input.bias, input.residuals[row]);
                }
            }
        }
    }

  private:
    // Lane t of a quad holds columns 2t, 2t + 1 of four fragments; afterwards it holds all 8 columns of fragment t.
    static __device__ __forceinline__ void transpose_quad(float (&values)[4][2], int lane) {
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
            const bool upper = lane & bit;
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                if (f & bit) continue;
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const float received = __shfl_xor_sync(~0u, upper ? values[f][v] : values[f | bit][v], bit);
                    (upper ? values[f][v] : values[f | bit][v]) = received;
                }
            }
        }
    }
};

#if SPLIT_K_CLUSTER > 1
// Split-K in a cluster: the blocks of a tile, one per slice of the depth, each finish TILE_M / SPLIT_K_CLUSTER of its rows.
// Partial sums are written right into the shared memory of the block that adds them up, where room is kept for them, each
// announced to that block's barrier: nothing else lies between the last product and the output, and bias and residual are
// fetched while the sums are on their way.
struct ClusterReduction {
    static constexpr int ROWS = TILE_M / SPLIT_K_CLUSTER;  // of the tile, for each block
    using Received = PartialSums<SPLIT_K_CLUSTER, ROWS, TILE_N, THREADS>;
    static_assert(TILE_M % SPLIT_K_CLUSTER == 0, "all blocks have as many rows");

    Received::Share<(VECTOR > 1)> share;

    // Call once, at the beginning, and begin() once behind a barrier of the block.
    static __device__ __forceinline__ void prepare() {
        if (threadIdx.x > 0) return;
        barrier_init(all_received(), 1);
        barrier_init_done();
    }
    static __device__ __forceinline__ void begin() {
        if (threadIdx.x == 0) barrier_arrive_expecting(all_received(), (SPLIT_K_CLUSTER - 1) * Received::PART_SIZE);
        __syncwarp();
        cluster_arrive_relaxed();
    }

    // Loads what this block's share of the tile at row m0 and column n0 of the group needs beside sums, and waits until all
    // blocks have begun: hardly ever is there anything to wait for. Once earlier kernels have finished.
    __device__ __forceinline__ ClusterReduction(const Epilogue8<ELEMENT>& epilogue, const Conv2dParams& params, int m0, int n0,
                                                int group)
        : share(epilogue, params, m0 + blockIdx.z * ROWS, n0, group) {
        cluster_wait();
    }

    // Adds up the partial sums of all blocks, applies the epilogue to this block's share, as above, and stores it. `received`:
    // Received::BYTES of shared memory, at the same place in all blocks; warp_m and warp_n: of the tile, this warp's first.
    __device__ __forceinline__ void finish(const Accumulator& accumulator, unsigned char* received, int warp_m, int warp_n,
                                           const Epilogue8<ELEMENT>& epilogue, ELEMENT* y) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2 * FRAGMENTS_M; ++half) {  // 8 rows of a fragment's 16
            Received::send_row<FRAGMENTS_N>(received, all_received(), blockIdx.z, warp_m + half * 8 + lane / 4,
                                            warp_n / 4 + lane % 4 / 2, [&](int j) {
                                                const float* const first = &accumulator.sums[half / 2][j][half % 2 * 2];
                                                return make_float2(first[0], first[1]);
                                            });
        }
        __syncthreads();
        share.finish(received, all_received(), epilogue, y);
    }

  private:
    // The address of a barrier that completes when all partial sums have come.
    static __device__ __forceinline__ unsigned all_received() {
        __shared__ unsigned long long barrier;
        return shared_address(&barrier);
    }
};
constexpr int RECEIVED_BYTES = ClusterReduction::Received::BYTES;
#else
constexpr int RECEIVED_BYTES = 0;
#endif

// Brings the residual of this block's tile to L2, on its way while the sums are formed. Call once its writer has finished.
// Where the depth is cut there are so few tiles that it is in L2 still.
__device__ __forceinline__ void prefetch_residual(const ELEMENT* residual, const Conv2dParams& params, int m0, int n0,
                                                  int group) {
    constexpr int PER_LINE = 128 / static_cast<int>(sizeof(ELEMENT)), LINES = (TILE_N + PER_LINE - 1) / PER_LINE;
    if (!residual || gridDim.z > 1) return;
#pragma unroll
    for (int i = threadIdx.x; i < TILE_M * LINES; i += THREADS) {
        const int m = m0 + i / LINES, n = n0 + i % LINES * PER_LINE;
        if (m >= params.gemm_m || n >= params.group_filters) continue;
        const ELEMENT* const line = residual + static_cast<long long>(m) * params.K + group * params.group_filters + n;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
}

// Where a lane's row of filters lies in a swizzled tile of them: lanes 0–7 and 8–15 give the two halves of 8 rows to
// ldmatrix, lanes 16–31 those of the next 8.
__device__ __forceinline__ int filter_row_of_lane(int warp_n, int lane) {
    return swizzled(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
