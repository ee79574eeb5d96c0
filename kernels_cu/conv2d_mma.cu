// conv2d_mma: implicit GEMM on tensor cores through mma.sync. The production kernel in every precision but plain fp32.
// @solves 2-D convolution as a matrix product on tensor cores (fp16, bf16, TF32, fp32-accurate; any shape)
// @arch sm_80
//
// Equation   as conv2d_direct, sums in fp32.
// GEMM view  as conv2d_implicit_gemm: gemm_m = N·P·Q pixels, gemm_n = K/groups filters, gemm_k = R·S·C/groups.
// Layouts    x NHWC, filter KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: tiles of filters × tiles of pixels (filters fastest); y: groups; z: slices of the depth (split-K).
//            Block 32 · (TILE_M / WARP_M) · (TILE_N / WARP_N) threads.
// Shared     NUM_STAGES · (TILE_M + TILE_N) · 128 + 16 · TILE_M bytes, dynamic.
// Requires   VECTOR > 1: channels per group a multiple of VECTOR, filters and filters per group multiples of 8.
// This rung  against conv2d_wmma: the layout of fragments is known, so ldmatrix can read shared memory that is swizzled
//            instead of padded, a pipeline of cp.async stages replaces the loads through registers, and the epilogue
//            happens in registers: four lanes that hold pieces of the same rows trade them by shuffles, and each
//            stores 8 neighbouring outputs. Fragments of the next step are loaded while this one is multiplied.
//
// PRODUCTS = 3 splits every fp32 operand into two TF32 parts, a = high + low, and forms low·high + high·low + high·high:
// 21 bits of each mantissa take part. Tensor cores round their sums toward zero, which is harmless within one product
// but adds up over a depth of thousands; so each step of 8 starts from zero and is added outside, in fp32 with rounding
// to nearest (Ootomo and Yokota 2022, arXiv 2203.03341). An infinite operand makes its outputs NaN.
#include "async_copy.cuh"
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "epilogue.cuh"
#include "implicit_gemm.cuh"
#include "tensor_core.cuh"

#ifndef TILE_M
#define ELEMENT Half    // of input, filter, residual, output: Half, BFloat16 or float
#define PRODUCTS 1      // TF32 products per fp32 product: 1, or 3 (ELEMENT float only)
#define TILE_M 128      // pixels per block
#define TILE_N 128      // filters per block
#define WARP_M 64       // pixels per warp
#define WARP_N 64       // filters per warp
#define NUM_STAGES 3    // slices of both operands in shared memory
#define VECTOR 8        // elements per global load: those of 16 bytes, or 1
#define MIN_BLOCKS 2    // blocks per multiprocessor that registers must allow
#endif

constexpr int TILE_K = ROW_BYTES / static_cast<int>(sizeof(ELEMENT));  // depth per slice
constexpr int STEPS = ROW_BYTES / 32;                                  // mma steps per slice
constexpr int WARPS_M = TILE_M / WARP_M, WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;
constexpr int BUFFERS = PRODUCTS == 1 ? 2 : 1;  // fragments of the next step beside this one's, where registers allow
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES;
static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "warps must cover the tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 32 == 0, "the epilogue trades 32 columns at a time");
static_assert(PRODUCTS == 1 || (PRODUCTS == 3 && sizeof(ELEMENT) == 4), "only fp32 is split");
static_assert(NUM_STAGES >= 2, "one slice is multiplied while others travel");

// One warp's share of a step: WARP_M pixels and WARP_N filters, 32 bytes deep.
struct Fragments {
    unsigned pixels[FRAGMENTS_M][4];
    unsigned filters[FRAGMENTS_N][2];

    // `pixel_row` and `filter_row` are this lane's addresses at step 0; a step moves 32 bytes along the swizzled row.
    __device__ __forceinline__ void load(unsigned pixel_row, unsigned filter_row, int step) {
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) {
            load_matrices(pixels[i], (pixel_row ^ step * 32) + i * 16 * ROW_BYTES);
        }
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

struct Accumulator {
    float sums[FRAGMENTS_M][FRAGMENTS_N][4] = {};

