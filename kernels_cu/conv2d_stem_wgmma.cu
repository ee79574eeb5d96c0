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
//            the input row itself, read with overlaps. Only the last of 7 columns needs a copy beside zeros, as the column
//            behind it, though its weights are zeros, might be NaN. A block goes down the image: each row of the convolution
//            is computed, rounded and compared in registers with those above it, so that only pooled rows leave them. Of
//            the two blocks of a multiprocessor one multiplies while the other pools. A warp that loads the rows itself
//            waits for memory once per pair, however many it has asked for: its few counters of outstanding loads are
//            waited for as a whole. So the accelerator brings them, three pairs ahead, and the producer only converts; but
//            rows that are not aligned to 16 bytes it loads itself. Bytes are converted once each, to a table.
#include "dependent_launch.cuh"
#include "normalize.cuh"
#include "stem_params.cuh"
#include "tensor_memory.cuh"
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
// the last cell q: column 2q + 3, then zeros.
constexpr int CELL_BYTES = 16, CELLS = PIXELS + 2, ROW_BYTES = (CELLS + PIXELS) * CELL_BYTES;
// Pair i holds input rows 2i − 3 and 2i − 2: row p of the convolution reads pairs p to p + 3 but for the very last row.
constexpr int PAIRS = 8, PAIR_BYTES = 2 * ROW_BYTES, PAIRS_READ = 4;
constexpr int TILE_PITCH = FILTERS * 2 + 16, TILE_BYTES = POOLED * TILE_PITCH;  // the 8 rows of a matrix in different banks
// Pairs on their way from x, a run of bytes for each channel of a row, wherever among 16 it begins, or one run as long.
constexpr int INPUT_BYTES = sizeof(INPUT), STAGES = 4, RUN_BYTES = ((2 * PIXELS + 6) * INPUT_BYTES + 15) / 16 * 16 + 16;
constexpr int STAGE_ROW_BYTES = CHANNELS * RUN_BYTES, STAGE_BYTES = 2 * STAGE_ROW_BYTES;
constexpr int SHARED_BYTES = PAIRS * PAIR_BYTES + 2 * TILE_BYTES + STAGES * STAGE_BYTES;
constexpr bool BYTES = INPUT_BYTES == 1;  // each of their values is converted once
constexpr int TABLE = BYTES ? 256 * CHANNELS : 1;
static_assert(MIN_BLOCKS * (SHARED_BYTES + 2 * TABLE + 2048) <= 228 * 1024, "room for all, and what the system reserves");
static_assert(PIXELS % 16 == 0 && PIXELS + 3 <= WARPGROUP, "two blocks of columns are pooled at once; a cell per thread");

struct Barriers {
    unsigned long long full[PAIRS], empty[PAIRS];  // arrivals count warps
    unsigned long long staged[STAGES];
};

// Among the threads of one role: 1 of producers, 2 of consumers.
__device__ __forceinline__ void role_sync(int role) { asm volatile("bar.sync %0, %1;" ::"r"(role), "n"(WARPGROUP) : "memory"); }

// How the pooled map is cut into units.
struct Units {
    unsigned tiles, stripes, count;  // per row, per image, in all
    int stripe_rows;

    __device__ __forceinline__ Units(const StemParams& params, int stripe_rows) : stripe_rows(stripe_rows) {
        tiles = params.PQ <= POOLED ? 1 : (params.PQ - 1 + POOLED - 2) / (POOLED - 1);
        stripes = (params.PP + stripe_rows - 1) / stripe_rows;
        count = params.N * stripes * tiles;  // below 2^31: a step further does not wrap
    }
};

// What a unit computes of the convolution.
struct Unit {
    int n, column, first, last;  // image, first column of the tile, first and last row

