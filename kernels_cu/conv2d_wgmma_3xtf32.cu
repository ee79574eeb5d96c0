// conv2d_wgmma_3xtf32: fp32-accurate implicit GEMM on Hopper's warpgroup instructions, three TF32 products for one of fp32.
// @solves 2-D convolution on the tensor cores of compute capability 9.0, as accurate as fp32
// @arch sm_90a
//
// Equation   as conv2d_direct, one group; products and sums as conv2d_mma forms them with PRODUCTS = 3.
// GEMM view  as conv2d_wgmma; a slice of the depth is 32 channels of one tap.
// Layouts    x NHWC, residual and y NPQK, bias K; filter 2·K rows of R·S·C: the high parts, then the low parts of a KRSC
//            filter, split by the host as split_tf32 and make_up_for_truncation do it. All fp32.
// Grid       x: one block per multiprocessor, or fewer; tiles are taken in turn, filters fastest.
//            Block 384 threads: a warpgroup of which one thread brings operands, and another for each consumer its residual
//            and output; and two consumers.
// Shared     NUM_STAGES · (TILE_M + 2 · TILE_N) · 128 bytes, and PLACES · TILE_M · 128 more if STAGED, dynamic.
// Requires   C a multiple of 32, K of 4.
// This rung  against conv2d_wgmma: the consumers halve the pixels of each tile, split them into high and low parts on their
//            way to registers, and the instructions take them from there; the filter comes as two operands. What is summed
//            on tensor cores is one step of the depth at a time (see conv2d_mma), for 64 rows and 64 filters: while the
//            threads add one such product to the others of its slice, the next is on its way. The sum of a slice is added
//            to the total once, so that few roundings are those of large numbers. An infinite operand makes its outputs NaN.
//            Both consumers finish a tile at about the same time, and nobody multiplies then. So where registers suffice to keep
//            track of it (STAGED) residuals are in shared memory before, and outputs leave from there while the next tile is
//            multiplied.
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
constexpr bool STAGED = TILE_N == PRODUCT_N;
// Then a consumer's part of a tile passes between registers and memory in pieces of SLICE_CHANNELS filters, two at a time.
constexpr int PIECES = TILE_N / SLICE_CHANNELS, PIECE_BYTES = CONSUMER_M * ROW_BYTES, PLACES = 2;
constexpr int PIECE_COLUMNS = SLICE_CHANNELS / 8;  // that a fragment counts in
// Which phase of its place's barriers a piece is, of the tile that is this block's number `turn`; parity is what counts.
__device__ __forceinline__ constexpr int phase_of(int turn, int piece) { return turn * (PIECES / PLACES) + piece / PLACES; }
constexpr bool TURNS_COUNT = PIECES / PLACES % 2 == 1;
constexpr int TOGETHER = 4;  // pairs of columns that a thread loads before it stores the first of them, if not STAGED
static_assert(PIECES % PLACES == 0, "whole phases");
static_assert(STAGED || TILE_N / 8 % TOGETHER == 0, "whole groups");
static_assert(TILE_M % 128 == 0 && TILE_N % PRODUCT_N == 0, "whole products");

// threadIdx.x and gridDim.x, read anew: what is kept in registers from the beginning takes the place of products, or of what
// little the producer has.
__device__ __forceinline__ unsigned thread_again() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
__device__ __forceinline__ int blocks_again() {
    int blocks;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
    return blocks;
}

struct Tiles {
    int per_row, count;  // tiles of the filters beside each other; all

    __device__ __forceinline__ explicit Tiles(const Conv2dParams& params)
        : per_row((params.K + TILE_N - 1) / TILE_N), count((params.gemm_m + TILE_M - 1) / TILE_M * per_row) {}
};

struct Barriers {
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];  // of the stages
    unsigned long long ready[CONSUMERS][PLACES];             // the place of a piece is free, or has the residual
    unsigned long long finished[CONSUMERS][PLACES];          // all of the piece is there
};

