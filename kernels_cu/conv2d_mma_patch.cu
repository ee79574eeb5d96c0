// conv2d_mma_patch: conv2d_mma for stride 1, with the input of a tile kept in shared memory for all taps of the filter.
// @solves 2-D convolution of stride 1 on tensor cores, each input value fetched once per tile (fp16, bf16, TF32, fp32-accurate)
// @arch sm_80
// @arch_if SPLIT_K_CLUSTER=2 sm_90
// @arch_if SPLIT_K_CLUSTER=4 sm_90
// @arch_if SPLIT_K_CLUSTER=8 sm_90
//
// Equation   as conv2d_direct with stride 1, dilation 1, one group; sums in fp32.
// GEMM view  as conv2d_mma, but the depth is ordered (channel slice, r, s, channel in slice).
// Layouts    x NHWC, filter KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: tiles of filters × tiles of pixels (filters fastest); z: slices of the depth (split-K), SPLIT_K_CLUSTER where
//            that is more than 1. Block 32 · (TILE_M / WARP_M) · (TILE_N / WARP_N) threads.
// Shared     min(2, slices of C) · patch_rows · (Q + S − 1) · 128 + NUM_STAGES · TILE_N · 128 + 8 · patch_rows bytes,
//            dynamic; in a cluster 4 · TILE_M · TILE_N more.
// Requires   C a multiple of VECTOR = PER_CHUNK, K a multiple of 8.
// This rung  against conv2d_mma: the rows of the im2col matrix that a tile needs overlap: each input value occurs R·S times
//            in them. Here the padded rows of the image below the tile, the patch, are brought to shared memory once per
//            slice of channels, zeros included, and fragments for the taps are read from the same place at different
//            offsets. Only filters pass through the pipeline, so that the mainloop is left with few instructions beside
//            mma, and L2 with a fraction of the traffic. A tile is any TILE_M pixels in a row, also across images.
#include "async_copy.cuh"
#include "dependent_launch.cuh"

#ifndef TILE_M
#define ELEMENT Half       // of input, filter, residual, output: Half, BFloat16 or float
#define PRODUCTS 1         // TF32 products per fp32 product: 1, or 3 (ELEMENT float only)
#define TILE_M 128         // pixels per block
#define TILE_N 128         // filters per block
#define WARP_M 64          // pixels per warp
#define WARP_N 64          // filters per warp
#define NUM_STAGES 3       // slices of the filter in shared memory
#define VECTOR 8           // elements per global load: those of 16 bytes
#define MIN_BLOCKS 2       // blocks per multiprocessor that registers must allow
#define SPLIT_K_CLUSTER 1  // slices that meet in a cluster, or 1: any number meets in the workspace
#endif
#include "mma_tile.cuh"

static_assert(VECTOR == PER_CHUNK<ELEMENT>, "only whole chunks are loaded");
static_assert(THREADS % COLUMNS == 0 && TILE_N % (THREADS / COLUMNS) == 0, "passes must cover the filters");

// The image with its padding, and all images of the batch below each other: row n · (P + R − 1) + h of Q + S − 1 pixels.
struct PaddedRows {
    int rows, columns;  // of one padded image

    __device__ __forceinline__ PaddedRows(const Conv2dParams& params)
        : rows(params.P + params.R - 1), columns(params.Q + params.S - 1) {}

    // The row in which the window of output pixel m begins; its column is m % Q.
    __device__ __forceinline__ int first_row(const Conv2dParams& params, int m) const {
        const OutputPixel pixel = output_pixel(params, m);
        return pixel.n * rows + pixel.p;
    }
};

