// conv2d_stem_wgmma_tf32: conv2d_stem_wgmma for fp32: pixels pass through registers, and four roles share the work.
// @solves 7×7 stem with normalisation, bias, ReLU and max-pool on the tensor cores of compute capability 9.0 (TF32, 3×TF32)
// @arch sm_90a
//
// Equation   as conv2d_stem; in TF32 pixels, normalised, and filters are rounded to nearest, with PRODUCTS = 3 products and
//            sums are formed as in conv2d_mma.
// GEMM view  outputs by 64 filters; gemm_k = STEPS · 8: for each channel and column of the filter its 7 rows, and zeros.
// Layouts    x of any strides (in elements), INPUT; filter K / 64 × STEPS × PARTS × 2 × 64 × 4, as tensor cores read it: of a
//            step first rows 0 to 3, then 4 to 7; PARTS: the nearest TF32, with PRODUCTS = 3 then what it leaves; bias K; y
//            N × PP × PQ × K, where PP × PQ is the pooled size. All but x fp32.
// Grid       x: any number of blocks, which take the units in turn, best as many as there are multiprocessors; y: K / 64. A
//            unit as in conv2d_stem_wgmma. Block 512 threads: warpgroups that bring pixels and pool, and two that multiply.
// Shared     SHARED_BYTES, dynamic: PAIRS pairs of input rows, filters, ROWS rows of the convolution, STAGES pairs as they lie
//            in x.
// Requires   K a multiple of 64; y aligned to 16 bytes.
// This rung  against conv2d_stem_wgmma: 4 bytes an element, so that cells of 4 channels would have an instruction compute two
//            taps, and three channels waste a quarter of it. Words that threads load themselves may lie anywhere: the depth
//            of a step is a column of the filter in one channel, of which 7 of 8 count. Outputs are the rows of the product
//            for that, pixels its first operand, which may come from registers, and filters stay in shared memory.
//            A warp computes 16 neighbouring outputs of a row, and a fragment's rows g and g + 8 are outputs 2g and 2g + 1:
//            then the words of neighbouring taps are the same ones, a thread finds both outputs' in one load of 8 bytes, and
//            pools them by themselves. A row of 112 outputs is 7 such groups, an instruction takes any 4: so groups are
//            numbered through all the block's units, and consumers take 4 of them by turns.
//            Pooled columns go on to a warpgroup of their own through shared memory. While a consumer loads, rounds or
//            stores, the other multiplies.
#include "dependent_launch.cuh"
#include "normalize.cuh"
#include "stem_params.cuh"
#include "tensor_core.cuh"
#include "tensor_memory.cuh"
#include "warpgroup_registers.cuh"

#ifndef PIXELS
#define PRODUCTS 1   // TF32 products per fp32 product: 1 or 3
#define INPUT float  // of x: unsigned char, float, Half or BFloat16
#define CHANNELS 3   // 1 to 4
#define PIXELS 112   // columns of the convolution in a tile: a multiple of 16
#endif

constexpr int WARPGROUP = 128, WARPS = WARPGROUP / 32, CONSUMERS = 2, THREADS = (2 + CONSUMERS) * WARPGROUP;
constexpr int FILTERS = 64, MIN_BLOCKS = 1;
constexpr int POOLED = PIXELS / 2;                       // columns of a tile, pooled
constexpr int GROUP = 16, GROUPS = PIXELS / GROUP;       // outputs that a warp computes at once; of a row
constexpr int GROUP_POOLED = GROUP / 2;
constexpr int COLUMNS = 7, STEPS = CHANNELS * COLUMNS;   // of the filter; of the depth
constexpr int PARTS = PRODUCTS == 3 ? 2 : 1;
constexpr int PART_BYTES = FILTERS * 32, CHANNEL_FILTER_BYTES = COLUMNS * PARTS * PART_BYTES;
constexpr bool CROWDED = PRODUCTS * CHANNELS > 9;        // little room is left

