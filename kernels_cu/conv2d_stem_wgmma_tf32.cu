// conv2d_stem_wgmma_tf32: conv2d_stem_wgmma for TF32: two consumers share a row of the convolution and take turns.
// @solves 7×7 stem with normalisation, bias, ReLU and max-pool on the tensor cores of compute capability 9.0 (TF32)
// @arch sm_90a
//
// Equation   as conv2d_stem, in TF32: pixels, normalised, and filters rounded to nearest, sums in fp32.
// GEMM view  as conv2d_stem_wgmma: 64 filters by PIXELS outputs of one row; gemm_k = 50 depth columns of 4 channels: 49 taps
//            and one of zeros; channels from CHANNELS on are zeros too.
// Layouts    x of any strides (in elements), INPUT; filter K / 64 × STEPS × 128 × 4: what each thread of a consumer holds of a
//            step; bias K; y N × PP × PQ × K, where PP × PQ is the pooled size. All but x fp32.
// Grid       x: any number of blocks, which take the units in turn, best as many as there are multiprocessors; y: K / 64. A
//            unit as in conv2d_stem_wgmma. Block 384 threads: a producer and two consumer warpgroups.
// Shared     SHARED_BYTES, dynamic: PAIRS pairs of input rows, zeros, STAGES pairs as they lie in x.
// Requires   K a multiple of 64; y aligned to 8 bytes.
// This rung  against conv2d_stem_wgmma: a pixel of 4 channels is 16 bytes, and neighbouring outputs begin two of them apart.
//            8 outputs must lie one after the other, so odd and even columns of a row are arrays of their own: then each tap is
//            a column of the depth that begins somewhere in one of them, and an instruction takes any two. The taps of two rows
//            of the filter are 14, without padding. In registers the filters are 100 words: one consumer has no room for
//            sums of a whole row beside them, so each of two has half a row, and gives its neighbour on the right, once per
//            pooled row, the column that the other's first pooled one needs. There are the registers for one block per
//            multiprocessor. Consumers that multiplied at once would also both round and pool at once, and tensor cores wait:
//            so they take turns. Which row of the operand is which filter is free: a thread has neighbouring ones, and stores
//            pooled outputs from registers, of 8 lanes 64 bytes.
#include "dependent_launch.cuh"
#include "normalize.cuh"
#include "stem_params.cuh"
#include "tensor_core.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef COLUMNS
#define INPUT float      // of x: unsigned char, float, Half or BFloat16
#define CHANNELS 3       // 1 to 4
#define COLUMNS 56       // of the convolution in a consumer's half of a tile: a multiple of 8
#define ACCUMULATORS 28  // COLUMNS / 2, as a number
#endif

WARPGROUP_MMA_TF32_FROM_REGISTERS(COLUMNS, ACCUMULATORS)

constexpr int WARPGROUP = 128, WARPS = WARPGROUP / 32, CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int FILTERS = 64, MIN_BLOCKS = 1;
constexpr int PIXELS = CONSUMERS * COLUMNS, POOLED = PIXELS / 2;     // columns of a tile, and pooled ones
constexpr int BLOCKS = COLUMNS / 8, POOLED_COLUMNS = COLUMNS / 2;    // of a consumer: columns that a fragment counts in
constexpr int PAIR_STEPS = 7, LAST_STEPS = 4, STEPS = 3 * PAIR_STEPS + LAST_STEPS;  // of depth, 8 each: of a pair, of the last
constexpr int STEPS_IN_ADVANCE = 4;                                  // that are left when the other consumer's turn begins