// Asks for all slices of the block's tiles, as stages become free. `residuals` is null where there are none.
__device__ __forceinline__ void produce(const TensorMap& pixels, const TensorMap& filters, const TensorMap* residuals,
                                        Barriers& barriers, unsigned stages, const Conv2dParams& params) {
    const Tiles tiles(params);
    Place place{0, 1};  // the phase before the first counts as complete: all stages are free
    for (int tile = blockIdx.x; tile < tiles.count; tile += blocks_again()) {
        const int n0 = tile % tiles.per_row * TILE_N;
        const OutputPixel first = output_pixel(params, tile / tiles.per_row * TILE_M);
        for (int box = 0; !STAGED && residuals && box < CONSUMERS * PIECES; ++box) {
            const int row = tile / tiles.per_row * TILE_M + box % CONSUMERS * CONSUMER_M;
            prefetch_box(*residuals, n0 + box / CONSUMERS * SLICE_CHANNELS, row);
        }
        const int w = first.q * params.stride_w - params.pad_w, h = first.p * params.stride_h - params.pad_h;
        for (int r = 0; r < params.R; ++r) {
            for (int s = 0; s < params.S; ++s) {
                for (int c = 0; c < params.C; c += SLICE_CHANNELS) {
                    const unsigned full = shared_address(&barriers.full[place.stage]);
                    const unsigned stage = stages + place.stage * STAGE_BYTES;
                    barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);
                    barrier_arrive_expecting(full, STAGE_BYTES);
                    fetch_im2col(stage, pixels, full, c, w, h, first.n, s * params.dilation_w, r * params.dilation_h);
                    const int depth = (r * params.S + s) * params.C + c;
                    // Rows behind the high parts' last are low parts, behind those zeros: columns that are not stored.
                    fetch_box(stage + PIXEL_BYTES, filters, full, depth, n0);
                    fetch_box(stage + PIXEL_BYTES + FILTER_BYTES, filters, full, depth, params.K + n0);
                    place.advance(1, NUM_STAGES);
                }
            }
        }
    }
}

