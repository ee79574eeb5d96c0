// conv2d_mma: implicit GEMM on tensor cores through mma.sync. The production kernel in every precision but plain fp32.
// @solves 2-D convolution as a matrix product on tensor cores (fp16, bf16, TF32, fp32-accurate; any shape)
// @arch sm_80
// @arch_if SPLIT_K_CLUSTER=2 sm_90
// @arch_if SPLIT_K_CLUSTER=4 sm_90
// @arch_if SPLIT_K_CLUSTER=8 sm_90
//
// Equation   as conv2d_direct, sums in fp32.
// GEMM view  as conv2d_implicit_gemm: gemm_m = N·P·Q pixels, gemm_n = K/groups filters, gemm_k = R·S·C/groups.
// Layouts    x NHWC, filter KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: tiles of filters × tiles of pixels (filters fastest); y: groups; z: slices of the depth (split-K),
//            SPLIT_K_CLUSTER where that is more than 1. Block 32 · (TILE_M / WARP_M) · (TILE_N / WARP_N) threads.
// Shared     NUM_STAGES · (TILE_M + TILE_N) · 128 + 16 · TILE_M bytes, dynamic; in a cluster 4 · TILE_M · TILE_N more.
// Requires   VECTOR > 1: channels per group a multiple of VECTOR, filters and filters per group multiples of 8.
// This rung  against conv2d_wmma: the layout of fragments is known, so ldmatrix can read shared memory that is swizzled
//            instead of padded, a pipeline of cp.async stages replaces the loads through registers, and the epilogue
//            happens in registers: four lanes that hold pieces of the same rows trade them by shuffles, and each
//            stores 8 neighbouring outputs. Fragments of the next step are loaded while this one is multiplied.
//
// PRODUCTS = 3 splits every fp32 operand into two TF32 parts, a = high + low, and forms low·high + high·low + high·high:
// 21 bits of each mantissa take part. Tensor cores round their sums toward zero, which is harmless within one product
// but adds up over a depth of thousands; so each step of 8 starts from zero and is added outside, in fp32 with rounding
// to nearest (Ootomo and Yokota 2022, arXiv 2203.03341), and the low part of the filter makes up for what rounding within a
// step takes on average. The four steps of a slice are added up before the total takes them: as many additions, of which one
// in four rounds a large number. An infinite operand makes its outputs NaN.
#include "async_copy.cuh"
#include "dependent_launch.cuh"

#ifndef TILE_M
#define ELEMENT Half       // of input, filter, residual, output: Half, BFloat16 or float
#define PRODUCTS 1         // TF32 products per fp32 product: 1, or 3 (ELEMENT float only)
#define TILE_M 128         // pixels per block
#define TILE_N 128         // filters per block
#define WARP_M 64          // pixels per warp
#define WARP_N 64          // filters per warp
#define NUM_STAGES 3       // slices of both operands in shared memory
#define VECTOR 8           // elements per global load: those of 16 bytes, or 1
#define MIN_BLOCKS 2       // blocks per multiprocessor that registers must allow
#define SPLIT_K_CLUSTER 1  // slices that meet in a cluster, or 1: any number meets in the workspace
#endif
#include "mma_tile.cuh"

constexpr int STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES;
// Whether where the first slices' pixels lie is computed before earlier kernels are waited for. Of small tiles there are few,
// so that a block's start counts; of large ones a block begins while another one multiplies.
constexpr bool FOUND_EARLY = VECTOR > 1 && TILE_M * TILE_N <= 64 * 64;
static_assert(NUM_STAGES >= 2, "one slice is multiplied while others travel");

