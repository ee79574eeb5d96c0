// conv2d_wgmma: implicit GEMM on Hopper: warpgroup instructions, fed by the tensor memory accelerator.
// @solves 2-D convolution, and a shortcut along with it, on the tensor cores of compute capability 9.0 (fp16, bf16, TF32)
// @arch sm_90a
//
// Equation   as conv2d_direct, one group; sums in fp32. The accelerator rounds TF32 operands to nearest on their way.
//            With a shortcut, y = relu(conv(x, filter) + conv1x1(x0, its filter, stride) + bias): a ResNet block's end.
// GEMM view  as conv2d_mma; a slice of the depth is 128 bytes of channels of one tap. The shortcut is more depth:
//            [im2col(x) | x0 at every stride-th row and column] · [filter; its filter].
// Layouts    x and x0 NHWC, filters KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: one block per multiprocessor, or fewer; tiles are taken in turn, filters fastest.
//            Block 384 threads: a producer warpgroup, of which one thread works, and two consumers.
// Shared     NUM_STAGES · (TILE_M + TILE_N) · 128 + 2 · BUFFERS · PIECE_BYTES, dynamic.
// Requires   C a multiple of 128 bytes, the shortcut's as well, K of 16 bytes.
// This rung  against conv2d_mma: nobody computes addresses, nobody holds operands in registers. One thread asks for boxes of
//            the input (in im2col mode the hardware itself walks the output's pixels and fills in the padding) and of the
//            filter; an instruction of 128 threads multiplies them where they lie. The consumers take turns: while one
//            multiplies, the other adds bias and residual to its tile, which also comes and goes through the accelerator.
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "pair_epilogue.cuh"
#include "tensor_core.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef TILE_M
#define ELEMENT Half    // of input, filter, residual, output: Half, BFloat16, or float (TF32)
#define TILE_M 128      // pixels per tile: a multiple of 64
#define TILE_N 128      // filters per tile: 64, 128 or 256
#define NUM_STAGES 5    // slices of both operands in shared memory
#define BUFFERS 1       // pieces of each consumer on their way to and from memory: with 2 the next residual comes early
#endif

constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT)), STEPS = ROW_BYTES / 32;
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES, STAGE_BYTES = PIXEL_BYTES + TILE_N * ROW_BYTES;
constexpr int BLOCKS_M = TILE_M / 64, ROWS = 2 * BLOCKS_M;  // of a thread, in its pairs of columns
// A consumer's tile on its way between registers and memory: boxes of SLICE_CHANNELS filters, all in one piece, or of 4-byte
// elements, for which there is less room, each a piece.
constexpr int BOX_BYTES = TILE_M * ROW_BYTES, PIECE_N = sizeof(ELEMENT) == 2 ? TILE_N : SLICE_CHANNELS;
constexpr int BOXES = PIECE_N / SLICE_CHANNELS, PIECES = TILE_N / PIECE_N, PIECE_BYTES = BOXES * BOX_BYTES;
constexpr int AHEAD = BUFFERS > 2 ? BUFFERS - 1 : BUFFERS;  // pieces whose residuals are under way: one place may be stored from
// Residuals that are loaded before the first result is stored: blocks of 8 columns of 4-byte elements, of 16 of others.
constexpr int TOGETHER = sizeof(ELEMENT) == 2 && TILE_N < 256 ? 4 : 2;
static_assert(BUFFERS <= 2 || PIECES > 1, "one tile at most is ahead of the one that is multiplied");
static_assert(TILE_M % 64 == 0 && PIECE_N % SLICE_CHANNELS == 0 && TILE_N % PIECE_N == 0, "whole instructions and boxes");

struct Barriers {
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];  // of the stages
    unsigned long long turn[CONSUMERS];                      // all warps of the other consumer have issued its products
    unsigned long long residual[CONSUMERS][BUFFERS];         // the residual of a consumer's piece has come
};

