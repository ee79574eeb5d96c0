// conv2d_wgmma_b2b: two convolutions back to back: what the first computes goes to the second in registers.
// @solves a convolution, the one or two 1×1 behind it and a residual or shortcut on the tensor cores of compute capability 9.0
// (fp16, bf16, TF32)
// @arch sm_90a
//
// Equation   y = relu?(conv1×1(relu?(conv(x, first) + first_bias), second) + second_bias + residual): the end of a ResNet's
//            bottleneck. Sums in fp32; between the two values are rounded to ELEMENT, as if they were stored.
//            With SHORTCUT, instead of a residual, conv1×1(x0, shortcut_filter, its stride).
//            With NEXT also z = relu?(conv1×1(y, next) + next_bias): the beginning of the next bottleneck.
// GEMM view  per tile of TILE_M pixels: MIDDLE filters over a depth of R·S·C, then K filters over a depth of MIDDLE, and of
//            SHORTCUT more, then NEXT over a depth of K.
// Layouts    x and x0 NHWC, first KRSC, second [K][MIDDLE], shortcut_filter [K][SHORTCUT], next [NEXT][K], residual and y NPQK,
//            z with NEXT channels, all ELEMENT; biases in fp32. y may be the residual; z may be nothing else. In TF32 every 8
//            filters stand in the order 0 4 1 5 2 6 3 7: see pair_epilogue.cuh; so do not biases.
// Grid       x: one block per multiprocessor, or fewer; tiles of pixels are taken in turn. z: CLUSTER.
//            Block 128 · (1 + TILE_M / 64) threads: a producer warpgroup, of which one thread works, and a consumer for each
//            64 pixels of the tile.
// Shared     (PIXEL_STAGES + the slices that stay) · TILE_M · 128 + FILTER_STAGES · MIDDLE · 128 bytes, dynamic.
// Requires   one group, C a multiple of 128 bytes, K of 128 · CLUSTER, MIDDLE of 64, 128 or 256; a residual, or SHORTCUT, a
//            multiple of MIDDLE. NEXT is MIDDLE, of 64 or 128, or twice 64: registers hold no more. TILE_M is up to 128 for 128
//            channels that have a NEXT behind them, and for 256. CLUSTER 2 goes with neither SHORTCUT nor NEXT.
// This rung  against conv2d_wgmma twice: the map between the two is neither stored nor read. The sums of a product lie in
//            registers just as the next product wants its pixels there, so that what is left of that map is a conversion.
//            Two rings of stages run through both products and from tile to tile without a pause: pixels share theirs
//            with the residual, and the first filter with the second, as a slice of one has the size of a slice of the other.
//            The output takes the residual's place in its stage, and leaves it while the next columns are multiplied.
//            With NEXT it is multiplied once more as it leaves, from registers: it is stored, but not read again.
//            A shortcut is more depth of the second product. Its pixels stay while all columns are multiplied. So do the
//            channels that another block has computed: two that share a tile each have half of the filters, send each other
//            what is between, 64 pixels as soon as a consumer has them, and go on to half of the columns each.
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "pair_epilogue.cuh"
#include "pair_of_blocks.cuh"
#include "stage_ring.cuh"
#include "tensor_core.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef TILE_M
#define ELEMENT Half     // of input, filters, residual, output: Half, BFloat16, or float (TF32)
#define TILE_M 128       // pixels per tile: 64, 128 or 192
#define MIDDLE 256       // filters of the first convolution that a block has
#define PIXEL_STAGES 6   // slices of the input, or of the residual and then the output, in shared memory
#define FILTER_STAGES 4  // slices of any filter
#define NEXT 0           // filters of the next convolution: MIDDLE, 2 · MIDDLE, or 0: there is none
#define SHORTCUT 0       // channels of the shortcut's input; 0: there is a residual
#define CLUSTER 1        // blocks that share a tile, 1 or 2: the first convolution has as many times MIDDLE filters
#endif
#if CLUSTER > 1
#define IN_A_CLUSTER __cluster_dims__(1, 1, CLUSTER)
#else
#define IN_A_CLUSTER
#endif