// A row of input in shared memory: of each channel the odd columns, then the even ones. Word j of the former is column 2j − 3
// of a tile, of the latter column 2j − 2, counted from where its first output would begin without padding. Output q's tap s is
// word q + s / 2. Rows of the filter are rows of input, and a warp reads the same words of four at once: they begin 8 banks
// apart.
constexpr int ODD_WORDS = PIXELS + 4, EVEN_WORDS = PIXELS + 2, CHANNEL_WORDS = ODD_WORDS + EVEN_WORDS;
constexpr int ROW_BYTES = ((CHANNELS * CHANNEL_WORDS + 23) / 32 * 32 + 8) * 4;
// Pair i holds input rows 2i − 3 and 2i − 2: row p of the convolution reads pairs p to p + 3 but for the very last row.
constexpr int PAIRS = 8, PAIR_BYTES = 2 * ROW_BYTES, PAIRS_READ = 4;
constexpr int FILTERS_OFFSET = PAIRS * PAIR_BYTES;
// A row of the convolution, pooled along itself: of each group its pooled columns, then what its last output adds to the next
// group's first column.
constexpr int ROWS = CROWDED ? 2 : 3, COLUMN_BYTES = FILTERS * 4, GROUP_BYTES = (GROUP_POOLED + 1) * COLUMN_BYTES;
constexpr int POOLED_ROW_BYTES = GROUPS * GROUP_BYTES, ROWS_OFFSET = FILTERS_OFFSET + CHANNELS * CHANNEL_FILTER_BYTES;
// Pairs on their way from x, a run of bytes for each channel of a row, wherever among 16 it begins, or one run as long.
constexpr int INPUT_BYTES = sizeof(INPUT), STAGES = CROWDED ? 2 : 4, RUN_BYTES = ((2 * PIXELS + 6) * INPUT_BYTES + 15) / 16 * 16 + 16;
constexpr int STAGE_ROW_BYTES = CHANNELS * RUN_BYTES, STAGE_BYTES = 2 * STAGE_ROW_BYTES;
constexpr int STAGES_OFFSET = ROWS_OFFSET + ROWS * POOLED_ROW_BYTES, SHARED_BYTES = STAGES_OFFSET + STAGES * STAGE_BYTES;
constexpr bool BYTES = INPUT_BYTES == 1;  // each of their values is converted once
using Entry = unsigned;                   // to what is stored, in a table
constexpr int TABLE = BYTES ? 256 * CHANNELS : 1;
static_assert(PIXELS % GROUP == 0 && PIXELS + 3 <= WARPGROUP, "whole groups; a word per thread");
static_assert(GROUPS >= WARPS, "what an instruction computes is of two rows at most, whose pairs have room together");

struct Barriers {
    unsigned long long full[PAIRS], empty[PAIRS];
    unsigned long long staged[STAGES];
    unsigned long long filters[CHANNELS];
    unsigned long long computed[ROWS], pooled[ROWS];
};

// Among the producer's threads: 1.
__device__ __forceinline__ void role_sync(int role) { asm volatile("bar.sync %0, %1;" ::"r"(role), "n"(WARPGROUP) : "memory"); }

// Lanes of a warp read and write with ordinary instructions: each says for itself that it has.
constexpr int ARRIVALS = 32;
__device__ __forceinline__ void warp_arrive(unsigned barrier) { barrier_arrive(barrier); }
// Of a producer's warp: its part of a pair is there.
__device__ __forceinline__ void pair_stored(unsigned barrier) { warp_arrive(barrier); }

#include "stem_units.cuh"
#include "stem_pixels.cuh"
#include "stem_words.cuh"
#include "stem_producer.cuh"
#include "stem_pool_rows.cuh"

// A warp's next outputs: of all groups of the block's units, one behind the other.
struct Group {
    const Units& units;
    const StemParams& params;
    unsigned number = blockIdx.x;   // the unit
    Unit unit;
    int p, column = 0;              // row of the convolution; which group of it. Behind the last unit how many groups behind
    unsigned pair = 0, row = 0;     // its first pair, and its row, of all that the block brings and computes
    bool exists = true;