// What is multiplied: an input in columns of output pixels, and a filter.
struct Factors {
    const TensorMap &pixels, &filters;
};

// Asks for all slices of the block's tiles, as stages become free. `residuals` is null where there are none.
__device__ __forceinline__ void produce(const Factors& factors, const Factors& shortcut, const TensorMap* residuals,
                                        Barriers& barriers, unsigned stages, const Conv2dParams& params, int tiles,
                                        int tiles_n) {
    Place place{0, 1};  // the phase before the first counts as complete: all stages are free
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int n0 = tile % tiles_n * TILE_N;
        const OutputPixel first = output_pixel(params, tile / tiles_n * TILE_M);
        // The stages are ahead of the consumers, by several tiles where these are shallow: so is the residual then.
        for (int box = 0; residuals && box < TILE_N / SLICE_CHANNELS; ++box) {
            prefetch_box(*residuals, n0 + box * SLICE_CHANNELS, tile / tiles_n * TILE_M);
        }
        const auto fetch = [&](const Factors& of, int depth, int c, int w, int h, int s, int r) {
            const unsigned full = shared_address(&barriers.full[place.stage]);
            const unsigned stage = stages + place.stage * STAGE_BYTES;
            barrier_wait(shared_address(&barriers.empty[place.stage]), place.parity);
            barrier_arrive_expecting(full, STAGE_BYTES);
            fetch_im2col(stage, of.pixels, full, c, w, h, first.n, s, r);
            fetch_box(stage + PIXEL_BYTES, of.filters, full, depth, n0);
            place.next(NUM_STAGES);
        };
        const int w = first.q * params.stride_w - params.pad_w, h = first.p * params.stride_h - params.pad_h;
        int depth = 0;
        for (int r = 0; r < params.R; ++r) {
            for (int s = 0; s < params.S; ++s) {
                for (int c = 0; c < params.C; c += SLICE_CHANNELS, depth += SLICE_CHANNELS) {
                    fetch(factors, depth, c, w, h, s * params.dilation_w, r * params.dilation_h);
                }
            }
        }
        for (int c = 0; c < params.shortcut_channels; c += SLICE_CHANNELS) {
            fetch(shortcut, c, c, first.q * params.shortcut_stride, first.p * params.shortcut_stride, 0, 0);
        }
    }
}

// The products of one tile, once it is this consumer's turn.
__device__ __forceinline__ void multiply(float (&sums)[BLOCKS_M][TILE_N / 2], Barriers& barriers, unsigned stages, Place& place,
                                         int slices, int consumer, int tiles_before) {
    const bool elected = threadIdx.x % WARPGROUP == 0;
    if (tiles_before > 0) barrier_wait(shared_address(&barriers.turn[consumer]), (tiles_before - 1) & 1);
    int previous = 0;
    for (int slice = 0; slice < slices; ++slice) {
        barrier_wait(shared_address(&barriers.full[place.stage]), place.parity);
        const unsigned stage = stages + place.stage * STAGE_BYTES;
        const unsigned long long a = operand(stage), b = operand(stage + PIXEL_BYTES);
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int m = 0; m < BLOCKS_M; ++m) {
                warpgroup_mma<ELEMENT, TILE_N>(sums[m], a + (m * 64 * ROW_BYTES + step * 32) / 16, b + step * 32 / 16,
                                               slice + step > 0);
            }
        }
        warpgroup_commit();
        if (slice == slices - 1) {
            // Each warp for itself: the other consumer's turns would else overtake one that still waits for this turn.
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barriers.turn[1 - consumer]));
        }
        warpgroup_wait<1>();  // the slice before has been read
        if (slice > 0 && elected) barrier_arrive(shared_address(&barriers.empty[previous]));
        previous = place.stage;
        place.next(NUM_STAGES);
    }
    warpgroup_wait<0>();
    if (elected) barrier_arrive(shared_address(&barriers.empty[previous]));
}