constexpr int WARPGROUP = 128, CONSUMERS = TILE_M / 64, THREADS = WARPGROUP * (1 + CONSUMERS);
// Of a thread: all have as many at first, and where there are several consumers the producer gives them what it has to spare.
// Together they may not have more than a block is given, or consumers wait for ever.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int CONSUMER_REGISTERS = CONSUMERS < 3 ? 232 : CLUSTER > 1 ? 152 : 160;
constexpr int PRODUCER_REGISTERS = (1 + CONSUMERS) * REGISTERS - CONSUMERS * CONSUMER_REGISTERS;
constexpr int ROW_BYTES = 128, SLICE = ROW_BYTES / static_cast<int>(sizeof(ELEMENT));  // channels, or columns of the output
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES, CONSUMER_BYTES = 64 * ROW_BYTES, FILTER_BYTES = MIDDLE * ROW_BYTES;
constexpr int COLUMNS = 64, SLICES = COLUMNS / SLICE;  // of the output, multiplied at a time; stages that they leave from
constexpr int SECOND_BOX_BYTES = COLUMNS * ROW_BYTES;  // of the second filter: COLUMNS filters by SLICE of depth
constexpr int SECOND_BOXES = MIDDLE / COLUMNS;         // in a stage
constexpr int STEP = SLICE / 4, STEPS = 4;             // the depth of an instruction, and such in a slice
constexpr int STAYING = SHORTCUT + MIDDLE * (CLUSTER - 1);  // channels of the second product's depth in shared memory
constexpr int SECOND_STAGES = SLICES * (MIDDLE + STAYING) / MIDDLE;  // that COLUMNS of the second filter take in a ring
constexpr int PARTS = NEXT > MIDDLE ? NEXT / MIDDLE : 1;  // of the next filters: each has the size of a stage
static_assert(TILE_M % 64 == 0 && MIDDLE % COLUMNS == 0, "whole instructions and boxes");
static_assert(FILTER_STAGES >= SECOND_STAGES + (NEXT ? PARTS * SLICES : SECOND_STAGES), "what is under way at once");
static_assert(PIXEL_STAGES > SLICES, "the residual of COLUMNS beside the stage that is stored from");
static_assert(SHORTCUT % MIDDLE == 0, "whole stages");
static_assert(CLUSTER == 1 || (CLUSTER == 2 && !SHORTCUT && !NEXT), "what is sent has one receiver, and columns one block");
static_assert(CLUSTER == 1 || PIXEL_STAGES >= MIDDLE / SLICE, "what a consumer sends at once");
static_assert(!NEXT || NEXT == PARTS * MIDDLE, "parts");

WARPGROUP_MMA_FROM_REGISTERS(64, 32)
WARPGROUP_MMA_FROM_REGISTERS(128, 64)
WARPGROUP_MMA_FROM_REGISTERS(256, 128)
WARPGROUP_MMA_TF32_FROM_REGISTERS(64, 32)
WARPGROUP_MMA_TF32_FROM_REGISTERS(128, 64)
WARPGROUP_MMA_TF32_FROM_REGISTERS(256, 128)

// STEP channels of finished results as an instruction takes them from registers.
__device__ __forceinline__ void to_operand(unsigned long long (&operand)[2], const unsigned (&words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned low = words[half * 2], high = words[half * 2 + 1];
        if constexpr (sizeof(ELEMENT) == 4) low = round_to_tf32(low), high = round_to_tf32(high);
        operand[half] = low | static_cast<unsigned long long>(high) << 32;
    }
}

struct Barriers {
    Ring<PIXEL_STAGES> pixels;
    Ring<FILTER_STAGES> filters;
    Ring<1> shortcut;                        // all its pixels of a tile
    unsigned long long received[CONSUMERS];  // the other block's channels of a consumer's pixels
    unsigned long long may_send[CONSUMERS];  // the other block has read those of the tile before
};

#include "back_to_back_producer.cuh"

// One of the consumers: 64 pixels of every tile.
struct Consumer {
    const Maps& maps;
    Barriers& barriers;
    const Work& work;
    const int number;
    const bool elected;
    Place pixel;
    Place filter;
    Place shortcut;
    int sent;    // parity of the tile, of what blocks send each other
    int oldest;  // of the filter stages that are not yet given back
    int stored;  // the stage that the accelerator may still be storing from; negative: none. The elected thread knows

