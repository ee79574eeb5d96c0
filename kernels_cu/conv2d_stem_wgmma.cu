// conv2d_stem_wgmma: conv2d_stem on Hopper's warpgroup instructions: each input value once, each row of the convolution once.
// @solves 7×7 stem with normalisation, bias, ReLU and max-pool on the tensor cores of compute capability 9.0 (fp16, bf16)
// @arch sm_90a
//
// Equation   as conv2d_stem.
// GEMM view  the product is transposed: 64 filters by PIXELS outputs of one row, gemm_k = 7 rows · 8 columns · 4 channels, of
//            which the eighth column and channels from CHANNELS on are zeros.
// Layouts    x of any strides (in elements), INPUT; filter K × 7 × 8 × 4, ELEMENT, zero-padded; bias K, fp32;
//            y N × PP × PQ × K, ELEMENT, where PP × PQ is the pooled size.
// Grid       x: any number of blocks, which take the units in turn, best as many as are resident at once; y: K / 64. A unit is
//            stripe_rows pooled rows of a tile of columns of an image. Block 256 threads: a producer and a consumer warpgroup.
// Shared     SHARED_BYTES, dynamic: PAIRS pairs of input rows, two pooled rows on their way out, STAGES pairs as they lie in x.
// Requires   K a multiple of 64; y aligned to 16 bytes.
// This rung  against conv2d_stem: the filters stay in the consumer's registers for good, so that shared memory gives pixels
//            only. Two neighbouring outputs begin 2 columns = 8 elements = 16 bytes apart: 8 of them are 128 bytes one after
//            the other, just what the instruction takes for 8 rows of an operand that is not swizzled. The im2col matrix is
//            the input row itself, read with overlaps. Only the last of 7 columns needs a copy, as the column behind it,
//            though its weights are zeros, might be NaN. Beside the copy stand ones, whose weights are the bias in parts, so
//            that sums need none. A block goes down the image: each row of the convolution is computed, rounded and compared
//            in registers with those above it, so that only pooled rows leave them. As soon as its sums are rounded to half as
//            many registers the next row's products take their place, and run while this row is compared, pooled and stored;
//            what is left between the two is filled by the other block of the multiprocessor. The producer says for all what
//            it has written to the tensor cores: the same fence in a consumer would wait for the outputs that are on their way
//            to memory. A warp that loads the rows itself waits for memory once per pair, however many it has asked for: its
//            few counters of outstanding loads are waited for as a whole. So the accelerator brings them, three pairs ahead,
//            and the producer only converts; but rows that are not aligned to 16 bytes it loads itself. Bytes are converted
//            once each, to a table.
#include "dependent_launch.cuh"
#include "normalize.cuh"
#include "stem_params.cuh"
#include "tensor_memory.cuh"
#include "transposed_matrices.cuh"
#include "warpgroup.cuh"

#ifndef PIXELS
#define ELEMENT Half     // of filter and output, and what tensor cores multiply: Half or BFloat16
#define INPUT float      // of x: unsigned char, float, Half or BFloat16
#define CHANNELS 3       // 1 to 4
#define PIXELS 112       // columns of the convolution in a tile: a multiple of 16
#define ACCUMULATORS 56  // PIXELS / 2, as a number
#endif

WARPGROUP_MMA_FROM_REGISTERS(PIXELS, ACCUMULATORS)

constexpr int WARPGROUP = 128, WARPS = WARPGROUP / 32, THREADS = 2 * WARPGROUP, FILTERS = 64, MIN_BLOCKS = 2;
constexpr int R = 7, STEPS = 2 * R, WORDS = STEPS * 16 / 2;  // of depth, 16 elements each; words of a filter
constexpr int BLOCKS = PIXELS / 8, POOLED = PIXELS / 2;      // of a row: columns that a fragment counts in; pooled columns

// A row of input in shared memory. A cell is two columns of 4 channels: cell j of a tile holds columns 2j − 3 and 2j − 2,
// counted from where its first output would begin without padding. Output q reads cells q, q + 1, q + 2, and of a second array
// the last cell q: column 2q + 3, then 1, 1, 1, 0.
constexpr int CELL_BYTES = 16, CELLS = PIXELS + 2, ROW_BYTES = (CELLS + PIXELS) * CELL_BYTES;
// Pair i holds input rows 2i − 3 and 2i − 2: row p of the convolution reads pairs p to p + 3 but for the very last row.
constexpr int PAIRS = 8, PAIR_BYTES = 2 * ROW_BYTES, PAIRS_READ = 4;
constexpr int TILE_PITCH = FILTERS * 2 + 16, TILE_BYTES = POOLED * TILE_PITCH;  // the 8 rows of a matrix in different banks
// Pairs on their way from x, a run of bytes for each channel of a row, wherever among 16 it begins, or one run as long.
constexpr int INPUT_BYTES = sizeof(INPUT), STAGES = 4, RUN_BYTES = ((2 * PIXELS + 6) * INPUT_BYTES + 15) / 16 * 16 + 16;
constexpr int STAGE_ROW_BYTES = CHANNELS * RUN_BYTES, STAGE_BYTES = 2 * STAGE_ROW_BYTES;
constexpr int STAGES_OFFSET = PAIRS * PAIR_BYTES + 2 * TILE_BYTES, SHARED_BYTES = STAGES_OFFSET + STAGES * STAGE_BYTES;
constexpr bool BYTES = INPUT_BYTES == 1;  // each of their values is converted once
using Entry = unsigned short;             // to an element's bits in a table
constexpr int TABLE = BYTES ? 256 * CHANNELS : 1;
static_assert(MIN_BLOCKS * (SHARED_BYTES + 2 * TABLE + 2048) <= 228 * 1024, "room for all, and what the system reserves");
static_assert(PIXELS % 16 == 0 && PIXELS + 3 <= WARPGROUP, "two blocks of columns are pooled at once; a cell per thread");

