// conv2d_wgmma_patch_split_k: conv2d_wgmma_patch where there are few tiles: the blocks of a cluster share one, each a part of
// its depth.
// @solves stride-1 convolution of few outputs on the tensor cores of compute capability 9.0 (fp16, bf16, TF32)
// @arch sm_90a
//
// Equation   as conv2d_wgmma_patch.
// GEMM view  as conv2d_wgmma_patch; the slices of channels are dealt out in SPLIT_K_CLUSTER runs, each slice with all taps.
// Layouts    as conv2d_wgmma_patch.
// Grid       x: tiles, filters fastest; z: SPLIT_K_CLUSTER runs of slices, a cluster.
//            Block 320 threads: two consumer warpgroups and two producer warps, one thread of which asks for filters, one of
//            the other for patches.
// Shared     2 patches, num_stages · 64 · 128 bytes of filter, 64 · PIXELS sums; see PatchTile and
//            cupy_resnet/conv2d/wgmma_patch.py.
// Requires   C a multiple of 128 bytes, and SPLIT_K_CLUSTER times that or more; K of 8.
// This rung  against conv2d_wgmma_patch: a block has a single tile, on which both consumers work at once, each on half of the
//            pixels. Wide tiles fetch least by far, the filter as well as the pixels, but there are few of them, and a slice
//            of channels is much work: so a cluster shares out the slices. Sums go straight from registers into the shared
//            memory of the blocks of the cluster, each of which finishes a share of the pixels. The first filters, which
//            depend on no earlier kernel, are on their way before these have finished.
#include "cluster.cuh"
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef PIXELS
#define ELEMENT Half       // of input, filter, residual, output: Half, BFloat16, or float (TF32)
#define PIXELS 128         // columns of the product: a multiple of 16 and of 8 · SPLIT_K_CLUSTER
#define HALF_PIXELS 64     // a consumer's: PIXELS / 2, as a number
#define ACCUMULATORS 32    // HALF_PIXELS / 2, as a number
#define SPLIT_K_CLUSTER 2  // blocks that share a tile: 2, 4 or 8
#endif

#if HALF_PIXELS != 64 && HALF_PIXELS != 128
WARPGROUP_MMA_OF_ALL(HALF_PIXELS, ACCUMULATORS)
#endif

#include "partial_sums.cuh"
#include "patch_tile.cuh"

constexpr int CONSUMERS = 2, FINISHERS = CONSUMERS * WARPGROUP, PRODUCERS = 2, THREADS = FINISHERS + PRODUCERS * 32;
constexpr int SHARE = PIXELS / SPLIT_K_CLUSTER;  // columns of the product that a block finishes
// A row for each column of the product. In it filters g and g + 8 of every 16 are neighbours, as they are in registers: filter
// 16w + 8h + g is the one at 16w + 2g + h.
using Received = PartialSums<SPLIT_K_CLUSTER, SHARE, FILTERS, FINISHERS>;
static_assert(PIXELS == 2 * HALF_PIXELS && HALF_PIXELS == 2 * ACCUMULATORS && HALF_PIXELS % 8 == 0, "both halves are alike");
static_assert(HALF_PIXELS % SHARE == 0 && SHARE % 8 == 0, "eight columns go to the same block");

struct Barriers : PatchBarriers {
    unsigned long long received;  // all partial sums of this block's columns have come
};

// The products of this consumer's half of the pixels.
__device__ __forceinline__ void multiply(float (&sums)[HALF_PIXELS / 2], Barriers& barriers, unsigned patches, unsigned stages,
                                         const PatchTile& shape, const Conv2dParams& params, int chunks, int consumer) {
    const bool elected = threadIdx.x % WARPGROUP == 0;
    const unsigned half = patches + consumer * HALF_PIXELS * ROW_BYTES;
    Place stage{0, 0}, patch{0, 0};
    int previous_stage = 0, previous_patch = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(shared_address(&barriers.patch_full[patch.stage]), patch.parity);
        const unsigned long long b = operand(half + patch.stage * shape.patch_bytes);
        for (int r = 0; r < params.R; ++r) {
            for (int s = 0; s < params.S; ++s) {
                barrier_wait(shared_address(&barriers.full[stage.stage]), stage.parity);
                const unsigned long long a = operand(stages + stage.stage * STAGE_BYTES);
                multiply_tap<HALF_PIXELS>(sums, a, b, r * shape.columns + s, chunk + r + s);
                warpgroup_wait<1>();  // the slice before has been read
                if (elected && chunk + r + s > 0) {
                    barrier_arrive(shared_address(&barriers.empty[previous_stage]));
                    if (r + s == 0) barrier_arrive(shared_address(&barriers.patch_empty[previous_patch]));
                }
                previous_stage = stage.stage;
                stage.next(shape.num_stages);
            }
        }
        previous_patch = patch.stage;
        patch.next(PATCHES);
    }
    warpgroup_wait<0>();  // nobody waits for the last stages to be given back
    warpgroup_results(sums);
}

// Hands this consumer's sums to the blocks that finish their columns.
__device__ __forceinline__ void send(const float (&sums)[HALF_PIXELS / 2], unsigned char* received, unsigned all_received,
                                     int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, quad = warp * 4 + lane / 8;
    const auto row_of = [&](int j) { return j / 2 * 8 + lane % 4 * 2 + j % 2; };
#pragma unroll
    for (int share = 0; share < HALF_PIXELS / SHARE; ++share) {
        Received::send<SHARE / 4>(
            received, all_received, consumer * (HALF_PIXELS / SHARE) + share,
            [&](int j) {
                return Received::row_offset(blockIdx.z, row_of(j)) + Received::swizzled_quad(row_of(j), quad) + lane / 4 % 2 * 8;
            },
            [&](int j) {
                const float* const first = &sums[share * SHARE / 2 + j / 2 * 4 + j % 2];
                return make_float2(first[0], first[2]);  // filters g and g + 8
            });
    }
}

