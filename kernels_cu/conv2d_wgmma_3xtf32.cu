// conv2d_wgmma_3xtf32: fp32-accurate implicit GEMM on Hopper's warpgroup instructions, three TF32 products for one of fp32.
// @solves 2-D convolution on the tensor cores of compute capability 9.0, as accurate as fp32
// @arch sm_90a
//
// Equation   as conv2d_direct, one group; products and sums as conv2d_mma forms them with PRODUCTS = 3.
// GEMM view  as conv2d_wgmma; a slice of the depth is 32 channels of one tap.
// Layouts    x NHWC, residual and y NPQK, bias K; filter 2·K rows of R·S·C: the high parts, then the low parts of a KRSC
//            filter, split by the host as split_tf32 and make_up_for_truncation do it. All fp32.
// Grid       x: one block per multiprocessor, or fewer; tiles are taken in turn, filters fastest.
//            Block 384 threads: a producer warpgroup, of which one thread works, and two consumers.
// Shared     NUM_STAGES · (TILE_M + 2 · TILE_N) · 128 bytes, dynamic.
// Requires   C a multiple of 32, K of 4.
// This rung  against conv2d_wgmma: the consumers halve the pixels of each tile, split them into high and low parts on their
//            way to registers, and the instructions take them from there; the filter comes as two operands. What is summed
//            on tensor cores is one step of the depth at a time (see conv2d_mma), for 64 rows and 64 filters: while the
//            threads add one such product to the others of its slice, the next is on its way. The sum of a slice is added
//            to the total once, so that few roundings are those of large numbers. An infinite operand makes its outputs NaN.
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "tensor_core.cuh"
#include "tensor_memory.cuh"
#include "warpgroup_registers.cuh"

#ifndef TILE_M
#define TILE_M 128    // pixels per tile: 128 or 256
#define TILE_N 128    // filters per tile: a multiple of 64
#define NUM_STAGES 4  // slices of both operands in shared memory
#endif

constexpr int CONSUMERS = 2, WARPGROUP = 128, WARPS = WARPGROUP / 32, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = ROW_BYTES / 4, STEPS = ROW_BYTES / 32;
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES, FILTER_BYTES = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = PIXEL_BYTES + 2 * FILTER_BYTES;
constexpr int CONSUMER_M = TILE_M / CONSUMERS, BLOCKS_M = CONSUMER_M / 64, ROWS = 2 * BLOCKS_M;  // of a thread, in its columns
constexpr int PRODUCT_N = 64;  // filters of a product on tensor cores, which has 64 rows too: a block of the tile
constexpr int BLOCKS_N = TILE_N / PRODUCT_N, BLOCKS = BLOCKS_M * BLOCKS_N;  // of a consumer
constexpr int PRODUCTS = STEPS * BLOCKS;                                    // of a slice: all of a block, then of the next
constexpr int TOGETHER = 4;  // pairs of columns whose residuals are under way at once
static_assert(TILE_M % 128 == 0 && TILE_N % PRODUCT_N == 0, "whole products");
static_assert(TILE_N / 8 % TOGETHER == 0, "whole groups of columns");

struct Barriers {
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];  // of the stages
};

// Asks for all slices of the block's tiles, as stages become free. `residuals` is null where there are none.
__device__ __forceinline__ void produce(const TensorMap& pixels, const TensorMap& filters, const TensorMap* residuals,
                                        Barriers& barriers, unsigned stages, const Conv2dParams& params, int tiles,
                                        int tiles_n) {
    Place place{0, 1};  // the phase before the first counts as complete: all stages are free
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int n0 = tile % tiles_n * TILE_N;
        const OutputPixel first = output_pixel(params, tile / tiles_n * TILE_M);
        for (int box = 0; residuals && box < TILE_N / SLICE_CHANNELS; ++box) {
            prefetch_box(*residuals, n0 + box * SLICE_CHANNELS, tile / tiles_n * TILE_M);
        }
        const int w = first.q * params.stride_w - params.pad_w, h = first.p * params.stride_h - params.pad_h;
        int depth = 0;
        for (int r = 0; r < params.R; ++r) {
            for (int s = 0; s < params.S; ++s) {
                for (int c = 0; c < params.C; c += SLICE_CHANNELS, depth += SLICE_CHANNELS) {
                    const unsigned full = shared_address(&barriers.full[place.stage]);
                    const unsigned stage = stages + place.stage * STAGE_BYTES;
                    barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);
                    barrier_arrive_expecting(full, STAGE_BYTES);
                    fetch_im2col(stage, pixels, full, c, w, h, first.n, s * params.dilation_w, r * params.dilation_h);
                    // Rows behind the high parts' last are low parts, behind those zeros: columns that are not stored.
                    fetch_box(stage + PIXEL_BYTES, filters, full, depth, n0);
                    fetch_box(stage + PIXEL_BYTES + FILTER_BYTES, filters, full, depth, params.K + n0);
                    place.advance(1, NUM_STAGES);
                }
            }
        }
    }
}