struct Barriers {
    unsigned long long full[PAIRS], empty[PAIRS];  // arrivals count warps
    unsigned long long staged[STAGES];
};

// Among the threads of one role: 1 of producers, 2 of consumers.
__device__ __forceinline__ void role_sync(int role) { asm volatile("bar.sync %0, %1;" ::"r"(role), "n"(WARPGROUP) : "memory"); }
// Of a producer's warp: its part of a pair is there.
__device__ __forceinline__ void pair_stored(unsigned barrier) {
    written_for_storing();  // the tensor cores read as the accelerator does
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

#include "stem_units.cuh"
#include "stem_pixels.cuh"
#include "stem_cells.cuh"
#include "stem_pool.cuh"
#include "stem_producer.cuh"

// A bias as three elements whose sum it is, and zero: what the three ones beside a row's last column are multiplied with. One
// beyond what an element can be is infinite.
__device__ __forceinline__ void split_bias(unsigned (&words)[2], float bias) {
    const auto rounded = [](float value) { return to_float(ELEMENT{static_cast<unsigned short>(pack_pair(value, 0, ELEMENT{}))}); };
    const float first = rounded(bias), rest = first - first == 0 ? bias - first : 0.0f, second = rounded(rest);
    words[0] = pack_pair(first, second, ELEMENT{}), words[1] = pack_pair(rest - second, 0, ELEMENT{});
}

// This thread's words of 64 filters, as the instruction takes them. Their first rows have the bias as an eighth column.
__device__ __forceinline__ void load_filters(unsigned long long (&filters)[STEPS][2], const ELEMENT* filter, const float* bias) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const unsigned* const words = reinterpret_cast<const unsigned*>(filter) + (warp * 16 + lane / 4) * WORDS + lane % 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned upper = words[step * 8 + half * 4], lower = words[8 * WORDS + step * 8 + half * 4];
            filters[step][half] = static_cast<unsigned long long>(lower) << 32 | upper;
        }
    }
    // The last 4 of the second instruction's 16 elements belong to lanes with t = 2 and 3.
    unsigned upper[2], lower[2];
    split_bias(upper, bias[warp * 16 + lane / 4]), split_bias(lower, bias[warp * 16 + lane / 4 + 8]);
    const unsigned high = lane % 4 == 2 ? upper[0] : upper[1], low = lane % 4 == 2 ? lower[0] : lower[1];
    if (lane % 4 >= 2) filters[1][1] = static_cast<unsigned long long>(low) << 32 | high;
}

// Begins to compute a row of the convolution from four pairs, the first of them the given one of the block.
__device__ __forceinline__ void begin_row(float (&sums)[PIXELS / 2], const unsigned long long (&filters)[STEPS][2],
                                          unsigned pairs, unsigned first) {
    // Operands differ in their lower half only, and that by numbers: two instructions for each.
    const unsigned long long operand = plain_operand(pairs, 0, 8 * CELL_BYTES);
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int r = step / 2, half = step % 2;
        const unsigned pair = static_cast<unsigned>(operand) + (first + r / 2) % PAIRS * (PAIR_BYTES / 16);
        // Cells q and q + 1, then q + 2 and the last one.
        const unsigned cells = (r % 2 * ROW_BYTES + half * 2 * CELL_BYTES) / 16;
        const unsigned depth_step = half == 0 ? CELL_BYTES / 16 : (CELLS - 2) * CELL_BYTES / 16;
        const unsigned low = pair + cells + (depth_step << 16);
        warpgroup_mma<ELEMENT, PIXELS>(sums, filters[step], operand >> 32 << 32 | low, step > 0);
    }
    warpgroup_commit();
}

// Waits for the row that has been begun.
__device__ __forceinline__ void end_row(float (&sums)[PIXELS / 2]) {
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < PIXELS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // nothing reads them earlier
}

// Where in y a unit's rows go, and what of a row.
struct Target {
    ELEMENT* place;     // of this thread's first chunk of the row
    int first, behind;  // pooled columns of the tile that are stored
    int past;           // the first column behind the map

    __device__ __forceinline__ Target(ELEMENT* y, const Unit& unit, const StemParams& params) {
        const int thread = threadIdx.x % WARPGROUP, q0 = unit.column / 2;
        first = q0 > 0 ? 1 : 0, behind = min(params.PQ - q0, POOLED), past = params.Q - unit.column;
        const long long row = static_cast<long long>(unit.n) * params.PP + unit.first / 2;
        place = y + (row * params.PQ + q0 + thread / 8) * params.K + thread % 8 * 8;
    }
};