    // The first column is even. Tiles overlap by two: the first pooled column of all but the first tile is left out.
    __device__ __forceinline__ Unit(unsigned number, const Units& units, const StemParams& params) {
        column = static_cast<int>(number % units.tiles) * (PIXELS - 2);
        const int row = static_cast<int>(number / units.tiles % units.stripes) * units.stripe_rows;
        first = max(2 * row - 1, 0);
        last = min(2 * (row + units.stripe_rows) - 1, params.P - 1);
        n = static_cast<int>(number / units.tiles / units.stripes);
    }
    __device__ __forceinline__ int pairs() const { return last - first + PAIRS_READ; }
};

// The pairs of input rows that a block brings, through all its units.
struct Pairs {
    const Units& units;
    const StemParams& params;
    unsigned number = blockIdx.x;            // the next unit
    int n = 0, column = 0, h = 0, left = 0;  // image, first column of the tile, first row; pairs left of the unit

    __device__ __forceinline__ Pairs(const Units& units, const StemParams& params) : units(units), params(params) {}

    __device__ __forceinline__ bool next() {
        h += 2;
        if (left == 0) {
            if (number >= units.count) return false;
            const Unit unit(number, units, params);
            number += gridDim.x;
            n = unit.n, column = unit.column, h = 2 * unit.first - 3, left = unit.pairs();
        }
        --left;
        return true;
    }
};

#include "stem_cells.cuh"

// Brings the input rows of all units of the block, in order.
template <Source FROM>
__device__ __forceinline__ void produce(const INPUT* x, const float* mean, const float* std, unsigned char* shared,
                                        unsigned short* table, Barriers& barriers, const Units& units,
                                        const StemParams& params) {
    unsigned char* const stages = shared + PAIRS * PAIR_BYTES + 2 * TILE_BYTES;
    const int thread = static_cast<int>(threadIdx.x);
    const bool asks = FROM != STRIDED && thread == 0;
    Pairs pairs(units, params), asked(units, params);
    const auto ask_next = [&](unsigned stage) {
        if (!asked.next()) return;
        ask<FROM>(x, shared_address(stages + stage * STAGE_BYTES), shared_address(&barriers.staged[stage]), asked, params);
    };
    if (asks) {
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; ++stage) ask_next(stage);
    }
    const bool normalize = mean && !BYTES;  // bytes when the table is made
    Conversion conversion = {{}, {}, table};
#pragma unroll
    for (int c = 0; c < CHANNELS && normalize; ++c) conversion.means[c] = mean[c], conversion.stds[c] = std[c];
    if constexpr (BYTES) {
        for (int i = thread; i < TABLE; i += WARPGROUP) {
            const float value = normalized(static_cast<unsigned char>(i % 256), mean, std, i / 256);
            table[i] = static_cast<unsigned short>(pack_pair(value, 0, ELEMENT{}));
        }
        role_sync(1);
    }
    for (unsigned number = 0; pairs.next(); ++number) {
        const unsigned place = number % PAIRS, before = number - 1;
        if constexpr (FROM != STRIDED) {
            if (asks) {
                // The stage that comes next is free when all warps have stored what it held.
                if (number > 0) barrier_wait(shared_address(&barriers.full[before % PAIRS]), before / PAIRS & 1);
                ask_next((number + STAGES - 1) % STAGES);
            }
            __syncwarp();
            barrier_wait(shared_address(&barriers.staged[number % STAGES]), number / STAGES & 1);
        }
        Cells cells;
        const bool works = thread < PIXELS + 3;
        if (works) load_cells<FROM>(cells, x, stages + number % STAGES * STAGE_BYTES, pairs, params);
        // The phase before the first counts as complete: all places are free.
        barrier_wait(shared_address(&barriers.empty[place]), ~(number / PAIRS) & 1);
        if (works) {
            unsigned char* const pair = shared + place * PAIR_BYTES;
            normalize ? store_cells<true>(pair, cells, conversion) : store_cells<false>(pair, cells, conversion);
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(shared_address(&barriers.full[place]));
    }
}

// This thread's words of 64 filters, as the instruction takes them.
__device__ __forceinline__ void load_filters(unsigned long long (&filters)[STEPS][2], const ELEMENT* filter) {
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
}