    __device__ __forceinline__ Group(const Units& units, const StemParams& params)
        : units(units), params(params), unit(number, units, params), p(unit.first) {}

    __device__ __forceinline__ void advance(int count) {
        column += count;
#pragma unroll 1
        while (exists && column >= GROUPS) {
            column -= GROUPS, ++row;
            if (p++ < unit.last) {
                ++pair;
                continue;
            }
            pair += PAIRS_READ, number += gridDim.x;
            exists = number < units.count;
            if (exists) unit = Unit(number, units, params), p = unit.first;
        }
    }
};

// What a thread needs of the odd or the even columns of a channel: of filter rows t and t + 4, or zeros in place of row 7.
struct Words {
    unsigned words[2][5];

    // `rows` are where these begin for output 2g; `mask` is that of the second.
    __device__ __forceinline__ void load(const unsigned char* const (&rows)[2], unsigned mask, int channel, int odd) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned char* const place = rows[i] + (channel * CHANNEL_WORDS + (odd ? 0 : ODD_WORDS)) * 4;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const float2 pair = load_pair<float>(place + j * 4);
                words[i][j] = __float_as_uint(pair.x), words[i][j + 1] = __float_as_uint(pair.y);
            }
            words[i][4] = odd ? *reinterpret_cast<const unsigned*>(place + 16) : 0;
#pragma unroll
            for (int j = 0; j < 5; ++j) words[i][j] &= i == 1 ? mask : ~0u;
        }
    }

    // The operand's words at the tap that is `shift` words further.
    __device__ __forceinline__ void fragment(unsigned (&operand)[4], int shift) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[i] = words[i / 2][shift + i % 2];
    }
};

// Of the filter's columns: first the four that meet odd ones, then the three others.
__device__ __forceinline__ constexpr int taps_of(int odd) { return odd ? 4 : 3; }
__device__ __forceinline__ constexpr int first_step(int half) { return half / 2 * COLUMNS + half % 2 * 4; }

// Computes a group of each warp; `rows` are where its pixels begin. While an instruction is under way nothing branches: the
// compiler would use the registers that it reads again.
template <typename HasRead>
__device__ __forceinline__ void multiply(float (&sums)[FILTERS / 2], const unsigned char* const (&rows)[2], unsigned mask,
                                         unsigned long long filters, HasRead has_read) {
    constexpr int HALVES = 2 * CHANNELS;  // odd and even columns
    if constexpr (PRODUCTS == 1) {
        constexpr int AT_ONCE = CHANNELS == 4 ? 2 : CHANNELS;  // channels that registers have room for
#pragma unroll
        for (int c = 0; c < CHANNELS; c += AT_ONCE) {
            unsigned operands[AT_ONCE * COLUMNS][4];
#pragma unroll
            for (int half = 0; half < 2 * AT_ONCE; ++half) {
                Words words;
                words.load(rows, mask, c + half / 2, 1 - half % 2);
#pragma unroll
                for (int shift = 0; shift < taps_of(1 - half % 2); ++shift) {
                    words.fragment(operands[first_step(half) + shift], shift);
                }
            }
            if (c + AT_ONCE == CHANNELS) has_read();
            warpgroup_operands(operands);
            warpgroup_fence();
#pragma unroll
            for (int i = 0; i < AT_ONCE * COLUMNS; ++i) {
                const int step = c * COLUMNS + i;
                warpgroup_mma_tf32<FILTERS>(sums, operands[i], filters + step * PART_BYTES / 16, step > 0);
            }
            warpgroup_commit();
            warpgroup_wait<0>();
        }
        warpgroup_results(sums);
    } else {
        Words next;
        next.load(rows, mask, 0, 1);
        float products[2][FILTERS / 2];
        const auto add = [&](int step) {
            warpgroup_results(products[step % 2]);
#pragma unroll
            for (int i = 0; i < FILTERS / 2; ++i) sums[i] = step > 0 ? sums[i] + products[step % 2][i] : products[step % 2][i];
        };
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            Words high = next, low;
#pragma unroll
            for (int i = 0; i < 2; ++i) split_tf32(high.words[i], low.words[i]);
#pragma unroll
            for (int shift = 0; shift < taps_of(1 - half % 2); ++shift) {
                const int step = first_step(half) + shift;
                unsigned operands[2][4];
                high.fragment(operands[0], shift);
                low.fragment(operands[1], shift);
                warpgroup_operands(operands);
                const unsigned long long filters_high = filters + step * 2 * PART_BYTES / 16;
                const unsigned long long filters_low = filters_high + PART_BYTES / 16;
                warpgroup_fence();
                warpgroup_mma_tf32<FILTERS>(products[step % 2], operands[1], filters_high, false);
                warpgroup_mma_tf32<FILTERS>(products[step % 2], operands[0], filters_low, true);
                warpgroup_mma_tf32<FILTERS>(products[step % 2], operands[0], filters_high, true);
                warpgroup_commit();
                // The next pixels come while tensor cores are busy.
                if (shift == 0 && half + 1 < HALVES) next.load(rows, mask, (half + 1) / 2, half % 2);
                if (step > 0) {
                    warpgroup_wait<1>();
                    add(step - 1);
                }
            }
        }
        warpgroup_wait<0>();
        add(STEPS - 1);
        has_read();
    }
}

