// conv2d_wgmma_split_k: conv2d_wgmma where there are few tiles: the blocks of a cluster share one, each a part of its depth.
// @solves 2-D convolution of few outputs and a large depth on the tensor cores of compute capability 9.0 (fp16, bf16, TF32)
// @arch sm_90a
//
// Equation   as conv2d_wgmma.
// GEMM view  as conv2d_wgmma; the slices of the depth, those of the shortcut last, are dealt out in SPLIT_K_CLUSTER runs.
// Layouts    as conv2d_wgmma.
// Grid       x: tiles, filters fastest; z: SPLIT_K_CLUSTER runs of slices, a cluster.
//            Block 320 threads: two consumer warpgroups and two producer warps, one thread of which asks for filters, one of
//            the other for pixels: a request takes a thread 0.07 µs.
// Shared     NUM_STAGES · (TILE_M + TILE_N) · 128 + 128 · TILE_N · 4 bytes, dynamic.
// Requires   C a multiple of 128 bytes, the shortcut's as well, K of 8; 2 · SPLIT_K_CLUSTER slices or more.
// This rung  against conv2d_wgmma: a block has a single tile, on which both consumers work at once: each on 64 of its 128
//            rows, or, of 64 rows, each on every other slice. Their sums go straight from registers into the shared memory
//            of the blocks of the cluster, each of which finishes a share of the rows. What does not depend on earlier
//            kernels, the first filters, is on its way before these have finished. What a block finishes itself does not leave it.
#include "cluster.cuh"
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef TILE_M
#define ELEMENT Half       // of input, filter, residual, output: Half, BFloat16, or float (TF32)
#define TILE_M 64          // pixels per tile: 64 or 128
#define TILE_N 64          // filters per tile: 64 or 128
#define NUM_STAGES 8       // slices of both operands in shared memory
#define SPLIT_K_CLUSTER 2  // blocks that share a tile: 2, 4 or 8
#endif
#include "partial_sums.cuh"

constexpr int CONSUMERS = 2, WARPGROUP = 128, FINISHERS = CONSUMERS * WARPGROUP, PRODUCERS = 2;
constexpr int THREADS = FINISHERS + PRODUCERS * 32;
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT)), STEPS = ROW_BYTES / 32;
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES, STAGE_BYTES = PIXEL_BYTES + TILE_N * ROW_BYTES;
// Consumers that a slice is dealt out to in turn; otherwise both read it, each its own rows.
constexpr int PARTS = CONSUMERS * 64 / TILE_M, READERS = CONSUMERS / PARTS;
constexpr int ROWS = TILE_M / SPLIT_K_CLUSTER;  // of the tile, that a block finishes
using Received = PartialSums<SPLIT_K_CLUSTER * PARTS, ROWS, TILE_N, FINISHERS>;
static_assert(TILE_M == 64 || TILE_M == 128, "64 rows for each of the sums of a consumer");
static_assert(ROWS % 8 == 0, "8 rows of sums go to the same block");
// Parities tell two phases of a stage apart: whoever waits for one must have seen the one before.
static_assert(NUM_STAGES % PARTS == 0 && NUM_STAGES > PARTS, "a stage belongs to the same consumer every time");

struct Barriers {
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];  // of the stages
    unsigned long long received;                             // all partial sums of this block's rows have come
};

// Fetches slices from `slice` on, first those of taps, of which there are `of_taps`, then the shortcut's, which `fetch` is told
// by its second argument. Each kind has a loop of its own, so that nothing is decided in it.
template <typename Fetch>
__device__ __forceinline__ void in_turn(int slice, int end, int of_taps, const Fetch& fetch) {
    for (; slice < min(end, of_taps); ++slice) fetch(slice, false);
    for (; slice < end; ++slice) fetch(slice, true);
}

// Asks for the filters of `slices` slices of the tile at n0 from slice `begin` on, as stages become free: the first at once.
__device__ __forceinline__ void produce_filters(const TensorMap& filters, const TensorMap& shortcut, Barriers& barriers,
                                                unsigned stages, const Conv2dParams& params, int n0, int begin, int slices) {
    const int all_taps = params.R * params.S * (params.C / SLICE_CHANNELS), of_taps = min(max(all_taps - begin, 0), slices);
    Place place{0, 1};  // the phase before the first counts as complete: all stages are free
    in_turn(0, slices, of_taps, [&](int slice, bool adding) {
        const unsigned full = shared_address(&barriers.full[place.stage]);
        const int number = begin + slice - (adding ? all_taps : 0);
        barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);
        barrier_arrive_expecting(full, STAGE_BYTES - PIXEL_BYTES);
        fetch_box(stages + place.stage * STAGE_BYTES + PIXEL_BYTES, adding ? shortcut : filters, full, number * SLICE_CHANNELS,
                  n0);
        place.next(NUM_STAGES);
    });
}