// A thread's pixels of one step, of 64 rows.
struct Fragment {
    unsigned words[4];

    // `corner` is where the thread's first row begins, and 16 · (row % 8) + 4 · (lane % 4) bytes further: chunk c of a row
    // lies at place c ^ (row % 8), so that the 8 rows of 4 words that a warp loads at once are in 32 different banks.
    __device__ __forceinline__ void load(const unsigned char* shared, int corner, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int chunk = step * 2 + i / 2, row = i % 2 * 8;
            words[i] = *reinterpret_cast<const unsigned*>(shared + (corner ^ chunk * 16) + row * ROW_BYTES);
        }
    }
};

// Which of three buffers a product goes to. A block's first becomes the sum of its slice: the others are added to it as they
// come, by turns from the two that are left. When the last of them is under way the next block begins in the other one.
__device__ __forceinline__ constexpr int buffer_of(int block, int step) { return (block + (step == 0 ? 0 : 1 + step % 2)) % 3; }

// Adds a product that has been waited for to those of its block and slice, and these, once they are all there, to the sums.
// Each addition rounds to nearest.
__device__ __forceinline__ void add_product(float (&sums)[BLOCKS_M][TILE_N / 2], float (&products)[3][PRODUCT_N / 2],
                                            int number) {
    const int block = number / STEPS, step = number % STEPS;
    auto& product = products[buffer_of(block, step)];
    auto& slice_sum = products[buffer_of(block, 0)];
    warpgroup_results(product);
#pragma unroll
    for (int i = 0; i < PRODUCT_N / 2; ++i) {
        if (step > 0) slice_sum[i] += product[i];
        if (step == STEPS - 1) sums[block / BLOCKS_N][block % BLOCKS_N * (PRODUCT_N / 2) + i] += slice_sum[i];
    }
}