    __device__ __forceinline__ void add(Fragments& step) {
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
#pragma unroll
                for (int i = 0; i < FRAGMENTS_M; ++i) {
                    float product[4] = {};
                    mma<ELEMENT>(product, pixels_low[i], step.filters[j]);
                    mma<ELEMENT>(product, step.pixels[i], filters_low);
                    mma<ELEMENT>(product, step.pixels[i], step.filters[j]);
#pragma unroll
                    for (int v = 0; v < 4; ++v) sums[i][j][v] += product[v];
                }
            }
        }
    }

    // Split-K: leaves this block's sums in the workspace. The block that comes last adds those of all, in the order of
    // the depth, so that the result does not depend on who that is; it returns true and leaves the counter at 0.
    __device__ __forceinline__ bool reduce(float* workspace, int* counters) {
        const int slices = gridDim.z, tile = blockIdx.y * gridDim.x + blockIdx.x;
        float4* const partial = reinterpret_cast<float4*>(workspace) +
                                static_cast<long long>(tile) * slices * (FRAGMENTS_M * FRAGMENTS_N * THREADS) + threadIdx.x;
#pragma unroll
        for (int f = 0; f < FRAGMENTS_M * FRAGMENTS_N; ++f) {
            const float* v = sums[f / FRAGMENTS_N][f % FRAGMENTS_N];
            __stcg(&partial[(blockIdx.z * FRAGMENTS_M * FRAGMENTS_N + f) * THREADS], make_float4(v[0], v[1], v[2], v[3]));
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
#pragma unroll
        for (int f = 0; f < FRAGMENTS_M * FRAGMENTS_N; ++f) {
            float4 total = __ldcg(&partial[f * THREADS]);
            for (int slice = 1; slice < slices; ++slice) {
                const float4 v = __ldcg(&partial[(slice * FRAGMENTS_M * FRAGMENTS_N + f) * THREADS]);
                total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
            float* v = sums[f / FRAGMENTS_N][f % FRAGMENTS_N];
            v[0] = total.x, v[1] = total.y, v[2] = total.z, v[3] = total.w;
        }
        return true;
    }

    // Applies the epilogue to rows `m` and columns `n` (of the group, this warp's first) on, and stores.
    __device__ __forceinline__ void store(const Epilogue8<ELEMENT>& epilogue, ELEMENT* y, const Conv2dParams& params, int m,
                                          int n, int group) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; j += 4) {
            const int column = n + j * 8 + lane % 4 * 8;
            const int k = group * params.group_filters + column;
            const int columns = min(max(params.group_filters - column, 0), 8);
            float bias[8];
            epilogue.load_bias(bias, k, columns);
#pragma unroll
            for (int row = 0; row < 2 * FRAGMENTS_M; ++row) {
                float values[4][2];
#pragma unroll
                for (int f = 0; f < 4; ++f) {
                    values[f][0] = sums[row / 2][j + f][row % 2 * 2];
                    values[f][1] = sums[row / 2][j + f][row % 2 * 2 + 1];
                }
                transpose_quad(values, lane);
                const int pixel = m + row * 8 + lane / 4;
                if (pixel < params.gemm_m) {
                    epilogue.store<(VECTOR > 1)>(y, static_cast<long long>(pixel) * params.K + k, columns,
                                                 reinterpret_cast<const float(&)[8]>(values), bias);
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_mma(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias,
               const ELEMENT* residual, ELEMENT* y, float* workspace, int* counters, const Conv2dParams params) {
    extern __shared__ __align__(128) unsigned char shared[];
    PixelRow* const rows = reinterpret_cast<PixelRow*>(shared + NUM_STAGES * STAGE_BYTES);
    const int tiles_n = (params.group_filters + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / tiles_n * TILE_M, n0 = blockIdx.x % tiles_n * TILE_N, group = blockIdx.y;
    for (int i = threadIdx.x; i < TILE_M; i += THREADS) rows[i] = PixelRow(params, m0 + i, group);
    __syncthreads();

    const int all_slices = (params.gemm_k + TILE_K - 1) / TILE_K;
    const int begin = all_slices * blockIdx.z / gridDim.z, slices = all_slices * (blockIdx.z + 1) / gridDim.z - begin;
    using Loader = ChunkLoader<ELEMENT, VECTOR, THREADS>;
    Loader loader(params, begin * TILE_K);
    const ELEMENT* const group_filter = filter + (group * params.group_filters + n0) * params.gemm_k;
    const auto stage_of = [&](int slice) { return shared + slice % NUM_STAGES * STAGE_BYTES; };
    const auto load_filters = [&](const Loader& from, int slice) {
        if (slice < slices) {
            from.load_filters<TILE_N>(stage_of(slice) + TILE_M * ROW_BYTES, group_filter, params.group_filters - n0);
        }
    };
    const auto load_pixels = [&](int slice) {
        if (slice < slices) loader.load_pixels<TILE_M>(stage_of(slice), x, rows);
        copy_async_commit();  // possibly an empty group, so that counting groups counts slices
        loader.advance();
    };
    let_next_kernel_start();
    Loader ahead = loader;  // filters do not depend on earlier kernels
#pragma unroll
    for (int slice = 0; slice < NUM_STAGES - 1; ++slice) {
        load_filters(ahead, slice);
        ahead.advance();
    }
    wait_for_earlier_kernels();
#pragma unroll
    for (int slice = 0; slice < NUM_STAGES - 1; ++slice) load_pixels(slice);

    // ldmatrix: lanes 0–15 give the rows of a 16-row block of pixels, 16–31 the same rows 16 bytes further; for filters
    // lanes 0–7 and 8–15 give the two halves of 8 rows, 16–31 those of the next 8.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
    const unsigned base = shared_address(shared);
    const unsigned pixel_row = base + swizzled(warp_m + lane % 16, lane / 16);
    const unsigned filter_row = base + TILE_M * ROW_BYTES + swizzled(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);

    Accumulator accumulator;
    Fragments fragments[BUFFERS];
    copy_async_wait<NUM_STAGES - 2>();
    __syncthreads();
    fragments[0].load(pixel_row, filter_row, 0);
    int stage = 0;
    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step == STEPS - 1) {
                // All of this slice is in registers: past the barrier its stage may be overwritten, and the next slice,
                // which every thread has waited for, may be read.
                copy_async_wait<NUM_STAGES - 2>();
                __syncthreads();
                stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
            }
            const auto load_next = [&] {
                fragments[(step + 1) % BUFFERS].load(pixel_row + stage * STAGE_BYTES, filter_row + stage * STAGE_BYTES,
                                                     (step + 1) % STEPS);
            };
            if (BUFFERS == 2) load_next();
            if (step == 0) {
                load_filters(loader, slice + NUM_STAGES - 1);
                load_pixels(slice + NUM_STAGES - 1);
            }
            accumulator.add(fragments[step % BUFFERS]);
            if (BUFFERS == 1) load_next();
        }
    }
    copy_async_wait<0>();
    if (gridDim.z > 1 && !accumulator.reduce(workspace, counters)) return;
    accumulator.store({bias, residual, params.relu}, y, params, m0 + warp_m, n0 + warp_n, group);
}