// Multiplies and pools all units of the block; there is at least one.
__device__ __forceinline__ void consume(const unsigned long long (&filters)[STEPS][2], ELEMENT* y, unsigned char* shared,
                                        Barriers& barriers, const Units& units, const StemParams& params) {
    const int thread = threadIdx.x % WARPGROUP;
    const unsigned char* const source = shared + thread / 8 * TILE_PITCH + thread % 8 * 16;
    int tile = PAIRS * PAIR_BYTES, other_tile = tile + TILE_BYTES;
    unsigned pair = 0, arrived = 0;  // the one that the row begins with, and how many have been waited for, of the block
    const auto wait_for_pairs = [&](unsigned end) {
#pragma unroll 1
        for (; arrived < end; ++arrived) barrier_wait(shared_address(&barriers.full[arrived % PAIRS]), arrived / PAIRS & 1);
    };
    unsigned number = blockIdx.x;
    Unit unit(number, units, params);
    int p = unit.first;
    Target target(y, unit, params);
    float sums[PIXELS / 2];
    Row row, kept;  // kept: of the rows above those that belong to the next pooled row, the largest, or 0
    const auto pack = [&] {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) row[i % 2][i / 2] = pack_pair(sums[2 * i], sums[2 * i + 1], ELEMENT{});
    };
    const auto finish = [&] {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            const int m = i % 2, j = i / 2;
            kept[m][j] = larger_word(larger_word(kept[m][j], row[m][j], ELEMENT{}), 0, ELEMENT{});
        }
        if (p % 2 == 0 && p < params.P - 1) return;  // no pooled row ends here
        if (target.past < PIXELS && target.past % 2 == 1) leave_out(kept, target.past);
        pool(shared_address(shared) + tile, kept);
        copy(kept, row);
        role_sync(2);  // also: all have read the other tile, which is the next to be written
        const int behind = p % 2 == 1 && p == unit.first ? 0 : target.behind;  // what ends here belongs to the unit above
#pragma unroll
        for (int i = 0; i < POOLED; i += WARPGROUP / 8) {
            const int q = i + thread / 8;
            if (target.first <= q && q < behind) {
                store_chunk(target.place + static_cast<long long>(i) * params.K, load_chunk(source + tile + i * TILE_PITCH));
            }
        }
        target.place += static_cast<long long>(params.PQ) * params.K;
        const int written = tile;
        tile = other_tile, other_tile = written;
    };
    const auto clear = [](Row& row) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) row[i % 2][i / 2] = 0;
    };
    clear(kept);
    wait_for_pairs(PAIRS_READ);
    begin_row(sums, filters, shared_address(shared), 0);
    while (true) {
        // The next row begins as soon as the sums of this one are out of its way: what is left to do for this one is done
        // beside its products.
        end_row(sums);
        pack();
        const bool ends = p == unit.last;
        if (ends && number + gridDim.x >= units.count) break;
        const unsigned next = pair + (ends ? PAIRS_READ : 1);
        wait_for_pairs(next + PAIRS_READ);
        begin_row(sums, filters, shared_address(shared), next);
#pragma unroll 1
        for (; pair < next; ++pair) {
            if (thread % 32 == 0) barrier_arrive(shared_address(&barriers.empty[pair % PAIRS]));
        }
        finish();
        ++p;
        if (ends) {
            number += gridDim.x;
            unit = Unit(number, units, params);
            p = unit.first;
            target = Target(y, unit, params);
            clear(kept);
        }
    }
    finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_stem_wgmma(const INPUT* x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias, const float* mean,
                      const float* std, ELEMENT* y, const StemParams params, const int stripe_rows) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Barriers barriers;
    __shared__ Entry table[TABLE];
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS; ++i) {
            barrier_init(shared_address(&barriers.full[i]), WARPS);
            barrier_init(shared_address(&barriers.empty[i]), WARPS);
        }
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&barriers.staged[i]), 1);
        barrier_init_done();
    }
    __syncthreads();
    const Units units(params, stripe_rows);
    const int k0 = static_cast<int>(blockIdx.y) * FILTERS;

    let_next_kernel_start();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        wait_for_earlier_kernels();
        switch (source_of(x, params)) {
            case CHANNELS_LAST: return produce<CHANNELS_LAST>(x, mean, std, shared, table, barriers, units, params);
            case PLANES: return produce<PLANES>(x, mean, std, shared, table, barriers, units, params);
            default: return produce<STRIDED>(x, mean, std, shared, table, barriers, units, params);
        }
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
    unsigned long long filters[STEPS][2];
    load_filters(filters, filter + static_cast<long long>(k0) * WORDS * 2, bias + k0);
    // They are here before the wait: what does not change is fetched while earlier kernels run.
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) asm volatile("" : "+l"(filters[i / 2][i % 2]));
    wait_for_earlier_kernels();  // they may still read y
    if (blockIdx.x < units.count) consume(filters, y + k0, shared, barriers, units, params);
}