// Pools a group's columns along its row, and leaves them at `place`. Outputs from column `past` of the tile on do not exist.
__device__ __forceinline__ void pool_columns(unsigned char* place, float (&sums)[FILTERS / 2], int group, int past) {
    const int lane = threadIdx.x % 32, g = lane / 4, k = lane % 4 * 2;
    const bool odd_exists = group * GROUP + 2 * g + 1 < past;
#pragma unroll
    for (int i = 0; i < FILTERS / 2; i += i % 2 == 0 ? 1 : 3) {
        float &even = sums[i], &odd = sums[i + 2];
        odd = odd_exists ? odd : even;
        const float left = __shfl_sync(~0u, odd, (lane + 28) % 32);
        even = larger_or_nan(larger_or_nan(even, odd), g > 0 ? left : even);
    }
#pragma unroll
    for (int j = 0; j < FILTERS / 8; ++j) {
        *pooled_pair(place, g, j * 8 + k) = make_float2(sums[j * 4], sums[j * 4 + 1]);
    }
    if (g < 7) return;
#pragma unroll
    for (int j = 0; j < FILTERS / 8; ++j) {
        *pooled_pair(place, GROUP_POOLED, j * 8 + k) = make_float2(sums[j * 4 + 2], sums[j * 4 + 3]);
    }
}