// The same for the pixels of the tile at m0, when earlier kernels have written them.
__device__ __forceinline__ void produce_pixels(const TensorMap& pixels, const TensorMap& shortcut, Barriers& barriers,
                                               unsigned stages, const Conv2dParams& params, int m0, int begin, int slices) {
    const int per_tap = params.C / SLICE_CHANNELS, all_taps = params.R * params.S * per_tap;
    const OutputPixel first = output_pixel(params, m0);
    const int w = first.q * params.stride_w - params.pad_w, h = first.p * params.stride_h - params.pad_h;
    const int tap = min(begin / per_tap, params.R * params.S);
    int c = (begin - tap * per_tap) * SLICE_CHANNELS, s = tap % params.S, r = tap / params.S;
    Place place{0, 1};
    wait_for_earlier_kernels();
    in_turn(0, slices, min(max(all_taps - begin, 0), slices), [&](int, bool adding) {
        const unsigned full = shared_address(&barriers.full[place.stage]), target = stages + place.stage * STAGE_BYTES;
        barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);
        barrier_arrive_expecting(full, PIXEL_BYTES);
        if (adding) {
            const int step = params.shortcut_stride;
            fetch_im2col(target, shortcut, full, c, first.q * step, first.p * step, first.n, 0, 0);
        } else {
            fetch_im2col(target, pixels, full, c, w, h, first.n, s * params.dilation_w, r * params.dilation_h);
        }
        c += SLICE_CHANNELS;
        if (!adding && c == params.C) c = 0, ++s;
        if (!adding && s == params.S) s = 0, ++r;
        place.next(NUM_STAGES);
    });
}

// The products of this consumer: of its rows or of its slices.
__device__ __forceinline__ void multiply(float (&sums)[TILE_N / 2], Barriers& barriers, unsigned stages, int slices,
                                         int consumer) {
    const bool elected = threadIdx.x % WARPGROUP == 0;
    const int first = PARTS > 1 ? consumer : 0, row = PARTS > 1 ? 0 : consumer * 64;
    int stage = first, parity = 0, previous = 0;
    for (int slice = first; slice < slices; slice += PARTS) {
        barrier_wait(shared_address(&barriers.full[stage]), parity);
        const unsigned begin = stages + stage * STAGE_BYTES;
        const unsigned long long a = operand(begin + row * ROW_BYTES), b = operand(begin + PIXEL_BYTES);
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            warpgroup_mma<ELEMENT, TILE_N>(sums, a + step * 32 / 16, b + step * 32 / 16, slice + step > first);
        }
        warpgroup_commit();
        warpgroup_wait<1>();  // the slice before has been read
        if (slice > first && elected) barrier_arrive(shared_address(&barriers.empty[previous]));
        previous = stage;
        stage += PARTS;
        if (stage >= NUM_STAGES) stage -= NUM_STAGES, parity ^= 1;
    }
    warpgroup_wait<0>();  // nobody waits for the last stages to be given back
}

// Hands this consumer's sums to the blocks that finish their rows.
__device__ __forceinline__ void send(const float (&sums)[TILE_N / 2], unsigned char* received, unsigned all_received,
                                     int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int part = blockIdx.z * PARTS + (PARTS > 1 ? consumer : 0), row0 = (PARTS > 1 ? 0 : consumer * 64) + warp * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Received::send_row<TILE_N / 8>(received, all_received, part, row0 + half * 8 + lane / 4, lane % 4 / 2, [&](int j) {
            const float* const first = &sums[j * 4 + half * 2];
            return make_float2(first[0], first[1]);
        });
    }
}

extern "C" __global__ void __cluster_dims__(1, 1, SPLIT_K_CLUSTER) __launch_bounds__(THREADS, 1)
    conv2d_wgmma_split_k(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                         const __grid_constant__ TensorMap shortcut_pixels, const __grid_constant__ TensorMap shortcut_filters,
                         const float* __restrict__ bias, const ELEMENT* residual, ELEMENT* y, const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            barrier_init(shared_address(&barriers.full[i]), PRODUCERS);
            barrier_init(shared_address(&barriers.empty[i]), READERS);
        }
        barrier_init(shared_address(&barriers.received), 1);
        barrier_init_done();
        barrier_arrive_expecting(shared_address(&barriers.received), (SPLIT_K_CLUSTER - 1) * PARTS * Received::PART_SIZE);
    }
    __syncthreads();
    cluster_arrive_relaxed();
    const int tiles_n = (params.K + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / tiles_n * TILE_M, n0 = blockIdx.x % tiles_n * TILE_N, rank = blockIdx.z;
    const int all_slices =
        params.R * params.S * (params.C / SLICE_CHANNELS) + params.shortcut_channels / SLICE_CHANNELS;
    const int begin = all_slices * rank / SPLIT_K_CLUSTER, slices = all_slices * (rank + 1) / SPLIT_K_CLUSTER - begin;
    const unsigned stages = shared_address(shared);
    unsigned char* const received = shared + NUM_STAGES * STAGE_BYTES;

    let_next_kernel_start();
    const int consumer = this_warpgroup();
    if (consumer == CONSUMERS) {
        if (threadIdx.x == FINISHERS) {
            produce_filters(filters, shortcut_filters, barriers, stages, params, n0, begin, slices);
        } else if (threadIdx.x == FINISHERS + 32) {
            prefetch_map(pixels);
            produce_pixels(pixels, shortcut_pixels, barriers, stages, params, m0, begin, slices);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    wait_for_earlier_kernels();  // the residual is one's work, and another may still read what y replaces
    const Epilogue8<ELEMENT> epilogue{bias, residual, params.relu};
    const Received::Share<true> share(epilogue, params, m0 + rank * ROWS, n0, 0);
    cluster_wait();  // all blocks have begun, and may be sent sums
    float sums[TILE_N / 2];
    multiply(sums, barriers, stages, slices, consumer);
    send(sums, received, shared_address(&barriers.received), consumer);
    warpgroups_sync<CONSUMERS>(1);  // what was not sent is there
    share.finish(received, shared_address(&barriers.received), epilogue, y);
}