extern "C" __global__ void SLICES_IN_A_CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_mma(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias,
               const ELEMENT* residual, ELEMENT* y, float* workspace, int* counters, const Conv2dParams params) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* const received = shared + NUM_STAGES * STAGE_BYTES;
    PixelRow* const rows = reinterpret_cast<PixelRow*>(received + RECEIVED_BYTES);
    const int tiles_n = (params.group_filters + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / tiles_n * TILE_M, n0 = blockIdx.x % tiles_n * TILE_N, group = blockIdx.y;
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
        if (slice < slices) {
            loader.load_pixels<TILE_M>(stage_of(slice), x, rows);
            loader.advance();
        }
        copy_async_commit();  // possibly an empty group, so that counting groups counts slices
    };
    let_next_kernel_start();
#if SPLIT_K_CLUSTER > 1
    ClusterReduction::prepare();
#endif
    Loader ahead = loader;  // filters do not depend on earlier kernels, nor on where pixels lie: they come first
#pragma unroll
    for (int slice = 0; slice < NUM_STAGES - 1; ++slice) {
        load_filters(ahead, slice);
        ahead.advance();
    }
    for (int i = threadIdx.x; i < TILE_M; i += THREADS) rows[i] = PixelRow(params, m0 + i, group);
    __syncthreads();
#if SPLIT_K_CLUSTER > 1
    ClusterReduction::begin();
#endif
    Loader::PixelSources<TILE_M> early[NUM_STAGES - 1];
    if constexpr (FOUND_EARLY) {
#pragma unroll
        for (int slice = 0; slice < NUM_STAGES - 1; ++slice) {
            if (slice >= slices) continue;
            early[slice] = loader.pixel_sources<TILE_M>(x, rows);
            loader.advance();
        }
    }
    wait_for_earlier_kernels();
#pragma unroll
    for (int slice = 0; slice < NUM_STAGES - 1; ++slice) {
        if constexpr (FOUND_EARLY) {
            if (slice < slices) Loader::copy_pixels<TILE_M>(stage_of(slice), early[slice]);
            copy_async_commit();
        } else {
            load_pixels(slice);
        }
    }

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
    const Epilogue8<ELEMENT> epilogue{bias, residual, params.relu};
#if SPLIT_K_CLUSTER > 1
    const ClusterReduction reduction(epilogue, params, m0, n0, group);
#endif
    EpilogueInputs inputs[FRAGMENTS_N / 4];
    if constexpr (INPUTS_EARLY) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; j += 4) inputs[j / 4].load(epilogue, params, m0 + warp_m, n0 + warp_n + j * 8, group);
    } else {
        prefetch_residual(residual, params, m0, n0, group);
    }

    // Lanes 0–15 give the rows of a 16-row block of pixels to ldmatrix, lanes 16–31 the same rows 16 bytes further.
    const unsigned base = shared_address(shared);
    const unsigned pixel_row = base + swizzled(warp_m + lane % 16, lane / 16);
    const unsigned filter_row = base + TILE_M * ROW_BYTES + filter_row_of_lane(warp_n, lane);

    Accumulator accumulator;
    Fragments fragments[BUFFERS];
    int stage = 0;
    const auto load_fragments = [&](int step) {
        fragments[step % BUFFERS].load(
            [&](int i, int step) { return ((pixel_row + stage * STAGE_BYTES) ^ step * 32) + i * 16 * ROW_BYTES; },
            filter_row + stage * STAGE_BYTES, step % STEPS);
    };
    copy_async_wait<NUM_STAGES - 2>();
    __syncthreads();
    load_fragments(0);
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
            if (BUFFERS == 2) load_fragments(step + 1);
            if (step == 0) {
                load_filters(loader, slice + NUM_STAGES - 1);
                load_pixels(slice + NUM_STAGES - 1);
            }
            accumulator.add(fragments[step % BUFFERS], step);
            if (BUFFERS == 1) load_fragments(step + 1);
        }
    }
    copy_async_wait<0>();
#if SPLIT_K_CLUSTER > 1
    reduction.finish(accumulator, received, warp_m, warp_n, epilogue, y);
#else
    if (gridDim.z > 1 && !accumulator.reduce(workspace, counters)) return;
    accumulator.store<INPUTS_EARLY>(inputs, epilogue, y, params, m0 + warp_m, n0 + warp_n, group);
#endif
}
