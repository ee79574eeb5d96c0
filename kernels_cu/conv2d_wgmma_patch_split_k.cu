// conv2d_wgmma_patch_split_k: conv2d_wgmma_patch where there are few tiles: the blocks of a cluster share one, each a part of
// its depth.
// @solves 2-D convolution of stride 1 that keeps the size, of few outputs, on the tensor cores of capability 9.0 (fp16, bf16)
// @arch sm_90a
//
// Equation   as conv2d_wgmma_patch.
// GEMM view  as conv2d_wgmma_patch; the slices of channels are dealt out in SPLIT_K_CLUSTER runs, each slice with all taps.
// Layouts    as conv2d_wgmma_patch.
// Grid       x: tiles, filters fastest; z: SPLIT_K_CLUSTER runs of slices, a cluster.
//            Block 288 threads: two consumer warpgroups and a producer warp, of which one thread works.
// Shared     2 patches, num_stages · 64 · 128 bytes of filter, 64 · PIXELS sums; see PatchTile and
//            cupy_resnet/conv2d/wgmma_patch.py.
// Requires   C a multiple of 64, and SPLIT_K_CLUSTER times that or more; K of 8.
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
#define ELEMENT Half       // of input, filter, residual, output: Half or BFloat16
#define PIXELS 208         // columns of the product: a multiple of 16 and of SPLIT_K_CLUSTER
#define HALF_PIXELS 104    // a consumer's: PIXELS / 2, as a number
#define ACCUMULATORS 52    // HALF_PIXELS / 2, as a number
#define SPLIT_K_CLUSTER 4  // blocks that share a tile: 1, 2, 4 or 8
#endif

#if HALF_PIXELS != 64 && HALF_PIXELS != 128
WARPGROUP_MMA_OF_BYTES_2(HALF_PIXELS, ACCUMULATORS)
#endif

#include "partial_sums.cuh"
#include "patch_tile.cuh"

constexpr int FINISHERS = CONSUMERS * WARPGROUP, THREADS = FINISHERS + 32;
constexpr int SHARE = PIXELS / SPLIT_K_CLUSTER;  // columns of the product that a block finishes
// A row for each column of the product. In it filters g and g + 8 of every 16 are neighbours, as they are in registers: filter
// 16w + 8h + g is the one at 16w + 2g + h.
using Received = PartialSums<SPLIT_K_CLUSTER, SHARE, FILTERS, FINISHERS>;
static_assert(PIXELS == 2 * HALF_PIXELS && HALF_PIXELS == 2 * ACCUMULATORS && HALF_PIXELS % 8 == 0, "both halves are alike");
static_assert(PIXELS % SPLIT_K_CLUSTER == 0 && SHARE >= 8, "shares are alike, and eight columns go to two blocks at most");

struct Barriers {
    unsigned long long full[MAX_STAGES], empty[MAX_STAGES];  // of the filter's stages
    unsigned long long patch_full[PATCHES], patch_empty[PATCHES];
    unsigned long long received;  // all partial sums of this block's columns have come
};