// The sums of this consumer's part of a tile. `corner` as above, in the first stage.
__device__ __forceinline__ void multiply(float (&sums)[BLOCKS_M][TILE_N / 2], Barriers& barriers, const unsigned char* shared,
                                         Place& place, int slices, int corner) {
    const unsigned filters = shared_address(shared) + PIXEL_BYTES;
    Fragment next;
    barrier_wait(shared_address(&barriers.full[place.stage]), place.parity);
    next.load(shared, place.stage * STAGE_BYTES + corner, 0);
    for (int slice = 0; slice < slices; ++slice) {
        const int stage = place.stage;
        const unsigned long long b = operand(filters + stage * STAGE_BYTES);
        float products[3][PRODUCT_N / 2] = {};
        Fragment high[STEPS], low[STEPS];  // kept for the blocks with the same rows and other filters
#pragma unroll
        for (int number = 0; number < PRODUCTS; ++number) {
            const int block = number / STEPS, step = number % STEPS, m = block / BLOCKS_N, n = block % BLOCKS_N;
            if (n == 0) {
                high[step] = next;
                split_tf32(high[step].words, low[step].words);
            }
            auto& product = products[buffer_of(block, step)];
            const unsigned long long b_high = b + (n * PRODUCT_N * ROW_BYTES + step * 32) / 16;
            const unsigned long long b_low = b_high + FILTER_BYTES / 16;
            warpgroup_fence();
            warpgroup_mma_tf32<PRODUCT_N>(product, low[step].words, b_high, false);
            warpgroup_mma_tf32<PRODUCT_N>(product, high[step].words, b_low, true);
            warpgroup_mma_tf32<PRODUCT_N>(product, high[step].words, b_high, true);
            warpgroup_commit();
            // The next pixels come while tensor cores are busy.
            const int following = m * STEPS + step + 1;
            if (n == 0 && following < BLOCKS_M * STEPS) {
                next.load(shared, stage * STAGE_BYTES + corner + following / STEPS * 64 * ROW_BYTES, following % STEPS);
            }
            if (number == PRODUCTS - 1) {
                place.advance(1, NUM_STAGES);
                if (slice + 1 < slices) {
                    barrier_wait(shared_address(&barriers.full[place.stage]), place.parity);
                    next.load(shared, place.stage * STAGE_BYTES + corner, 0);
                }
            }
            if (number > 0) {
                warpgroup_wait<1>();
                add_product(sums, products, number - 1);
            }
        }
        // Here the other consumer alone keeps tensor cores busy: across the end of a loop the compiler would not believe
        // that a product is complete while the next is under way.
        warpgroup_wait<0>();
        // This stage has been read. Each warp says so for itself, having loaded pixels of its own.
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barriers.empty[stage]));
        add_product(sums, products, PRODUCTS - 1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma_3xtf32(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                        const __grid_constant__ TensorMap residuals, const float* __restrict__ bias, const float* residual,
                        float* y, const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            barrier_init(shared_address(&barriers.full[i]), 1);
            barrier_init(shared_address(&barriers.empty[i]), CONSUMERS * WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int tiles_n = (params.K + TILE_N - 1) / TILE_N, tiles = (params.gemm_m + TILE_M - 1) / TILE_M * tiles_n;
    const int slices = params.R * params.S * (params.C / SLICE_CHANNELS);

    let_next_kernel_start();
    wait_for_earlier_kernels();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            produce(pixels, filters, residual ? &residuals : nullptr, barriers, shared_address(shared), params, tiles, tiles_n);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int lane = threadIdx.x % 32;
    const int row0 = (warpgroup - 1) * CONSUMER_M + threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
    const int corner = row0 * ROW_BYTES + lane / 4 * 16 + lane % 4 * 4;
    Place place{0, 0};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int m0 = tile / tiles_n * TILE_M + row0, n0 = tile % tiles_n * TILE_N + lane % 4 * 2;
        float sums[BLOCKS_M][TILE_N / 2] = {};
        multiply(sums, barriers, shared, place, slices, corner);

        // Residuals of a few columns at a time are under way before the first of them is stored: y may be the residual.
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j += TOGETHER) {
            float2 shortcuts[TOGETHER][ROWS] = {};
#pragma unroll
            for (int f = 0; f < TOGETHER * ROWS && residual; ++f) {
                const int m = m0 + f % ROWS / 2 * 64 + f % 2 * 8, k = n0 + (j + f / ROWS) * 8;
                if (m < params.gemm_m && k < params.K) {
                    shortcuts[f / ROWS][f % ROWS] = load_pair<float>(residual + static_cast<long long>(m) * params.K + k);
                }
            }
#pragma unroll
            for (int f = 0; f < TOGETHER * ROWS; ++f) {
                const int m = m0 + f % ROWS / 2 * 64 + f % 2 * 8, k = n0 + (j + f / ROWS) * 8;
                if (m >= params.gemm_m || k >= params.K) continue;
                const float2 biases = bias ? *reinterpret_cast<const float2*>(bias + k) : make_float2(0.0f, 0.0f);
                const float2 shortcut = shortcuts[f / ROWS][f % ROWS];
                const float* const pair = &sums[f % ROWS / 2][(j + f / ROWS) * 4 + f % 2 * 2];
                const float first = pair[0] + biases.x + shortcut.x, second = pair[1] + biases.y + shortcut.y;
                store_pair<float>(y + static_cast<long long>(m) * params.K + k, params.relu ? relu_of(first) : first,
                                  params.relu ? relu_of(second) : second);
            }
        }
    }
}