// A row of input in shared memory: its odd columns, then its even ones. Cell j of the former is column 2j − 3 of a tile, of the
// latter column 2j − 2, counted from where its first output would begin without padding. Output q's tap s is cell q + s / 2.
constexpr int CELL_BYTES = 16, ODD_CELLS = PIXELS + 3, EVEN_CELLS = PIXELS + 2;
constexpr int ROW_BYTES = (ODD_CELLS + EVEN_CELLS) * CELL_BYTES;
// Pair i holds input rows 2i − 3 and 2i − 2: row p of the convolution reads pairs p to p + 3 but for the very last row.
constexpr int PAIRS = 8, PAIR_BYTES = 2 * ROW_BYTES, PAIRS_READ = 4;
constexpr int ZEROS_OFFSET = PAIRS * PAIR_BYTES, ZEROS_BYTES = COLUMNS * CELL_BYTES;
// Pairs on their way from x, a run of bytes for each channel of a row, wherever among 16 it begins, or one run as long.
constexpr int INPUT_BYTES = sizeof(INPUT), STAGES = 4, RUN_BYTES = ((2 * PIXELS + 6) * INPUT_BYTES + 15) / 16 * 16 + 16;
constexpr int STAGE_ROW_BYTES = CHANNELS * RUN_BYTES, STAGE_BYTES = 2 * STAGE_ROW_BYTES;
constexpr int STAGES_OFFSET = ZEROS_OFFSET + ZEROS_BYTES, SHARED_BYTES = STAGES_OFFSET + STAGES * STAGE_BYTES;
constexpr bool BYTES = INPUT_BYTES == 1;  // each of their values is converted once
using Entry = unsigned;                   // to TF32 in a table
constexpr int TABLE = BYTES ? 256 * CHANNELS : 1;
constexpr int BORDERS = 4;  // columns on their way to the consumer on the right, by its turns at most three pooled rows behind
static_assert(COLUMNS % 8 == 0 && PIXELS + 3 <= WARPGROUP, "whole fragments; a cell per thread");
static_assert(SHARED_BYTES / 16 < 1 << 14, "an operand expresses every distance");

struct Barriers {
    unsigned long long full[PAIRS], empty[PAIRS];  // arrivals count warps
    unsigned long long staged[STAGES];
    unsigned long long turn[CONSUMERS];  // the other consumer's products are all but done
    unsigned long long border[BORDERS];
};

// Among the producer's threads: 1.
__device__ __forceinline__ void role_sync(int role) { asm volatile("bar.sync %0, %1;" ::"r"(role), "n"(WARPGROUP) : "memory"); }

#include "stem_units.cuh"
#include "stem_pixels.cuh"
#include "stem_cells_tf32.cuh"
#include "stem_pool_tf32.cuh"
#include "stem_producer.cuh"

// This thread's words of 64 filters. Rows g and g + 8 of a warp's part of the operand are its filters 2g and 2g + 1.
__device__ __forceinline__ void load_filters(unsigned long long (&filters)[STEPS][2], const float* filter) {
    const float* const own = filter + threadIdx.x % WARPGROUP * 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        Chunk chunk = load_chunk(own + step * WARPGROUP * 4);
        round_to_tf32(chunk.words);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            filters[step][i] = static_cast<unsigned long long>(chunk.words[2 * i + 1]) << 32 | chunk.words[2 * i];
        }
    }
}

// Of a step of a pair: where in the pair its first depth column begins, and how far behind it the second, in bytes.
struct Taps {
    int first, distance;

    // Of each row taps 0 and 2, 4 and 6, 1 and 3; then tap 5 of both rows. What is behind tap 5 of the last row is not here.
    __device__ __forceinline__ constexpr explicit Taps(int step) : first(0), distance(CELL_BYTES) {
        const int kind = step % 3, row = step / 3;
        first = row * ROW_BYTES + (kind == 0 ? 0 : kind == 1 ? 2 : ODD_CELLS) * CELL_BYTES;
        if (step == PAIR_STEPS - 1) first = (ODD_CELLS + 2) * CELL_BYTES, distance = ROW_BYTES;
    }
};