// Computes a row of the convolution from four pairs, the first of them the given one of the block.
__device__ __forceinline__ void multiply(float (&sums)[PIXELS / 2], const unsigned long long (&filters)[STEPS][2],
                                         unsigned pairs, unsigned first) {
    first = __shfl_sync(~0u, first, 0);  // tells the compiler that all lanes have the same
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int r = step / 2, half = step % 2;
        const unsigned row = pairs + (first + r / 2) % PAIRS * PAIR_BYTES + r % 2 * ROW_BYTES;
        // Cells q and q + 1, then q + 2 and the last one.
        const int depth_step = half == 0 ? CELL_BYTES : (CELLS - 2) * CELL_BYTES;
        warpgroup_mma<ELEMENT, PIXELS>(sums, filters[step],
                                       plain_operand(row + half * 2 * CELL_BYTES, depth_step, 8 * CELL_BYTES), step > 0);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < PIXELS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // nothing reads them earlier
}

// Of every 8 columns, for filters g and g + 8 of the warp, a word of columns 2t and 2t + 1.
using Row = unsigned[2][BLOCKS];

__device__ __forceinline__ void copy(Row& to, const Row& from) {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) to[i % 2][i / 2] = from[i % 2][i / 2];
}

// Replaces column `past`, which is odd and the first behind the map, by its left neighbour.
__device__ __forceinline__ void leave_out(Row& row, int past) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (j * 8 + 2 * t + 1 == past) row[i][j] = __byte_perm(row[i][j], 0, 0x1010);
        }
    }
}

// Matrices of 8 × 8 elements of 2 bytes to shared memory, transposed: lane l holds elements (2 · (l % 4), l / 4) and the one
// below, of matrix i in word i. Lanes 8i … 8i + 7 give the addresses of matrix i's rows.
__device__ __forceinline__ void store_transposed(unsigned address, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ void store_transposed(unsigned address, const unsigned (&words)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1])
                 : "memory");
}

// Pools the columns of a row: pooled column i is the largest of columns 2i − 1, 2i, 2i + 1, and of 2i, 2i + 1 for i = 0. The
// tile gets pooled columns as rows of 64 filters.
__device__ __forceinline__ void pool(unsigned tile, const Row& row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, t = lane % 4;
    const int left_lane = lane / 4 * 4 + (t + 3) % 4;
    // Where t = 3 the neighbour on the right counts from the next 8 columns: it is given those of 8 columns earlier.
    const unsigned offer = t == 3 ? 0x5432 : 0x7654, take = t == 0 ? 0x7610 : 0x7654;
    unsigned pooled[BLOCKS / 2][2];  // of 16 columns: pooled column t in the lower half, t + 4 in the upper
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        unsigned before = 0;
#pragma unroll
        for (int j = 0; j < BLOCKS / 2; ++j) {
            const unsigned even = __byte_perm(row[m][2 * j], row[m][2 * j + 1], 0x5410);
            const unsigned odd = __byte_perm(row[m][2 * j], row[m][2 * j + 1], 0x7632);
            unsigned left = __shfl_sync(~0u, __byte_perm(before, odd, offer), left_lane);
            if (j == 0) left = __byte_perm(even, left, take);
            const unsigned largest = larger_word(larger_word(even, odd, ELEMENT{}), left, ELEMENT{});
            pooled[j][m] = larger_word(largest, 0, ELEMENT{});
            before = odd;
        }
    }
    const int column = lane / 16 * 8 + lane % 8 / 2 + lane % 2 * 4, chunk = warp * 2 + lane / 8 % 2;
    const unsigned address = tile + column * TILE_PITCH + chunk * 16;
#pragma unroll
    for (int j = 0; j + 1 < BLOCKS / 2; j += 2) {
        const unsigned words[4] = {pooled[j][0], pooled[j][1], pooled[j + 1][0], pooled[j + 1][1]};
        store_transposed(address + j * 8 * TILE_PITCH, words);
    }
    if constexpr (BLOCKS / 2 % 2 == 1) store_transposed(address + (BLOCKS / 2 - 1) * 8 * TILE_PITCH, pooled[BLOCKS / 2 - 1]);
}