    __device__ __forceinline__ unsigned rows(int stage) const { return work.pixel_stage(stage) + number * CONSUMER_BYTES; }
    // Where in a stage this lane's rows begin for load_matrices and store_matrices. Of 16 × 16 elements lanes 8i … 8i + 7 know
    // where the rows of matrix i begin: i % 2 the lower rows, i / 2 the right columns. The next 16 columns are at ^ 32.
    __device__ __forceinline__ unsigned corner(int stage) const {
        const int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
        return rows(stage) + row * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
    }
    // Sends the other block what this consumer has between the two convolutions, by way of stages that the producer leaves
    // empty, and waits for what it sends. Both have come as far in their rings, so that what is here is there in the same place.
    __device__ __forceinline__ void exchange(const unsigned long long (&middle)[MIDDLE / STEP][2]) {
        const int other = work.rank() ^ 1, first = pixel.stage;
        const unsigned received = shared_address(&barriers.received[number]);
#pragma unroll
        for (int slice = 0; slice < MIDDLE / SLICE; ++slice) {
            const unsigned place = corner(pixel.stage);
            wait_until_full(barriers.pixels, pixel);
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                const unsigned long long(&operand)[2] = middle[slice * STEPS + j];
                const unsigned words[4] = {static_cast<unsigned>(operand[0]), static_cast<unsigned>(operand[0] >> 32),
                                           static_cast<unsigned>(operand[1]), static_cast<unsigned>(operand[1] >> 32)};
                store_matrices(place ^ j * 32, words);
            }
            written_for_storing();
            warpgroup_sync(1 + number);
            if (elected) {
                if (slice == 0) {
                    barrier_arrive_expecting(received, MIDDLE / SLICE * CONSUMER_BYTES);
                    barrier_wait(shared_address(&barriers.may_send[number]), sent ^ 1);
                }
                const unsigned target = work.staying + slice * PIXEL_BYTES + number * CONSUMER_BYTES;
                copy_to_block(address_in_block(target, other), rows(pixel.stage), CONSUMER_BYTES,
                              address_in_block(received, other));
            }
            pixel.next(PIXEL_STAGES);
        }
        barrier_wait(received, sent);
        if (elected) {  // what has come here has been read there
            for (int i = 0; i < MIDDLE / SLICE; ++i) {
                const int stage = first + i < PIXEL_STAGES ? first + i : first + i - PIXEL_STAGES;
                arrive_in_block(address_in_block(shared_address(&barriers.pixels.empty[stage]), other));
            }
        }
    }
    // Lets the other block send the next tile's: all of this tile's has been read.
    __device__ __forceinline__ void end_exchange() {
        if (elected) arrive_in_block(address_in_block(shared_address(&barriers.may_send[number]), work.rank() ^ 1));
        sent ^= 1;
    }
    // Gives back the shortcut's pixels, of which all has been read.
    __device__ __forceinline__ void release_shortcut() {
        if (elected) release(barriers.shortcut, 0);
        shortcut.next(1);
    }
    // Gives back the oldest of the stages: they are read in the order of the ring.
    __device__ __forceinline__ void release_filter() {
        if (!elected || work.resident) return;
        release(barriers.filters, oldest);
        oldest = oldest + 1 < FILTER_STAGES ? oldest + 1 : 0;
    }
    // Gives back the stage that was stored from before the newest PENDING.
    template <int PENDING>
    __device__ __forceinline__ void release_stored() {
        if (stored < 0) return;
        store_wait<PENDING>();
        release(barriers.pixels, stored);
        stored = -1;
    }
    // Begins to store what all threads have written to the present stage, as columns k … k + SLICE − 1, and goes on to the
    // next stage.
    __device__ __forceinline__ void store_stage(const TensorMap& map, int k, int m0) {
        written_for_storing();
        warpgroup_sync(1 + number);
        if (elected) {
            store_box(map, rows(pixel.stage), k, m0 + number * 64);
            store_commit();
            release_stored<1>();
            stored = pixel.stage;
        }
        pixel.next(PIXEL_STAGES);
    }

    // The first convolution's sums.
    __device__ __forceinline__ void multiply_first(float (&sums)[MIDDLE / 2]) {
        int read_pixel = 0;
        for (int slice = 0; slice < work.slices; ++slice) {
            wait_until_full(barriers.filters, filter);
            wait_until_full(barriers.pixels, pixel);
            const unsigned long long a = operand(rows(pixel.stage)), b = operand(work.filter_stage(filter.stage));
            warpgroup_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                warpgroup_mma<ELEMENT, MIDDLE>(sums, a + step * 2, b + step * 2, slice + step > 0);
            }
            warpgroup_commit();
            if (slice == 0 && elected) release_stored<0>();  // of the tile before: by now it is under way for long
            warpgroup_wait<1>();                             // the slice before has been read
            if (slice > 0) {
                if (elected) release(barriers.pixels, read_pixel);
                release_filter();
            }
            read_pixel = pixel.stage;
            pixel.next(PIXEL_STAGES), filter.next(FILTER_STAGES);
        }
        warpgroup_wait<0>();
        warpgroup_results(sums);
        if (elected) release(barriers.pixels, read_pixel);
        release_filter();
    }

    // Waits for the next COUNT stages of filters, and returns them as operands: what multiplies from registers does not branch
    // between its instructions.
    template <int COUNT>
    __device__ __forceinline__ void next_filters(unsigned long long (&b)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            wait_until_full(barriers.filters, filter);
            b[i] = operand(work.filter_stage(filter.stage));
            filter.next(FILTER_STAGES);
        }
    }

    // Begins the products of all MIDDLE channels, and of those that stay, with COLUMNS filters of the second convolution.
    __device__ __forceinline__ void begin_second(float (&sums)[COLUMNS / 2],
                                                 const unsigned long long (&middle)[MIDDLE / STEP][2]) {
        constexpr int IN_STAGE = MIDDLE / STEP / SLICES;
        unsigned long long b[SECOND_STAGES];
        next_filters(b);
        const unsigned long long a = operand(work.staying + number * CONSUMER_BYTES);
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < (MIDDLE + STAYING) / STEP; ++step) {
            const int at = step % IN_STAGE, offset = at / STEPS * SECOND_BOX_BYTES + at % STEPS * 32;
            const unsigned long long filters = b[step / IN_STAGE] + offset / 16;
            if (step < MIDDLE / STEP) {
                warpgroup_mma<ELEMENT, COLUMNS>(sums, middle[step], filters, step > 0);
            } else {
                const int behind = step - MIDDLE / STEP, pixels = behind / STEPS * PIXEL_BYTES + behind % STEPS * 32;
                warpgroup_mma<ELEMENT, COLUMNS>(sums, a + pixels / 16, filters, true);
            }
        }
        warpgroup_commit();
    }

    // Finishes columns k … k + COLUMNS − 1 of the output: bias, residual, ReLU. The results take the residual's place, or one
    // that the producer leaves empty, and begin to be stored; `finished` has them as well, as what instructions take of COLUMNS
    // channels. `biases` are those of the first slice.
    __device__ __forceinline__ void finish_second(const float (&sums)[COLUMNS / 2], float2 (&biases)[SLICE / 8],
                                                  unsigned long long (&finished)[COLUMNS / STEP][2], int k, int m0,
                                                  const float* bias, unsigned floor) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (slice > 0) load_biases_of_matrices<ELEMENT>(biases, bias, k + slice * SLICE);
            const unsigned place = corner(pixel.stage);
            wait_until_full(barriers.pixels, pixel);
            unsigned words[STEPS][4];
            if constexpr (SHORTCUT == 0) {
#pragma unroll
                for (int j = 0; j < STEPS; ++j) load_matrices(words[j], place ^ j * 32);
            }
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                const int step = slice * STEPS + j;
                finish_matrices<ELEMENT, SHORTCUT == 0>(words[j], &sums[step * STEP / 2], &biases[j * STEP / 8], floor);
                store_matrices(place ^ j * 32, words[j]);
                to_operand(finished[step], words[j]);
            }
            store_stage(maps.outputs, k + slice * SLICE, m0);
        }
    }

    // Waits for the products that were begun, but for the PENDING newest, and finishes their columns.
    template <int PENDING>
    __device__ __forceinline__ void end_second(float (&sums)[COLUMNS / 2], int k, int m0, const float* bias, unsigned floor) {
        float2 biases[SLICE / 8];
        load_biases_of_matrices<ELEMENT>(biases, bias, k);
        warpgroup_wait<PENDING>();
        warpgroup_results(sums);
#pragma unroll
        for (int stage = 0; stage < SECOND_STAGES; ++stage) release_filter();
        unsigned long long finished[COLUMNS / STEP][2];
        finish_second(sums, biases, finished, k, m0, bias, floor);
    }

    // Begins the products of COLUMNS finished channels with all filters of the next convolution.
    __device__ __forceinline__ void begin_next(float (&sums)[PARTS][MIDDLE / 2],
                                               unsigned long long (&finished)[COLUMNS / STEP][2]) {
        unsigned long long b[SLICES * PARTS];
        next_filters(b);
        warpgroup_operands(finished);
        warpgroup_fence();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    warpgroup_mma<ELEMENT, MIDDLE>(sums[part], finished[slice * STEPS + step],
                                                   b[slice * PARTS + part] + step * 2, true);
                }
            }
        }
        warpgroup_commit();
    }

    // Waits for all products that were begun, at least one, and gives back their filters.
    __device__ __forceinline__ void wait_for_products() {
        warpgroup_wait<0>();
        do {
            release_filter();
        } while (elected && !work.resident && oldest != filter.stage);
    }

    // Waits for all products, and finishes COLUMNS of the second's.
    __device__ __forceinline__ void finish_products(float (&sums)[COLUMNS / 2], unsigned long long (&finished)[COLUMNS / STEP][2],
                                                    int k, int m0, const float* bias, unsigned floor) {
        float2 biases[SLICE / 8];
        load_biases_of_matrices<ELEMENT>(biases, bias, k);
        wait_for_products();
        warpgroup_results(sums);
        finish_second(sums, biases, finished, k, m0, bias, floor);
    }

    // Finishes the next convolution's results, when all has been waited for: bias and ReLU. They begin to be stored by way of
    // stages that the producer leaves empty for them.
    __device__ __forceinline__ void end_next(float (&sums)[PARTS][MIDDLE / 2], int m0, const float* bias, unsigned floor) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) warpgroup_results(sums[part]);