// Begins to compute a consumer's half of a row of the convolution from four pairs, the first of them the given one of the
// block. `ring` is where its first cell lies in the first place.
__device__ __forceinline__ void begin_row(float (&sums)[COLUMNS / 2], const unsigned long long (&filters)[STEPS][2],
                                          unsigned ring, unsigned zeros, unsigned first, unsigned other_turn) {
    // Operands differ in their lower half only, and that by numbers: two instructions for each.
    const unsigned long long operand = plain_operand(ring, 0, 8 * CELL_BYTES);
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step == STEPS - STEPS_IN_ADVANCE && threadIdx.x % 32 == 0) barrier_arrive(other_turn);
        const bool last = step == STEPS - 1;
        const Taps taps(last ? PAIR_STEPS - 1 : step % PAIR_STEPS);
        const unsigned pair = static_cast<unsigned>(operand) + (first + step / PAIR_STEPS) % PAIRS * (PAIR_BYTES / 16);
        const unsigned distance = last ? zeros / 16 - pair - taps.first / 16 : taps.distance / 16;
        const unsigned low = pair + (taps.first / 16 + (distance << 16));
        warpgroup_mma<float, COLUMNS>(sums, filters[step], operand >> 32 << 32 | low, step > 0);
    }
    warpgroup_commit();
}

// Where in y a unit's rows go, and what of a row.
struct Target {
    float* place;       // of this thread's first two filters of its first pooled column
    int first, behind;  // pooled columns that are stored, counted from that column
    int past;           // the first column behind the map, counted from the consumer's first

    __device__ __forceinline__ Target(float* y, const Unit& unit, int half, const StemParams& params) {
        const int q0 = unit.column / 2, q = q0 + half * POOLED_COLUMNS + static_cast<int>(threadIdx.x % 4);
        first = q0 > 0 ? q0 + 1 - q : 0, behind = min(params.PQ, q0 + POOLED) - q;
        past = params.Q - unit.column - half * COLUMNS;
        place = y + ((static_cast<long long>(unit.n) * params.PP + unit.first / 2) * params.PQ + q) * params.K;
    }
};

// Multiplies and pools a consumer's half of all units of the block; there is at least one. `y` is this thread's first filter.
__device__ __forceinline__ void consume(const unsigned long long (&filters)[STEPS][2], const float2 biases, float* y,
                                        const unsigned char* shared, Border* borders, Barriers& barriers, const Units& units,
                                        const StemParams& params) {
    // What the operands depend on comes from one lane, so that the compiler knows it is the same in all: an instruction takes
    // no longer than others to tell it where they are.
    const int half = static_cast<int>(__shfl_sync(~0u, threadIdx.x / WARPGROUP - 1, 0));
    const bool speaks = threadIdx.x % 32 == 0;
    const unsigned zeros = shared_address(shared) + ZEROS_OFFSET;
    const unsigned ring = shared_address(shared) + half * COLUMNS * CELL_BYTES;
    const unsigned own_turn = shared_address(&barriers.turn[half]), other_turn = shared_address(&barriers.turn[1 - half]);
    unsigned pair = 0;              // the one of the block that the row begins with
    unsigned turn = 0, border = 0;  // how many of either there have been
    const auto begin = [&](float(&sums)[COLUMNS / 2], unsigned first, unsigned arrived) {
#pragma unroll 1
        for (unsigned i = arrived; i < first + PAIRS_READ; ++i) {
            barrier_wait(shared_address(&barriers.full[i % PAIRS]), i / PAIRS & 1);
        }
        // The phase before the first counts as complete: the first turn is that of consumer 0.
        barrier_wait(own_turn, (turn + half + 1) & 1);
        ++turn;
        begin_row(sums, filters, ring, zeros, first, other_turn);
    };
    unsigned number = blockIdx.x;
    Unit unit(number, units, params);
    int p = unit.first;
    Target target(y, unit, half, params);
    float sums[COLUMNS / 2];
    Row row, kept = {};  // kept: of the rows above those that belong to the next pooled row, the largest, or 0
    const auto finish = [&] {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) kept[i] = larger_or_nan(kept[i], row[i]);
        if (p % 2 == 0 && p < params.P - 1) return;  // no pooled row ends here
        if (target.past < COLUMNS && target.past % 2 == 1) leave_out(kept, target.past);
        float2 left = make_float2(kept[0], kept[2]);  // no column at all: the first one once more
        const unsigned arrival = shared_address(&barriers.border[border % BORDERS]);
        if (half == 0) {
            give_border(borders[border % BORDERS], kept);
            __syncwarp();
            if (speaks) barrier_arrive(arrival);
        } else {
            barrier_wait(arrival, border / BORDERS & 1);
            left = take_border(borders[border % BORDERS]);
        }
        ++border;
        const int behind = p % 2 == 1 && p == unit.first ? 0 : target.behind;  // what ends here belongs to the unit above
        pool(target.place, target.first, behind, params.K, kept, left);
        target.place += static_cast<long long>(params.PQ) * params.K;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) kept[i] = row[i];
    };
    begin(sums, 0, 0);
    while (true) {
        // The next row begins as soon as the sums of this one are out of its way: what is left to do for this one is done
        // beside products.
        warpgroup_wait<0>();
        warpgroup_results(sums);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) row[i] = sums[i] + (i / 2 % 2 == 0 ? biases.x : biases.y);
        const bool ends = p == unit.last;
        if (ends && number + gridDim.x >= units.count) break;
        const unsigned next = __shfl_sync(~0u, pair + (ends ? PAIRS_READ : 1), 0);
        begin(sums, next, pair + PAIRS_READ);