// Asks for `chunks` slices of channels of a tile from channel c0 on, the patch and the filter's taps of each, as their places
// become free.
__device__ __forceinline__ void produce(const TensorMap& pixels, const TensorMap& filters, Barriers& barriers, unsigned patches,
                                        unsigned stages, const PatchTile& shape, const Conv2dParams& params, const Tile& tile,
                                        int c0, int chunks) {
    const int taps = params.R * params.S, early = min(chunks * taps, shape.num_stages);
    const auto fetch_filters = [&](int slice, int stage) {
        const unsigned full = shared_address(&barriers.full[stage]);
        const int chunk = slice / taps, tap = slice - chunk * taps;
        barrier_arrive_expecting(full, STAGE_BYTES);
        fetch_box(stages + stage * STAGE_BYTES, filters, full, tap * params.C + c0 + chunk * SLICE_CHANNELS, tile.k);
    };
    const auto fetch_patch = [&](int chunk, int place) {
        const unsigned full = shared_address(&barriers.patch_full[place]);
        barrier_arrive_expecting(full, shape.box_bytes);
        fetch_box(patches + place * shape.patch_bytes, pixels, full, c0 + chunk * SLICE_CHANNELS, -params.pad_w,
                  tile.p - params.pad_h, tile.n);
    };
    prefetch_map(pixels);
    for (int slice = 0; slice < early; ++slice) fetch_filters(slice, slice);
    wait_for_earlier_kernels();
    for (int chunk = 0; chunk < min(chunks, PATCHES); ++chunk) fetch_patch(chunk, chunk);
    Place stage{0, 0}, patch{0, 0};
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk >= PATCHES) {
            barrier_wait(shared_address(&barriers.patch_empty[patch.stage]), patch.parity);
            fetch_patch(chunk, patch.stage);
            patch.advance(1, PATCHES);
        }
        for (int slice = max(early, chunk * taps); slice < (chunk + 1) * taps; ++slice) {
            barrier_wait(shared_address(&barriers.empty[stage.stage]), stage.parity);
            fetch_filters(slice, stage.stage);
            stage.advance(1, shape.num_stages);
        }
    }
}

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
                stage.advance(1, shape.num_stages);
            }
        }
        previous_patch = patch.stage;
        patch.advance(1, PATCHES);
    }
    warpgroup_wait<0>();  // nobody waits for the last stages to be given back
}

// Sends this consumer's sums to the blocks that finish their columns.
__device__ __forceinline__ void send(const float (&sums)[HALF_PIXELS / 2], unsigned received, unsigned all_received,
                                     int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, quad = warp * 4 + lane / 8;
    const int rank0 = consumer * HALF_PIXELS / SHARE, row0 = consumer * HALF_PIXELS % SHARE;
#pragma unroll
    for (int j = 0; j < HALF_PIXELS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int rank = rank0 + j * 8 / SHARE, row = row0 + j * 8 % SHARE + lane % 4 * 2 + i;
            if (SHARE % 8 != 0 && row >= SHARE) row -= SHARE, ++rank;
            const int place = Received::row_offset(blockIdx.z, row) + Received::swizzled_quad(row, quad) + lane / 4 % 2 * 8;
            store_in_cluster(address_in_block(received, rank) + place, sums[j * 4 + i], sums[j * 4 + i + 2],
                             address_in_block(all_received, rank));
        }
    }
}

// The output pixel of a column of the product, -1 where that is a zero between rows or lies outside of the output.
__device__ __forceinline__ int pixel_of(int column, const Tile& tile, const PatchTile& shape, const Conv2dParams& params) {
    const int line = column / shape.columns, q = column - line * shape.columns;
    const int lines = shape.images == 1 ? shape.rows : shape.patch_rows;  // of an image, zeros included
    const int image = line / lines, row = line - image * lines, n = tile.n + image, p = tile.p + row;
    const bool exists = q < params.Q && row < shape.rows && image < shape.images && p < params.P && n < params.N;
    return exists ? (n * params.P + p) * params.Q + q : -1;
}

