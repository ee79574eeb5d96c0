// conv2d_wgmma: implicit GEMM on Hopper: warpgroup instructions, fed by the tensor memory accelerator.
// @solves 2-D convolution, and a shortcut along with it, on the tensor cores of compute capability 9.0 (fp16, bf16, TF32)
// @arch sm_90a
//
// Equation   as conv2d_direct, one group; sums in fp32. The accelerator rounds TF32 operands to nearest on their way.
//            With a shortcut, y = relu(conv(x, filter) + conv1x1(x0, its filter, stride) + bias): a ResNet block's end.
// GEMM view  as conv2d_mma; a slice of the depth is 128 bytes of channels of one tap. The shortcut is more depth:
//            [im2col(x) | x0 at every stride-th row and column] · [filter; its filter].
// Layouts    x and x0 NHWC, filters KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: one block per multiprocessor, or fewer; tiles are taken in turn, filters fastest, from either end.
//            Block 384 threads: a producer warpgroup, of which one thread works, and two consumers.
// Shared     NUM_STAGES · (TILE_M + TILE_N) · 128 + 2 · BUFFERS · TILE_M · PIECE_N elements, dynamic; the latter not if TRANSPOSED
//            for 4-byte elements.
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
#include "transposed_matrices.cuh"
#include "turns.cuh"
#include "warpgroup.cuh"

#ifndef TILE_M
#define ELEMENT Half    // of input, filter, residual, output: Half, BFloat16, or float (TF32)
#define TILE_M 128      // pixels per tile: 64, 128 or 192
#define TILE_N 128      // filters per tile: 64, 128 or 256
#define TRANSPOSED 0    // whether filters are the rows of the product, and pixels its columns
#define NUM_STAGES 5    // slices of both operands in shared memory
#define PIECE_N 128     // filters of a tile that pass to and from memory at a time: 128 bytes of them, or all TILE_N
#define BUFFERS 1       // pieces of each consumer on their way to and from memory: with 2 the next residual comes early
#endif

constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT)), STEPS = ROW_BYTES / 32;
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES, STAGE_BYTES = PIXEL_BYTES + TILE_N * ROW_BYTES;
// The product in blocks of 64 rows, of which an instruction computes one. It asks less of shared memory the wider it is.
constexpr int BLOCKS = (TRANSPOSED ? TILE_N : TILE_M) / 64, COLUMNS = TRANSPOSED ? TILE_M : TILE_N;
// Transposed sums of 4-byte elements go to memory right from registers.
constexpr bool STAGED = sizeof(ELEMENT) == 2 || !TRANSPOSED;
// A consumer's piece of a tile on its way between registers and memory: boxes of SLICE_CHANNELS filters.
constexpr int BOX_BYTES = TILE_M * ROW_BYTES, BOXES = PIECE_N / SLICE_CHANNELS, PIECE_BYTES = BOXES * BOX_BYTES;
constexpr int PIECES = TILE_N / PIECE_N;
constexpr int AHEAD = BUFFERS > 2 ? BUFFERS - 1 : BUFFERS;  // pieces whose residuals are under way: one place may be stored from
// Biases that are loaded at once, in pairs, ahead of the products if they and the sums have registers beside each other.
constexpr int SUMS = BLOCKS * COLUMNS / 2, PAIRS_OF_PIECE = TRANSPOSED ? PIECE_N / (STAGED ? 64 : 32) : PIECE_N / 8;
constexpr int PAIRS = SUMS > 128 && !TRANSPOSED ? PAIRS_OF_PIECE : PAIRS_OF_PIECE * PIECES;
constexpr bool BIASES_AHEAD = SUMS + 2 * PAIRS <= 160 || TRANSPOSED;
// Blocks whose residuals are loaded before the first result is stored: of 16 × 8 4-byte elements, of 16 × 16 others.
constexpr int TOGETHER = SUMS > 128 ? 2 : sizeof(ELEMENT) == 4 ? 2 * BLOCKS : COLUMNS < 256 ? 4 : 2;
constexpr int CONSUMER_REGISTERS = SUMS > 128 ? 240 : 232, PRODUCER_REGISTERS = SUMS > 128 ? 24 : 40;
static_assert(BUFFERS <= 2 || PIECES > 1, "one tile at most is ahead of the one that is multiplied");
static_assert(TILE_M % 64 == 0 && PIECE_N % SLICE_CHANNELS == 0 && TILE_N % PIECE_N == 0, "whole instructions and boxes");