// A thread's share of what the block finishes: 16 filters of a pixel at a time.
struct Share {
    static constexpr int SIXTEENS = FILTERS / 16, ROWS = FINISHERS / SIXTEENS, PASSES = (SHARE + ROWS - 1) / ROWS;

    // Of 8 lanes the last 4, which read in another order (see add_up), have the upper two sixteens: other banks than the rest.
    const int sixteen = threadIdx.x / 4 % 2 * 2 + threadIdx.x % 2, row = threadIdx.x / 8 * 2 + threadIdx.x / 2 % 2;
    int columns[2];
    long long offsets[PASSES];  // in y; negative: none
    float bias[2][8];
    Chunk residuals[PASSES][2][Epilogue8<ELEMENT>::CHUNKS];

    // Loads what is needed beside sums, to be there when they are. `first`: of the block's columns of the product.
    __device__ __forceinline__ Share(const Epilogue8<ELEMENT>& epilogue, const PatchTile& shape, const Conv2dParams& params,
                                     const Tile& tile, int first) {
        const int k = tile.k + sixteen * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            columns[i] = min(max(params.K - k - i * 8, 0), 8);
            epilogue.load_bias(bias[i], k + i * 8, columns[i]);
        }
        const long long first_pixel = tile.first_pixel(params);
        const int pixels = tile.pixels(shape, params);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int at = row + pass * ROWS, pixel = at < SHARE ? pixel_at(first + at, shape, params) : NO_PIXEL;
            const bool exists = pixel < pixels;
            offsets[pass] = exists ? (first_pixel + pixel) * params.K + k : -1;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                epilogue.load_residual<true>(residuals[pass][i], offsets[pass] + i * 8, exists ? columns[i] : 0);
            }
        }
    }

    // Once all have come, and behind a barrier of those who send, adds up the sums of this block's columns in the order of
    // the depth, applies the epilogue, and stores what is an output.
    __device__ __forceinline__ void finish(const unsigned char* received, unsigned all_received,
                                           const Epilogue8<ELEMENT>& epilogue, ELEMENT* y) const {
        barrier_wait(all_received, 0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (offsets[pass] < 0) continue;
            float low[8], high[8];
            Received::add_up(low, received, row + pass * ROWS, sixteen * 2);
            Received::add_up(high, received, row + pass * ROWS, sixteen * 2 + 1);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float eight[8] = {low[i],  low[i + 2],  low[i + 4],  low[i + 6],
                                        high[i], high[i + 2], high[i + 4], high[i + 6]};
                epilogue.store<true>(y, offsets[pass] + i * 8, columns[i], eight, bias[i], residuals[pass][i]);
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(1, 1, SPLIT_K_CLUSTER) __launch_bounds__(THREADS, 1)
    conv2d_wgmma_patch_split_k(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                               const float* __restrict__ bias, const ELEMENT* residual, ELEMENT* y, const PatchTile shape,
                               const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
        barriers.prepare(shape, CONSUMERS);
        barrier_init(shared_address(&barriers.received), 1);
        barrier_init_done();
        barrier_arrive_expecting(shared_address(&barriers.received), (SPLIT_K_CLUSTER - 1) * Received::PART_SIZE);
    }
    write_zeros_behind_patches(shared, shape, THREADS);
    __syncthreads();
    cluster_arrive_relaxed();
    const Tile tile(blockIdx.x, (params.K + FILTERS - 1) / FILTERS, shape);
    const int all_chunks = params.C / SLICE_CHANNELS, rank = blockIdx.z;
    const int begin = all_chunks * rank / SPLIT_K_CLUSTER, end = all_chunks * (rank + 1) / SPLIT_K_CLUSTER;
    const unsigned patches = shared_address(shared), stages = patches + PATCHES * shape.patch_bytes;
    unsigned char* const received = shared + PATCHES * shape.patch_bytes + shape.num_stages * STAGE_BYTES;

    let_next_kernel_start();
    const int consumer = this_warpgroup();
    if (consumer == CONSUMERS) {
        Place place{0, 1};  // the phase before the first counts as complete: all places are free
        if (threadIdx.x == FINISHERS) {
            for (int chunk = begin; chunk < end; ++chunk) {
                fetch_taps(filters, barriers, stages, place, shape, params, tile, chunk * SLICE_CHANNELS);
            }
        } else if (threadIdx.x == FINISHERS + 32) {
            prefetch_map(pixels);
            wait_for_earlier_kernels();
            for (int chunk = begin; chunk < end; ++chunk) {
                fetch_patch(pixels, barriers, patches, place, shape, params, tile, chunk * SLICE_CHANNELS);
            }
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    wait_for_earlier_kernels();  // the residual is one's work, and another may still read what y replaces
    const Epilogue8<ELEMENT> epilogue{bias, residual, params.relu};
    const Share share(epilogue, shape, params, tile, rank * SHARE);
    cluster_wait();  // all blocks have begun, and may be sent sums
    float sums[HALF_PIXELS / 2];
    multiply(sums, barriers, patches, stages, shape, params, end - begin, consumer);
    send(sums, received, shared_address(&barriers.received), consumer);
    warpgroups_sync<CONSUMERS>(1);  // what was not sent is there
    share.finish(received, shared_address(&barriers.received), epilogue, y);
}
