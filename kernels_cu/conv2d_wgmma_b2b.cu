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
// Grid       x: one block per multiprocessor, or fewer; tiles of pixels are taken in turn, from either end. z: CLUSTER.
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
#include "turns.cuh"
#include "warpgroup.cuh"

#ifndef TILE_M
#define ELEMENT Half     // of input, filters, residual, output: Half, BFloat16, or float (TF32)
#define TILE_M 128       // pixels per tile: 64, 128 or 192
#define MIDDLE 256       // filters of the first convolution that a block has
#define PIXEL_STAGES 6   // slices of the input, or of the residual and then the output, in shared memory
#define FILTER_STAGES 4  // slices of any filter
#define NEXT 0           // filters of the next convolution: MIDDLE, 2 · MIDDLE, or 0: there is none
#define SHORTCUT 0       // channels of the shortcut's input; 0: there is a residual
#define COLUMNS 64       // of the output, multiplied at a time
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
constexpr int SLICES = COLUMNS / SLICE;                // stages that these leave from
constexpr int SECOND_BOX_BYTES = COLUMNS * ROW_BYTES;  // of the second filter: COLUMNS filters by SLICE of depth
constexpr int SECOND_BOXES = MIDDLE / COLUMNS;         // in a stage
constexpr int STEP = SLICE / 4, STEPS = 4;             // the depth of an instruction, and such in a slice
constexpr int TOGETHER = COLUMNS < 64 ? 2 : STEPS;      // residuals that are loaded before the first result is stored
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
#if COLUMNS == 32
WARPGROUP_MMA_OF_ALL(32, 16)
WARPGROUP_MMA_TF32_FROM_REGISTERS(32, 16)
#endif
WARPGROUP_MMA_TF32_FROM_REGISTERS(64, 32)
WARPGROUP_MMA_TF32_FROM_REGISTERS(128, 64)
WARPGROUP_MMA_TF32_FROM_REGISTERS(256, 128)

struct Barriers {
    Ring<PIXEL_STAGES> pixels;
    Ring<FILTER_STAGES> filters;
    Ring<1> shortcut;                        // all its pixels of a tile
    unsigned long long received[CONSUMERS];  // the other block's channels of a consumer's pixels
    unsigned long long may_send[CONSUMERS];  // the other block has read those of the tile before
};

#include "back_to_back_producer.cuh"
#include "back_to_back_consumer.cuh"

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
    for (int tile = work.turns.first; work.turns.have(tile); tile += work.turns.step) {
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