#if TILE_M == 192
WARPGROUP_MMA_OF_ALL(192, 96)
#endif

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
                                        Barriers& barriers, unsigned stages, const Conv2dParams& params, const Turns& turns,
                                        int tiles_n) {
    Place place{0, 1};  // the phase before the first counts as complete: all stages are free
    for (int tile = turns.first; turns.have(tile); tile += turns.step) {
        const int m0 = tile / tiles_n * TILE_M, n0 = tile % tiles_n * TILE_N;
        const OutputPixel first = output_pixel(params, m0);
        // The stages are ahead of the consumers, by several tiles where these are shallow: so is the residual then.
        for (int box = 0; residuals && box < TILE_N / SLICE_CHANNELS; ++box) {
            prefetch_box(*residuals, n0 + box * SLICE_CHANNELS, m0);
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
__device__ __forceinline__ void multiply(float (&sums)[BLOCKS][COLUMNS / 2], Barriers& barriers, unsigned stages, Place& place,
                                         int slices, int consumer, int tiles_before) {
    const bool elected = threadIdx.x % WARPGROUP == 0;
    if (tiles_before > 0) barrier_wait(shared_address(&barriers.turn[consumer]), (tiles_before - 1) & 1);
    int previous = 0;
    for (int slice = 0; slice < slices; ++slice) {
        barrier_wait(shared_address(&barriers.full[place.stage]), place.parity);
        const unsigned stage = stages + place.stage * STAGE_BYTES;
        const unsigned long long pixels = operand(stage), filters = operand(stage + PIXEL_BYTES);
        const unsigned long long a = TRANSPOSED ? filters : pixels, b = TRANSPOSED ? pixels : filters;
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                warpgroup_mma<ELEMENT, COLUMNS>(sums[i], a + (i * 64 * ROW_BYTES + step * 32) / 16, b + step * 32 / 16,
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

// The biases of this thread's filters in a transposed product whose first filter is k: of each block of 64 two, 8 apart, or four
// neighbours.
template <int COUNT>
__device__ __forceinline__ void load_biases_of_rows(float2 (&biases)[COUNT], const float* bias, int k, int K) {
    const int lane = threadIdx.x % 32, first = k + threadIdx.x % WARPGROUP / 32 * 16 + (STAGED ? lane / 4 : lane % 4 * 4);
    const auto bias_of = [&](int filter) { return bias && filter < K ? bias[filter] : 0.0f; };
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int filter = first + (STAGED ? i * 64 : i / 2 * 64 + i % 2 * 2);
        biases[i] = make_float2(bias_of(filter), bias_of(filter + (STAGED ? 8 : 1)));
    }
}

// Bias, residual if ADD, and ReLU for a piece, in whose place the residual is. Several residuals are loaded before the first
// result is stored.
template <typename Element, bool ADD>
__device__ __forceinline__ void finish(const float (&sums)[BLOCKS][COLUMNS / 2], const float2* biases, unsigned char* staged,
                                       int piece, int with_relu) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x % WARPGROUP / 32 * 16, blocks_before = piece * PIECE_N / 8;
    if constexpr (TRANSPOSED && STAGED) {
        // Of 16 filters × 16 pixels lanes 8i … 8i + 7 know where the pixels of matrix i begin: i % 2 the upper 8 filters, i / 2
        // the later pixels.
        const unsigned corner = shared_address(staged) + (lane / 16 * 8 + lane % 8) * ROW_BYTES +
                                ((warp_row / 8 + lane / 8 % 2) ^ lane % 8) * 16;
        const unsigned floor = floor_word(with_relu, Element{});
#pragma unroll
        for (int first = 0; first < PIECE_N / 64 * COLUMNS / 16; first += TOGETHER) {
            const int block = first / (COLUMNS / 16), pixel = first % (COLUMNS / 16) * 16;
            const unsigned place = corner + block * BOX_BYTES + pixel * ROW_BYTES;
            const float* const sums_of_block = sums[piece * PIECE_N / 64 + block];
            unsigned words[TOGETHER][4] = {};
#pragma unroll
            for (int i = 0; i < TOGETHER && ADD; ++i) load_transposed(words[i], place + i * 16 * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                finish_matrices_of_rows<Element, ADD>(words[i], sums_of_block + (pixel / 8 + i * 2) * 4, biases[block], floor);
                store_transposed(place + i * 16 * ROW_BYTES, words[i]);
            }
        }
    } else if constexpr (sizeof(Element) == 2) {
        // Of 16 × 16 elements lanes 8i … 8i + 7 know where the rows of matrix i begin: i % 2 the lower rows, i / 2 the right
        // columns. The next 16 columns are at ^ 32.
        const unsigned corner =
            shared_address(staged) + (warp_row + lane % 16) * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
        const unsigned floor = floor_word(with_relu, Element{});
#pragma unroll
        for (int first = 0; first < BLOCKS * PIECE_N / 16; first += TOGETHER) {
            const int m = first / (PIECE_N / 16), column = first % (PIECE_N / 16) * 16;
            const unsigned place = corner + column / SLICE_CHANNELS * BOX_BYTES + m * 64 * ROW_BYTES;
            const auto place_of = [&](int i) { return place ^ (column % SLICE_CHANNELS + i * 16) * 2; };
            unsigned words[TOGETHER][4] = {};
#pragma unroll
            for (int i = 0; i < TOGETHER && ADD; ++i) load_matrices(words[i], place_of(i));
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int block = column / 8 + i * 2;
                finish_matrices<Element, ADD>(words[i], &sums[m][(blocks_before + block) * 4], &biases[block], floor);
                store_matrices(place_of(i), words[i]);
            }
        }
    } else if constexpr (STAGED) {
        const float least = least_kept(with_relu);
#pragma unroll
        for (int first = 0; first < BLOCKS * PIECE_N / 8; first += TOGETHER) {
            const int m = first / (PIECE_N / 8), block = first % (PIECE_N / 8);
            const auto place_of = [&](int i, int half) {
                const int row = m * 64 + warp_row + half * 8 + lane / 4;
                return staged_pair<Element>(staged, row, (block + i) * 8 + lane % 4 * 2);
            };
            float2 shortcuts[TOGETHER][2] = {};
#pragma unroll
            for (int i = 0; i < TOGETHER * 2 && ADD; ++i) shortcuts[i / 2][i % 2] = load_pair<Element>(place_of(i / 2, i % 2));
#pragma unroll
            for (int i = 0; i < TOGETHER * 2; ++i) {
                const float2 added = biases[block + i / 2], shortcut = shortcuts[i / 2][i % 2];
                const float* const pair = &sums[m][(blocks_before + block + i / 2) * 4 + i % 2 * 2];
                const float low = pair[0] + added.x + shortcut.x, high = pair[1] + added.y + shortcut.y;
                store_pair<Element>(place_of(i / 2, i % 2), relu_of(low, least), relu_of(high, least));
            }
        }
    }
}

// The same for a tile that is not staged. `y` and `residual`, unless that is null, begin with the tile's first output.
template <typename Element>
__device__ __forceinline__ void finish_in_memory(const float (&sums)[BLOCKS][COLUMNS / 2], const float2 (&biases)[PAIRS],
                                                 const Element* residual, Element* y, int pixels, int filters, int K,
                                                 int with_relu) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x % WARPGROUP / 32 * 16;
    const float least = least_kept(with_relu);
    const auto finished = [&](float sum, float bias, float shortcut) { return relu_of(sum + bias + shortcut, least); };
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const int filter = block * 64 + warp_row + lane % 4 * 4, behind = filter < filters ? pixels : 0;
        const float2 low = biases[block * 2], high = biases[block * 2 + 1];
#pragma unroll
        for (int first = 0; first < COLUMNS / 8; first += TOGETHER) {
            const auto pixel_of = [&](int i) { return (first + i) * 8 + lane / 4; };
            float4 shortcuts[TOGETHER] = {};
#pragma unroll
            for (int i = 0; i < TOGETHER && residual; ++i) {
                if (pixel_of(i) < behind) {
                    shortcuts[i] = *reinterpret_cast<const float4*>(residual + pixel_of(i) * K + filter);
                }
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const float* const four = &sums[block][(first + i) * 4];
                float sum[4] = {four[0], four[1], four[2], four[3]};
                transpose_filters(sum);
                const float4 shortcut = shortcuts[i];
                const float4 result = make_float4(finished(sum[0], low.x, shortcut.x), finished(sum[1], low.y, shortcut.y),
                                                  finished(sum[2], high.x, shortcut.z), finished(sum[3], high.y, shortcut.w));
                if (pixel_of(i) < behind) *reinterpret_cast<float4*>(y + pixel_of(i) * K + filter) = result;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                 const __grid_constant__ TensorMap shortcut_pixels, const __grid_constant__ TensorMap shortcut_filters,
                 const __grid_constant__ TensorMap residuals, const __grid_constant__ TensorMap outputs,
                 const float* __restrict__ bias, const ELEMENT* residual, ELEMENT* y, const Conv2dParams params) {
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
    const int tiles_n = (params.K + TILE_N - 1) / TILE_N;
    const Turns turns((params.gemm_m + TILE_M - 1) / TILE_M * tiles_n, params.backwards);
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
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) {
            produce({pixels, filters}, {shortcut_pixels, shortcut_filters}, residual ? &residuals : nullptr, barriers, stages,
                    params, turns, tiles_n);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int consumer = warpgroup - 1;
    const bool elected = threadIdx.x % WARPGROUP == 0;
    unsigned char* const staged_pieces = shared + NUM_STAGES * STAGE_BYTES + consumer * BUFFERS * PIECE_BYTES;
    const int step = CONSUMERS * turns.step, first_tile = turns.first + consumer * turns.step;
    // Asks for the residual of this consumer's piece of this number, of `tile`, as soon as its place has been stored from. Where
    // there is no residual only the place of the piece that is next must be free.
    const auto make_room = [&](int number, int tile) {
        if (!elected) return;
        residual ? store_wait<BUFFERS - AHEAD>() : store_wait<BUFFERS - 1>();
        if (!residual || !turns.have(tile)) return;
        const unsigned barrier = shared_address(&barriers.residual[consumer][number % BUFFERS]);
        const unsigned place = shared_address(staged_pieces) + number % BUFFERS * PIECE_BYTES;
        const int m0 = tile / tiles_n * TILE_M, n0 = tile % tiles_n * TILE_N + number % PIECES * PIECE_N;
        barrier_arrive_expecting(barrier, PIECE_BYTES);
        for (int i = 0; i < BOXES; ++i) {
            fetch_box(place + i * BOX_BYTES, residuals, barrier, n0 + i * SLICE_CHANNELS, m0);
        }
    };
    Place place{0, 0};
    if (consumer == 1) place.advance(slices % (2 * NUM_STAGES), NUM_STAGES);
    int turn = 0;
    for (int number = 0; STAGED && number < (PIECES > 1 ? AHEAD : BUFFERS - 1); ++number) {
        make_room(number, first_tile + number / PIECES * step);
    }
    for (int tile = first_tile; turns.have(tile); tile += step, ++turn) {
        const int m0 = tile / tiles_n * TILE_M, n0 = tile % tiles_n * TILE_N;
        if (STAGED && BUFFERS == 1 && PIECES == 1) make_room(turn, tile);
        float2 biases[PAIRS];  // many at once: one after the other they would take as long as many a tile's products
        const auto load = [&](int k) {
            TRANSPOSED ? load_biases_of_rows(biases, bias, k, params.K) : load_biases(biases, bias, k, params.K);
        };
        if (BIASES_AHEAD) load(n0);
        float sums[BLOCKS][COLUMNS / 2];
        multiply(sums, barriers, stages, place, slices, consumer, turn + consumer);
        if (!BIASES_AHEAD && PAIRS > PAIRS_OF_PIECE) load(n0);
        place.advance(slices % (2 * NUM_STAGES), NUM_STAGES);  // those of the other consumer
        if (STAGED && BUFFERS == 2 && PIECES == 1) make_room(turn + 1, tile + step);
        if constexpr (!STAGED) {
            const long long first = static_cast<long long>(m0) * params.K + n0;
            finish_in_memory(sums, biases, residual ? residual + first : nullptr, y + first, params.gemm_m - m0, params.K - n0,
                             params.K, params.relu);
            continue;
        }

#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            int number = turn * PIECES + piece;
            // So that the compiler keeps no addresses from piece to piece where registers are few.
            if (SUMS > 128) asm volatile("" : "+r"(number));
            unsigned char* const staged = staged_pieces + number % BUFFERS * PIECE_BYTES;
            const float2* const biases_of_piece = biases + piece * PAIRS_OF_PIECE % PAIRS;
            if (!BIASES_AHEAD && PAIRS == PAIRS_OF_PIECE) load(n0 + piece * PIECE_N);
            if (residual) {
                barrier_wait(shared_address(&barriers.residual[consumer][number % BUFFERS]), number / BUFFERS & 1);
            } else {
                warpgroup_sync(1 + consumer);  // the elected thread has waited for what was here
            }
            if (residual) {
                finish<ELEMENT, true>(sums, biases_of_piece, staged, piece, params.relu);
            } else {
                finish<ELEMENT, false>(sums, biases_of_piece, staged, piece, params.relu);
            }
            written_for_storing();
            warpgroup_sync(1 + consumer);
            if (elected) {
                for (int i = 0; i < BOXES; ++i) {
                    store_box(outputs, shared_address(staged) + i * BOX_BYTES, n0 + piece * PIECE_N + i * SLICE_CHANNELS, m0);
                }
                store_commit();
            }
            if (PIECES > 1) make_room(number + AHEAD, tile + (piece + AHEAD) / PIECES * step);
        }
    }
    if (elected) store_wait();  // shared memory ends with the block
}