#pragma unroll 1
        for (; pair < next; ++pair) {
            if (speaks) barrier_arrive(shared_address(&barriers.empty[pair % PAIRS]));
        }
        finish();
        ++p;
        if (ends) {
            number += gridDim.x;
            unit = Unit(number, units, params);
            p = unit.first;
            target = Target(y, unit, half, params);
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) kept[i] = 0;
        }
    }
    finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_stem_wgmma_tf32(const INPUT* x, const float* __restrict__ filter, const float* __restrict__ bias, const float* mean,
                           const float* std, float* y, const StemParams params, const int stripe_rows) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Barriers barriers;
    __shared__ Border borders[BORDERS];
    __shared__ Entry table[TABLE];
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS; ++i) {
            barrier_init(shared_address(&barriers.full[i]), WARPS);
            barrier_init(shared_address(&barriers.empty[i]), CONSUMERS * WARPS);
        }
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&barriers.staged[i]), 1);
        for (int i = 0; i < CONSUMERS; ++i) barrier_init(shared_address(&barriers.turn[i]), WARPS);
        for (int i = 0; i < BORDERS; ++i) barrier_init(shared_address(&barriers.border[i]), WARPS);
        barrier_init_done();
    }
    __syncthreads();
    const Units units(params, stripe_rows);
    const int k0 = static_cast<int>(blockIdx.y) * FILTERS;

    let_next_kernel_start();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (threadIdx.x < COLUMNS) store_chunk(shared + ZEROS_OFFSET + threadIdx.x * CELL_BYTES, Chunk{});
        written_for_storing();  // that they are there the first full pair tells too
        wait_for_earlier_kernels();
        switch (source_of(x, params)) {
            case CHANNELS_LAST: return produce<CHANNELS_LAST>(x, mean, std, shared, table, barriers, units, params);
            case PLANES: return produce<PLANES>(x, mean, std, shared, table, barriers, units, params);
            default: return produce<STRIDED>(x, mean, std, shared, table, barriers, units, params);
        }
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    unsigned long long filters[STEPS][2];
    load_filters(filters, filter + static_cast<long long>(blockIdx.y) * (STEPS * WARPGROUP * 4));
    const int k = k0 + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4 * 2;
    const float2 biases = make_float2(bias[k], bias[k + 1]);
    // They are here before the wait: what does not change is fetched while earlier kernels run.
    warpgroup_operands(filters);
    wait_for_earlier_kernels();  // they may still read y
    if (blockIdx.x < units.count) consume(filters, biases, y + k, shared, borders, barriers, units, params);
}