extern "C" __global__ void SLICES_IN_A_CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_mma_patch(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias,
                     const ELEMENT* residual, ELEMENT* y, float* workspace, int* counters, const int patch_rows,
                     const Conv2dParams params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int tiles_n = (params.K + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / tiles_n * TILE_M, n0 = blockIdx.x % tiles_n * TILE_N;
    const int taps = params.R * params.S, channel_slices = (params.C + TILE_K - 1) / TILE_K;
    const int begin = channel_slices * taps * blockIdx.z / gridDim.z;
    const int end = channel_slices * taps * (blockIdx.z + 1) / gridDim.z;
    const int first_channels = begin / taps, last_channels = (end - 1) / taps;
    const PaddedRows padded(params);
    const int patch_pixels = patch_rows * padded.columns;
    unsigned char* const filter_stages = shared + min(channel_slices, 2) * patch_pixels * ROW_BYTES;
    unsigned char* const received = filter_stages + NUM_STAGES * TILE_N * ROW_BYTES;
    long long* const row_offsets = reinterpret_cast<long long*>(received + RECEIVED_BYTES);

    const int last_m = min(m0 + TILE_M, params.gemm_m) - 1;
    const int top = padded.first_row(params, m0), rows = padded.first_row(params, last_m) + params.R - top;
    const int column = threadIdx.x % COLUMNS;
    const auto load_patch = [&](int channel_slice) {
        if (channel_slice > last_channels) return;
        unsigned char* const patch = shared + channel_slice % 2 * patch_pixels * ROW_BYTES;
        const int c = channel_slice * TILE_K + column * VECTOR;
        int pixel = threadIdx.x / COLUMNS, row = pixel / padded.columns, w = pixel % padded.columns - params.pad_w;
#pragma unroll 1
        while (row < rows) {
            const long long offset = row_offsets[row];
            const bool valid = offset >= 0 && w >= 0 && w < params.W && c < params.C;
            copy_async<16>(patch + swizzled(pixel, column), x + offset + w * params.C + c, valid);
            pixel += THREADS / COLUMNS;
            w += THREADS / COLUMNS;
            for (; w + params.pad_w >= padded.columns; w -= padded.columns) ++row;
        }
    };

    // The slice of the filter that is loaded next: its tap and first channel.
    const int filter_row0 = threadIdx.x / COLUMNS;
    int next_tap = begin % taps, next_channels = first_channels;
    const auto load_filters = [&](int slice) {
        if (slice >= end - begin) return;
        unsigned char* const stage = filter_stages + slice % NUM_STAGES * TILE_N * ROW_BYTES;
        const int c = next_channels * TILE_K + column * VECTOR;
        const ELEMENT* const source = filter + next_tap * params.C + c;
#pragma unroll
        for (int i = 0; i < TILE_N / (THREADS / COLUMNS); ++i) {
            const int row = filter_row0 + i * (THREADS / COLUMNS);
            const int k = min(n0 + row, params.K - 1);  // rows past the last repeat it: what they give is not stored
            copy_async<16>(stage + swizzled(row, column), source + k * params.gemm_k, c < params.C);
        }
        if (++next_tap == taps) next_tap = 0, ++next_channels;
    };

    let_next_kernel_start();
#if SPLIT_K_CLUSTER > 1
    ClusterReduction::prepare();
#endif
#pragma unroll
    for (int slice = 0; slice < NUM_STAGES - 1; ++slice) load_filters(slice);  // they do not depend on earlier kernels

    // Where in x each row of the patch begins, or a negative multiple of 16 bytes for a row of padding.
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        const int n = (top + i) / padded.rows, h = (top + i) % padded.rows - params.pad_h;
        const bool valid = h >= 0 && h < params.H;
        row_offsets[i] = valid ? (static_cast<long long>(n) * params.H + h) * params.W * params.C : -64;
    }
    __syncthreads();
#if SPLIT_K_CLUSTER > 1
    ClusterReduction::begin();
#endif
    wait_for_earlier_kernels();
    load_patch(first_channels);
    copy_async_commit();
    load_patch(first_channels + 1);  // with the second slice, the first that may need it
#pragma unroll
    for (int slice = 1; slice < NUM_STAGES - 1; ++slice) copy_async_commit();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
    const Epilogue8<ELEMENT> epilogue{bias, residual, params.relu};
#if SPLIT_K_CLUSTER > 1
    const ClusterReduction reduction(epilogue, params, m0, n0, 0);
#endif
    EpilogueInputs inputs[FRAGMENTS_N / 4];
    if constexpr (INPUTS_EARLY) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; j += 4) inputs[j / 4].load(epilogue, params, m0 + warp_m, n0 + warp_n + j * 8, 0);
    } else {
        prefetch_residual(residual, params, m0, n0, 0);
    }

    // Lanes 0–15 give the rows of a 16-row block of pixels to ldmatrix, lanes 16–31 the same rows 16 bytes further.
    int window[FRAGMENTS_M];  // where in the patch the windows of this lane's rows begin
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
        const int m = min(m0 + warp_m + i * 16 + lane % 16, last_m);
        window[i] = (padded.first_row(params, m) - top) * padded.columns + m % params.Q;
    }
    const unsigned base = shared_address(shared);
    const unsigned filter_row = shared_address(filter_stages) + filter_row_of_lane(warp_n, lane);

    Accumulator accumulator;
    Fragments fragments[BUFFERS];
    int stage = 0, r = begin % taps / params.S, s = begin % params.S, channels = first_channels;
    unsigned pixel_rows[FRAGMENTS_M];
    const auto move_to_tap = [&] {
        const int to_tap = r * padded.columns + s + min(channels, last_channels) % 2 * patch_pixels;
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) {
            const int pixel = window[i] + to_tap;
            pixel_rows[i] = base + pixel * ROW_BYTES + (((lane / 16) ^ (window[i] + r * padded.columns + s) % 8) * 16);
        }
    };
    const auto load_fragments = [&](int step) {
        fragments[step % BUFFERS].load([&](int i, int step) { return pixel_rows[i] ^ step * 32; },
                                       filter_row + stage * TILE_N * ROW_BYTES, step % STEPS);
    };
    move_to_tap();
    copy_async_wait<NUM_STAGES - 2>();
    __syncthreads();
    load_fragments(0);
    for (int slice = 0; slice < end - begin; ++slice) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step == STEPS - 1) {
                // All of this slice is in registers: past the barrier its stage may be overwritten, and the next slice,
                // which every thread has waited for, may be read.
                copy_async_wait<NUM_STAGES - 2>();
                __syncthreads();
                stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
                if (++s == params.S) {
                    s = 0;
                    if (++r == params.R) r = 0, ++channels;
                }
                move_to_tap();
            }
            if (BUFFERS == 2) load_fragments(step + 1);
            if (step == 0) {
                // At a patch's first tap the one before it has been read to the end.
                if (r + s == 0 && channels > first_channels) load_patch(channels + 1);
                load_filters(slice + NUM_STAGES - 1);
                copy_async_commit();  // possibly an empty group, so that counting groups counts slices
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
    accumulator.store<INPUTS_EARLY>(inputs, epilogue, y, params, m0 + warp_m, n0 + warp_n, 0);
#endif
}