// Bias, residual if ADD, and ReLU for a piece, in whose place the residual is. Several residuals are loaded before the first
// result is stored.
template <typename Element, bool ADD>
__device__ __forceinline__ void finish(const float (&sums)[BLOCKS_M][TILE_N / 2], const float2 (&biases)[TILE_N / 8],
                                       unsigned char* staged, int piece, int with_relu) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x % WARPGROUP / 32 * 16;
    if constexpr (sizeof(Element) == 2) {
        // Of 16 × 16 elements lanes 8i … 8i + 7 know where the rows of matrix i begin: i % 2 the lower rows, i / 2 the right
        // columns. The next 16 columns are at ^ 32.
        const unsigned corner =
            shared_address(staged) + (warp_row + lane % 16) * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
        const unsigned floor = floor_word(with_relu, Element{});
#pragma unroll
        for (int first = 0; first < BLOCKS_M * TILE_N / 16; first += TOGETHER) {
            const int m = first / (TILE_N / 16), column = first % (TILE_N / 16) * 16;
            const unsigned place = corner + column / SLICE_CHANNELS * BOX_BYTES + m * 64 * ROW_BYTES;
            const auto place_of = [&](int i) { return place ^ (column % SLICE_CHANNELS + i * 16) * 2; };
            unsigned words[TOGETHER][4] = {};
#pragma unroll
            for (int i = 0; i < TOGETHER && ADD; ++i) load_matrices(words[i], place_of(i));
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int block = column / 8 + i * 2;
                finish_matrices<Element, ADD>(words[i], &sums[m][block * 4], &biases[block], floor);
                store_matrices(place_of(i), words[i]);
            }
        }
    } else {
        const float least = least_kept(with_relu);
        const auto place_of = [&](int f, int j) {
            return staged_pair<Element>(staged, warp_row + lane / 4 + f / 2 * 64 + f % 2 * 8, j * 8 + lane % 4 * 2);
        };
#pragma unroll
        for (int first = 0; first < PIECE_N / 8; first += TOGETHER) {
            float2 shortcuts[TOGETHER][ROWS] = {};
#pragma unroll
            for (int j = 0; j < TOGETHER && ADD; ++j) {
#pragma unroll
                for (int f = 0; f < ROWS; ++f) shortcuts[j][f] = load_pair<Element>(place_of(f, first + j));
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
#pragma unroll
                for (int f = 0; f < ROWS; ++f) {
                    const int block = piece * PIECE_N / 8 + first + j;
                    const float* const pair = &sums[f / 2][block * 4 + f % 2 * 2];
                    const float low = pair[0] + biases[block].x + shortcuts[j][f].x;
                    const float high = pair[1] + biases[block].y + shortcuts[j][f].y;
                    store_pair<Element>(place_of(f, first + j), relu_of(low, least), relu_of(high, least));
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                 const __grid_constant__ TensorMap shortcut_pixels, const __grid_constant__ TensorMap shortcut_filters,
                 const __grid_constant__ TensorMap residuals, const __grid_constant__ TensorMap outputs,
                 const float* __restrict__ bias, const ELEMENT* residual, const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    const int warpgroup = this_warpgroup();
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            barrier_init(shared_address(&barriers.full[i]), 1);
            barrier_init(shared_address(&barriers.empty[i]), 1);
        }
        for (int i = 0; i < CONSUMERS; ++i) {
            barrier_init(shared_address(&barriers.turn[i]), WARPGROUP / 32);
            for (int j = 0; j < BUFFERS; ++j) barrier_init(shared_address(&barriers.residual[i][j]), 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int tiles_n = (params.K + TILE_N - 1) / TILE_N, tiles = (params.gemm_m + TILE_M - 1) / TILE_M * tiles_n;
    const int slices = params.R * params.S * (params.C / SLICE_CHANNELS) + params.shortcut_channels / SLICE_CHANNELS;
    const unsigned stages = shared_address(shared);

    let_next_kernel_start();
    if (threadIdx.x == 0) {
        prefetch_map(pixels), prefetch_map(filters), prefetch_map(outputs);
        if (residual) prefetch_map(residuals);
        if (params.shortcut_channels > 0) prefetch_map(shortcut_pixels), prefetch_map(shortcut_filters);
    }
    wait_for_earlier_kernels();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            produce({pixels, filters}, {shortcut_pixels, shortcut_filters}, residual ? &residuals : nullptr, barriers, stages,
                    params, tiles, tiles_n);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = warpgroup - 1;
    const bool elected = threadIdx.x % WARPGROUP == 0;
    unsigned char* const staged_pieces = shared + NUM_STAGES * STAGE_BYTES + consumer * BUFFERS * PIECE_BYTES;
    const int step = CONSUMERS * gridDim.x, first_tile = blockIdx.x + consumer * gridDim.x;
    // Asks for the residual of this consumer's piece of this number as soon as its place has been stored from. Where there is no
    // residual only the place of the piece that is next must be free.
    const auto make_room = [&](int number) {
        if (!elected) return;
        residual ? store_wait<BUFFERS - AHEAD>() : store_wait<BUFFERS - 1>();
        const int tile = first_tile + number / PIECES * step;
        if (!residual || tile >= tiles) return;
        const unsigned barrier = shared_address(&barriers.residual[consumer][number % BUFFERS]);
        const unsigned place = shared_address(staged_pieces) + number % BUFFERS * PIECE_BYTES;
        const int n0 = tile % tiles_n * TILE_N + number % PIECES * PIECE_N;
        barrier_arrive_expecting(barrier, PIECE_BYTES);
        for (int i = 0; i < BOXES; ++i) {
            fetch_box(place + i * BOX_BYTES, residuals, barrier, n0 + i * SLICE_CHANNELS, tile / tiles_n * TILE_M);
        }
    };
    Place place{0, 0};
    if (consumer == 1) place.advance(slices % (2 * NUM_STAGES), NUM_STAGES);
    int turn = 0;
    for (int number = 0; number < (PIECES > 1 ? AHEAD : BUFFERS - 1); ++number) make_room(number);
    for (int tile = first_tile; tile < tiles; tile += step, ++turn) {
        const int m0 = tile / tiles_n * TILE_M, n0 = tile % tiles_n * TILE_N;
        if (BUFFERS == 1) make_room(turn);
        float2 biases[TILE_N / 8];  // all at once: one after the other they would take as long as many a tile's products
        if (TILE_N < 256) load_biases(biases, bias, n0, params.K);
        float sums[BLOCKS_M][TILE_N / 2];
        multiply(sums, barriers, stages, place, slices, consumer, turn + consumer);
        if (TILE_N == 256) load_biases(biases, bias, n0, params.K);  // before, there are no registers left
        place.advance(slices % (2 * NUM_STAGES), NUM_STAGES);  // those of the other consumer
        if (BUFFERS == 2 && PIECES == 1) make_room(turn + 1);

#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int number = turn * PIECES + piece;
            unsigned char* const staged = staged_pieces + number % BUFFERS * PIECE_BYTES;
            if (residual) {
                barrier_wait(shared_address(&barriers.residual[consumer][number % BUFFERS]), number / BUFFERS & 1);
            } else {
                warpgroup_sync(1 + consumer);  // the elected thread has waited for what was here
            }
            if (residual) {
                finish<ELEMENT, true>(sums, biases, staged, piece, params.relu);
            } else {
                finish<ELEMENT, false>(sums, biases, staged, piece, params.relu);
            }
            written_for_storing();
            warpgroup_sync(1 + consumer);
            if (elected) {
                for (int i = 0; i < BOXES; ++i) {
                    store_box(outputs, shared_address(staged) + i * BOX_BYTES, n0 + piece * PIECE_N + i * SLICE_CHANNELS, m0);
                }
                store_commit();
            }
            if (PIECES > 1) make_room(number + AHEAD);
        }
    }
    if (elected) store_wait();  // shared memory ends with the block
}