#pragma unroll
        for (int k = 0; k < NEXT; k += SLICE) {
            float2 biases[SLICE / 8];
            load_biases_of_matrices<ELEMENT>(biases, bias, k);
            const unsigned place = corner(pixel.stage);
            wait_until_full(barriers.pixels, pixel);
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                unsigned words[4];
                finish_matrices<ELEMENT, false>(words, &sums[k / MIDDLE][k % MIDDLE / 2 + j * STEP / 2], &biases[j * STEP / 8],
                                                floor);
                store_matrices(place ^ j * 32, words);
            }
            store_stage(maps.next_outputs, k, m0);
        }
    }

    // Both products behind the first. While columns are multiplied, those finished last are, with the next convolution's
    // filters; while they are finished the other consumers multiply.
    __device__ __forceinline__ void multiply_both(const unsigned long long (&middle)[MIDDLE / STEP][2], int columns, int m0,
                                                  const float* second_bias, unsigned second_floor, const float* next_bias,
                                                  unsigned next_floor) {
        float sums[COLUMNS / 2], next[PARTS][MIDDLE / 2] = {};
        unsigned long long finished[COLUMNS / STEP][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) warpgroup_results(next[part]);
        begin_second(sums, middle);
        finish_products(sums, finished, 0, m0, second_bias, second_floor);
        for (int k = COLUMNS; k < columns; k += COLUMNS) {
            begin_second(sums, middle);
            begin_next(next, finished);
            finish_products(sums, finished, k, m0, second_bias, second_floor);
        }
        begin_next(next, finished);
        wait_for_products();
        end_next(next, m0, next_bias, next_floor);
    }
};