// Computes every second four of the block's groups, a warp one of the four.
__device__ __forceinline__ void consume(unsigned char* shared, Barriers& barriers, const Units& units, const StemParams& params) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 - 2 * WARPS, 0), g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned long long filters = plain_operand(shared_address(shared) + FILTERS_OFFSET, PART_BYTES / 2, 128);
    const unsigned mask = t == 3 ? 0 : ~0u;
    unsigned arrived = 0;  // pairs
    const auto wait_for_pairs = [&](unsigned count) {
#pragma unroll 1
        for (; arrived < count; ++arrived) barrier_wait(shared_address(&barriers.full[arrived % PAIRS]), arrived / PAIRS & 1);
    };
    // Of pairs that it does not read a warp says so too, but not before they are there.
    unsigned given_back = 0;
    const auto give_back = [&](unsigned count) {
#pragma unroll 1
        for (; given_back < count; ++given_back) {
            wait_for_pairs(given_back + 1);
            warp_arrive(shared_address(&barriers.empty[given_back % PAIRS]));
        }
    };
    Group group(units, params);
    group.advance(warp);
    give_back(group.pair);
    for (int c = 0; c < CHANNELS; ++c) barrier_wait(shared_address(&barriers.filters[c]), 0);
    // As long as the first of the four exists. A warp whose own does not multiplies what it may read, and forgets it.
    while (group.exists || group.column < warp % WARPS) {
        const bool exists = group.exists;
        const unsigned char* rows[2] = {shared + FILTERS_OFFSET, shared + FILTERS_OFFSET};
        if (exists) {
            wait_for_pairs(group.pair + PAIRS_READ);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned char* const pair = shared + (group.pair + 2 * i + t / 2) % PAIRS * PAIR_BYTES;
                rows[i] = pair + t % 2 * ROW_BYTES + (group.column * GROUP + 2 * g) * 4;
            }
        }
        const int number = group.column, past = params.Q - group.unit.column;
        const unsigned row = group.row;
        float sums[FILTERS / 2];
        multiply(sums, rows, mask, filters, [&] {
            group.advance(CONSUMERS * WARPS);
            give_back(group.pair);
        });
        if (!exists) continue;
        barrier_wait(shared_address(&barriers.pooled[row % ROWS]), ~(row / ROWS) & 1);
        pool_columns(shared + ROWS_OFFSET + row % ROWS * POOLED_ROW_BYTES + number * GROUP_BYTES, sums, number, past);
        warp_arrive(shared_address(&barriers.computed[row % ROWS]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_stem_wgmma_tf32(const INPUT* x, const float* __restrict__ filter, const float* __restrict__ bias, const float* mean,
                           const float* std, float* y, const StemParams params, const int stripe_rows) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Barriers barriers;
    __shared__ Entry table[TABLE];
    const Units units(params, stripe_rows);
    if (blockIdx.x >= units.count) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS; ++i) {
            barrier_init(shared_address(&barriers.full[i]), WARPS * ARRIVALS);
            barrier_init(shared_address(&barriers.empty[i]), CONSUMERS * WARPS * ARRIVALS);
        }
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&barriers.staged[i]), 1);
        for (int i = 0; i < CHANNELS; ++i) barrier_init(shared_address(&barriers.filters[i]), 1);
        for (int i = 0; i < ROWS; ++i) {
            barrier_init(shared_address(&barriers.computed[i]), GROUPS * ARRIVALS);
            barrier_init(shared_address(&barriers.pooled[i]), WARPS * ARRIVALS);
        }
        barrier_init_done();
        // Filters do not change, so they come while earlier kernels run.
        const auto source = reinterpret_cast<const unsigned char*>(filter) + blockIdx.y * (CHANNELS * CHANNEL_FILTER_BYTES);
        for (int c = 0; c < CHANNELS; ++c) {
            const unsigned here = shared_address(&barriers.filters[c]);
            barrier_arrive_expecting(here, CHANNEL_FILTER_BYTES);
            fetch_bytes(shared_address(shared) + FILTERS_OFFSET + c * CHANNEL_FILTER_BYTES, source + c * CHANNEL_FILTER_BYTES,
                        CHANNEL_FILTER_BYTES, here);
        }
    }
    __syncthreads();

    let_next_kernel_start();
    if (threadIdx.x < 2 * WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        wait_for_earlier_kernels();  // they may have written x, and may still read y
        if (threadIdx.x >= WARPGROUP) return pool_rows(y, bias, shared + ROWS_OFFSET, barriers, units, params);
        switch (source_of(x, params)) {
            case CHANNELS_LAST: return produce<CHANNELS_LAST>(x, mean, std, shared, table, barriers, units, params);
            case PLANES: return produce<PLANES>(x, mean, std, shared, table, barriers, units, params);
            default: return produce<STRIDED>(x, mean, std, shared, table, barriers, units, params);
        }
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
    consume(shared, barriers, units, params);
}