// Brings the residuals of a consumer's pieces to their places, which begin at `places`, and stores what it makes of them.
// `residuals` is null where there are none.
__device__ __forceinline__ void carry(const TensorMap* residuals, const TensorMap& outputs, Barriers& barriers, unsigned places,
                                      int consumer, const Tiles& tiles) {
    int turn = 0;
    for (int tile = blockIdx.x; tile < tiles.count; tile += blocks_again(), ++turn) {
        const int m0 = tile / tiles.per_row * TILE_M + consumer * CONSUMER_M, n0 = tile % tiles.per_row * TILE_N;
#pragma unroll 1
        for (int step = 0; step < PLACES + PIECES; ++step) {
            if (step >= PLACES) {
                const int piece = step - PLACES;
                barrier_wait(shared_address(&barriers.finished[consumer][piece % PLACES]), phase_of(turn, piece) & 1);
                store_box(outputs, places + piece % PLACES * PIECE_BYTES, n0 + piece * SLICE_CHANNELS, m0);
                store_commit();
                store_wait();
            }
            if (step >= PIECES) continue;
            const unsigned ready = shared_address(&barriers.ready[consumer][step % PLACES]);
            if (residuals) {
                barrier_arrive_expecting(ready, PIECE_BYTES);
                fetch_box(places + step % PLACES * PIECE_BYTES, *residuals, ready, n0 + step * SLICE_CHANNELS, m0);
            } else {
                barrier_arrive(ready);
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

// What a thread has of each 64 rows and 8 columns of its consumer's products: this row and the eighth below it, this column and
// the one behind it.
struct Position {
    int consumer, row, column;

    __device__ __forceinline__ explicit Position(unsigned thread)
        : consumer(thread / WARPGROUP - 1),
          row(thread % WARPGROUP / 32 * 16 + thread % 32 / 4),
          column(thread % 4 * 2) {}
};

// The rows of a thread, from its first.
__device__ __forceinline__ constexpr int row_step(int f) { return f / 2 * 64 + f % 2 * 8; }

__device__ __forceinline__ float2 biases_of(const float* bias, int k, const Conv2dParams& params) {
    return bias && k < params.K ? *reinterpret_cast<const float2*>(bias + k) : make_float2(0.0f, 0.0f);
}

__device__ __forceinline__ float2 finished(const float* sums, float2 biases, float2 shortcut, const Conv2dParams& params) {
    const float first = sums[0] + biases.x + shortcut.x, second = sums[1] + biases.y + shortcut.y;
    return params.relu ? make_float2(relu_of(first), relu_of(second)) : make_float2(first, second);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma_3xtf32(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                        const __grid_constant__ TensorMap residuals, const __grid_constant__ TensorMap outputs,
                        const float* __restrict__ bias, const float* residual, float* y, const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            barrier_init(shared_address(&barriers.full[i]), 1);
            barrier_init(shared_address(&barriers.empty[i]), CONSUMERS * WARPS);
        }
        for (int i = 0; i < CONSUMERS * PLACES; ++i) {
            barrier_init(shared_address(&barriers.ready[0][i]), 1);
            barrier_init(shared_address(&barriers.finished[0][i]), WARPGROUP);
        }
        barrier_init_done();
    }
    __syncthreads();
    unsigned char* const places = shared + NUM_STAGES * STAGE_BYTES;

    let_next_kernel_start();
    wait_for_earlier_kernels();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const int carrier = threadIdx.x / 32 - 1;
        if (threadIdx.x == 0) {
            produce(pixels, filters, residual ? &residuals : nullptr, barriers, shared_address(shared), params);
        } else if (STAGED && threadIdx.x % 32 == 0 && carrier < CONSUMERS) {
            carry(residual ? &residuals : nullptr, outputs, barriers, shared_address(places) + carrier * PLACES * PIECE_BYTES,
                  carrier, Tiles(params));
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const Tiles tiles(params);
    const int slices = params.R * params.S * (params.C / SLICE_CHANNELS);
    const Position at(threadIdx.x);
    const int corner = (at.consumer * CONSUMER_M + at.row) * ROW_BYTES + at.row % 8 * 16 + at.column * 2;
    Place place{0, 0};
    for (int tile = blockIdx.x; tile < tiles.count; tile += blocks_again()) {
        float sums[BLOCKS_M][TILE_N / 2] = {};
        multiply(sums, barriers, shared, place, slices, corner);
        const Position at(thread_again());
        const int m0 = tile / tiles.per_row * TILE_M + at.consumer * CONSUMER_M + at.row;
        const int n0 = tile % tiles.per_row * TILE_N + at.column;
        if constexpr (STAGED) {
            const int turn = TURNS_COUNT ? (tile - blockIdx.x) / gridDim.x : 0;
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                unsigned char* const staged = places + (at.consumer * PLACES + piece % PLACES) * PIECE_BYTES;
                barrier_wait(shared_address(&barriers.ready[at.consumer][piece % PLACES]), phase_of(turn, piece) & 1);
#pragma unroll
                for (int j = piece * PIECE_COLUMNS; j < (piece + 1) * PIECE_COLUMNS; ++j) {
                    const float2 biases = biases_of(bias, n0 + j * 8, params);
#pragma unroll
                    for (int f = 0; f < ROWS; ++f) {
                        const int row = at.row + row_step(f), k = j % PIECE_COLUMNS * 8 + at.column;
                        float2* const pair = static_cast<float2*>(staged_pair<float>(staged, row, k));
                        const float2 shortcut = residual ? *pair : make_float2(0.0f, 0.0f);
                        *pair = finished(&sums[f / 2][j * 4 + f % 2 * 2], biases, shortcut, params);
                    }
                }
                written_for_storing();
                barrier_arrive(shared_address(&barriers.finished[at.consumer][piece % PLACES]));
            }
        } else {
            // The residuals of a few columns are under way before the first of these is stored: y may be the residual.
            const auto offset_of = [&](int j, int f) { return static_cast<long long>(m0 + row_step(f)) * params.K + n0 + j * 8; };
            const auto exists = [&](int j, int f) { return m0 + row_step(f) < params.gemm_m && n0 + j * 8 < params.K; };
            float2 biases[TILE_N / 8], shortcuts[TILE_N / 8][ROWS] = {};
#pragma unroll
            for (int first = 0; first < TILE_N / 8; first += TOGETHER) {
#pragma unroll
                for (int j = first; j < first + TOGETHER; ++j) biases[j] = biases_of(bias, n0 + j * 8, params);
#pragma unroll
                for (int i = 0; i < TOGETHER * ROWS && residual; ++i) {
                    const int j = first + i / ROWS, f = i % ROWS;
                    if (exists(j, f)) shortcuts[j][f] = load_pair<float>(residual + offset_of(j, f));
                }
#pragma unroll
                for (int j = first; j < first + TOGETHER; ++j) {
#pragma unroll
                    for (int f = 0; f < ROWS; ++f) {
                        const float2 pair = finished(&sums[f / 2][j * 4 + f % 2 * 2], biases[j], shortcuts[j][f], params);
                        if (exists(j, f)) store_pair<float>(y + offset_of(j, f), pair.x, pair.y);
                    }
                }
            }
        }
    }
}