// The first convolution's results, rounded: the sums of two neighbouring blocks of 8 columns are what an instruction takes of
// 16 channels of 2 bytes; one block, of 8 channels of TF32.
__device__ __forceinline__ void round_middle(unsigned long long (&middle)[MIDDLE / STEP][2], const float (&sums)[MIDDLE / 2],
                                             const float* bias, unsigned floor) {
#pragma unroll
    for (int step = 0; step < MIDDLE / STEP; ++step) {
        float2 biases[STEP / 8];
        load_biases_of_matrices<ELEMENT>(biases, bias, step * STEP);
        unsigned words[4];
        finish_matrices<ELEMENT, false>(words, sums + step * STEP / 2, biases, floor);
        to_operand(middle[step], words);
    }
}

// Waits until the other block is as far, which reads and writes shared memory here until then.
__device__ __forceinline__ void end_cluster() {
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
}

extern "C" __global__ void IN_A_CLUSTER __launch_bounds__(THREADS, 1)
    conv2d_wgmma_b2b(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap first_filters,
                     const __grid_constant__ TensorMap second_filters, const __grid_constant__ TensorMap added,
                     const __grid_constant__ TensorMap shortcut_filters, const __grid_constant__ TensorMap outputs,
                     const __grid_constant__ TensorMap next_filters, const __grid_constant__ TensorMap next_outputs,
                     const float* __restrict__ first_bias, const float* __restrict__ second_bias,
                     const float* __restrict__ next_bias, const Conv2dParams first, const Conv2dParams second,
                     const int next_relu) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    const int warpgroup = this_warpgroup();
    if (threadIdx.x == 0) {
        init(barriers.pixels, CONSUMERS);
        init(barriers.filters, CONSUMERS);
        init(barriers.shortcut, CONSUMERS);
        for (int i = 0; i < CONSUMERS; ++i) {
            barrier_init(shared_address(&barriers.received[i]), 1);
            barrier_init(shared_address(&barriers.may_send[i]), 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();
    const Maps maps{pixels, first_filters, second_filters, added, shortcut_filters, outputs, next_filters, next_outputs};
    const Work work(first, second, shared_address(shared));

    let_next_kernel_start();
    wait_for_earlier_kernels();
    if (CLUSTER > 1) cluster_wait();  // the other block's barriers are there
    if (warpgroup == 0) {
        if constexpr (CONSUMERS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(maps, barriers, work, first, second);
        if constexpr (CLUSTER > 1) end_cluster();
        return;
    }
    if constexpr (CONSUMERS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer consumer{maps, barriers, work, warpgroup - 1, threadIdx.x % WARPGROUP == 0, {0, 0}, {0, 0}, {0, 0}, 0, 0, -1};
    const unsigned first_floor = floor_word(first.relu, ELEMENT{}), second_floor = floor_word(second.relu, ELEMENT{});
    const unsigned next_floor = floor_word(next_relu, ELEMENT{});
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        if (work.resident) consumer.filter = {0, 0};
        unsigned long long middle[MIDDLE / STEP][2];
        {
            float sums[MIDDLE / 2] = {};  // or they would be kept from tile to tile
            consumer.multiply_first(sums);
            round_middle(middle, sums, first_bias ? first_bias + work.rank() * MIDDLE : nullptr, first_floor);
        }
        if constexpr (CLUSTER > 1) consumer.exchange(middle);
        if constexpr (SHORTCUT > 0) wait_until_full(barriers.shortcut, consumer.shortcut);
        if constexpr (NEXT > 0) {
            consumer.multiply_both(middle, second.K, tile * TILE_M, second_bias, second_floor, next_bias, next_floor);
        } else {
            // While the even columns are finished the odd ones are multiplied, and those of the other consumer while these are.
            const int columns = second.K / CLUSTER, first_column = work.rank() * columns;
            for (int k = first_column; k < first_column + columns; k += 2 * COLUMNS) {
                float even[COLUMNS / 2], odd[COLUMNS / 2];
                consumer.begin_second(even, middle);
                consumer.begin_second(odd, middle);
                consumer.end_second<1>(even, k, tile * TILE_M, second_bias, second_floor);
                consumer.end_second<0>(odd, k + COLUMNS, tile * TILE_M, second_bias, second_floor);
            }
        }
        if constexpr (SHORTCUT > 0) consumer.release_shortcut();
        if constexpr (CLUSTER > 1) consumer.end_exchange();
    }
    if (consumer.elected) store_wait<0>();  // shared memory ends with the block
    if constexpr (CLUSTER > 1) end_cluster();
}