// Once all have come, adds up the sums of this block's columns, which begin with `first`, in the order of the depth, applies
// the epilogue, and stores what is an output: a thread 16 filters of a pixel at a time.
__device__ __forceinline__ void finish(const unsigned char* received, unsigned all_received, const Epilogue8<ELEMENT>& epilogue,
                                       ELEMENT* y, const PatchTile& shape, const Conv2dParams& params, const Tile& tile,
                                       int first) {
    constexpr int SIXTEENS = FILTERS / 16, ROWS = FINISHERS / SIXTEENS, PASSES = (SHARE + ROWS - 1) / ROWS;
    // Of 8 lanes the last 4, which read in another order (see add_up), have the upper two sixteens: other banks than the rest.
    const int sixteen = threadIdx.x / 4 % 2 * 2 + threadIdx.x % 2, k = tile.k + sixteen * 16;
    const int row0 = threadIdx.x / 8 * 2 + threadIdx.x / 2 % 2;
    const int columns[2] = {min(max(params.K - k, 0), 8), min(max(params.K - k - 8, 0), 8)};
    float bias[2][8];
    long long offsets[PASSES];  // in y; negative: none
    Chunk residuals[PASSES][2][1];
#pragma unroll
    for (int i = 0; i < 2; ++i) epilogue.load_bias(bias[i], k + i * 8, columns[i]);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = row0 + pass * ROWS, pixel = row < SHARE ? pixel_of(first + row, tile, shape, params) : -1;
        offsets[pass] = pixel < 0 ? -1 : static_cast<long long>(pixel) * params.K + k;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            epilogue.load_residual<true>(residuals[pass][i], offsets[pass] + i * 8, pixel < 0 ? 0 : columns[i]);
        }
    }
    barrier_wait(all_received, 0);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        if (offsets[pass] < 0) continue;
        float low[8], high[8];
        Received::add_up(low, received, row0 + pass * ROWS, sixteen * 2);
        Received::add_up(high, received, row0 + pass * ROWS, sixteen * 2 + 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float eight[8] = {low[i],  low[i + 2],  low[i + 4],  low[i + 6],
                                    high[i], high[i + 2], high[i + 4], high[i + 6]};
            epilogue.store<true>(y, offsets[pass] + i * 8, columns[i], eight, bias[i], residuals[pass][i]);
        }
    }
}

extern "C" __global__ void __cluster_dims__(1, 1, SPLIT_K_CLUSTER) __launch_bounds__(THREADS, 1)
    conv2d_wgmma_patch_split_k(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                               const float* __restrict__ bias, const ELEMENT* residual, ELEMENT* y, const PatchTile shape,
                               const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape.num_stages; ++i) {
            barrier_init(shared_address(&barriers.full[i]), 1);
            barrier_init(shared_address(&barriers.empty[i]), CONSUMERS);
        }
        for (int i = 0; i < PATCHES; ++i) {
            barrier_init(shared_address(&barriers.patch_full[i]), 1);
            barrier_init(shared_address(&barriers.patch_empty[i]), CONSUMERS);
        }
        barrier_init(shared_address(&barriers.received), 1);
        barrier_init_done();
    }
    // The zeros behind each patch, as in conv2d_wgmma_patch.
    for (int patch = 0; patch < PATCHES; ++patch) {
        for (int i = shape.box_bytes + threadIdx.x * 16; i < shape.patch_bytes; i += THREADS * 16) {
            store_chunk(shared + patch * shape.patch_bytes + i, Chunk{});
        }
    }
    written_for_storing();
    __syncthreads();
    if (threadIdx.x == 0) barrier_arrive_expecting(shared_address(&barriers.received), Received::BYTES);
    __syncwarp();
    cluster_arrive_relaxed();
    const Tile tile(blockIdx.x, (params.K + FILTERS - 1) / FILTERS, shape);
    const int all_chunks = params.C / SLICE_CHANNELS, rank = blockIdx.z;
    const int begin = all_chunks * rank / SPLIT_K_CLUSTER, chunks = all_chunks * (rank + 1) / SPLIT_K_CLUSTER - begin;
    const unsigned patches = shared_address(shared), stages = patches + PATCHES * shape.patch_bytes;
    unsigned char* const received = shared + PATCHES * shape.patch_bytes + shape.num_stages * STAGE_BYTES;

    let_next_kernel_start();
    const int consumer = threadIdx.x / WARPGROUP;
    if (consumer == CONSUMERS) {
        if (threadIdx.x == FINISHERS) {
            produce(pixels, filters, barriers, patches, stages, shape, params, tile, begin * SLICE_CHANNELS, chunks);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    wait_for_earlier_kernels();  // the residual is one's work, and another may still read what y replaces
    float sums[HALF_PIXELS / 2];
    multiply(sums, barriers, patches, stages, shape, params, chunks, consumer);
    cluster_wait();  // all blocks have begun: hardly ever is there anything to wait for, by now
    send(sums, shared_address(received), shared_address(&barriers.received), consumer);
    const Epilogue8<ELEMENT> epilogue{bias, residual, params.relu};
    finish(received, shared_address(&barriers.received), epilogue, y, shape, params, tile, rank * SHARE);
}