// Multiplies and pools all units of the block.
__device__ __forceinline__ void consume(const unsigned long long (&filters)[STEPS][2], const float (&biases)[2], ELEMENT* y,
                                        unsigned char* shared, Barriers& barriers, const Units& units,
                                        const StemParams& params) {
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % 8;
    const float infinity = __int_as_float(0x7f800000);
    const unsigned lowest = pack_pair(-infinity, -infinity, ELEMENT{});
    unsigned char* tile = shared + PAIRS * PAIR_BYTES;
    int to_other = TILE_BYTES;
    unsigned pair = 0, arrived = 0;  // the one that the row begins with, and how many have been waited for, of the block
    for (unsigned number = blockIdx.x; number < units.count; number += gridDim.x) {
        const Unit unit(number, units, params);
        const int past = params.Q - unit.column, q0 = unit.column / 2;
        const int first = q0 > 0 ? 1 : 0, behind = min(params.PQ - q0, POOLED);  // pooled columns of the tile that are stored
        const long long pixel = static_cast<long long>(unit.n) * params.PP * params.PQ + q0 + thread / 8;
        ELEMENT* const place = y + pixel * params.K + chunk * 8;
        Row kept;  // the largest of the rows above that belong to the next pooled row
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) kept[i % 2][i / 2] = lowest;
        for (int p = unit.first; p <= unit.last; ++p) {
            for (; arrived < pair + PAIRS_READ; ++arrived) {
                barrier_wait(shared_address(&barriers.full[arrived % PAIRS]), arrived / PAIRS & 1);
            }
            // The tensor cores read as the accelerator does. Whoever has written could say so as well, but would wait for
            // the pixels that are on their way.
            written_for_storing();
            float sums[PIXELS / 2];
            multiply(sums, filters, shared_address(shared), pair);
            for (const unsigned read = pair + (p == unit.last ? PAIRS_READ : 1); pair < read; ++pair) {
                if (thread % 32 == 0) barrier_arrive(shared_address(&barriers.empty[pair % PAIRS]));
            }
            Row row, largest;
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                const int m = i % 2, j = i / 2;
                row[m][j] = pack_pair(sums[2 * i] + biases[m], sums[2 * i + 1] + biases[m], ELEMENT{});
                largest[m][j] = larger_word(kept[m][j], row[m][j], ELEMENT{});
            }
            if (p % 2 == 0 && p < params.P - 1) {  // no pooled row ends here
                copy(kept, largest);
                continue;
            }
            copy(kept, row);
            if (p % 2 == 1 && p == unit.first) continue;  // nor here, but in the unit above
            if (past < PIXELS && past % 2 == 1) leave_out(largest, past);
            pool(shared_address(tile), largest);
            role_sync(2);  // also: all have read the other tile, which is the next to be written
            ELEMENT* const target = place + static_cast<long long>(p / 2) * params.PQ * params.K;
#pragma unroll
            for (int i = 0; i < POOLED; i += WARPGROUP / 8) {
                const int q = i + thread / 8;
                if (first <= q && q < behind) {
                    store_chunk(target + static_cast<long long>(i) * params.K, load_chunk(tile + q * TILE_PITCH + chunk * 16));
                }
            }
            tile += to_other;
            to_other = -to_other;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_stem_wgmma(const INPUT* x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias, const float* mean,
                      const float* std, ELEMENT* y, const StemParams params, const int stripe_rows) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Barriers barriers;
    __shared__ unsigned short table[TABLE];
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
    load_filters(filters, filter + static_cast<long long>(k0) * WORDS * 2);
    const int k = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    const float biases[2] = {bias[k0 + k], bias[k0 + k + 8]};
    // They are here before the wait: what does not change is fetched while earlier kernels run.
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) asm volatile("" : "+l"(filters[i / 2][i % 2]));
    wait_for_earlier_kernels();  // they may still read y
    consume(filters, biases, y + k0, shared, barriers, units, params);
}
