// conv2d_wgmma_b2b: two convolutions back to back: what the first computes goes to the second in registers.
// @solves a convolution and the 1×1 convolution behind it, with a residual, on the tensor cores of compute capability 9.0
// @arch sm_90a
//
// Equation   y = relu?(conv1×1(relu?(conv(x, first) + first_bias), second) + second_bias + residual): the end of a ResNet's
//            bottleneck. Sums in fp32; between the two values are rounded to ELEMENT, as if they were stored.
// GEMM view  per tile of TILE_M pixels: MIDDLE filters over a depth of R·S·C, then K filters over a depth of MIDDLE.
// Layouts    x NHWC, first KRSC, second [K][MIDDLE], residual and y NPQK, all ELEMENT; biases in fp32. y may be the residual.
// Grid       x: one block per multiprocessor, or fewer; tiles of pixels are taken in turn.
//            Block 128 · (1 + TILE_M / 64) threads: a producer warpgroup, of which one thread works, and a consumer for each
//            64 pixels of the tile.
// Shared     PIXEL_STAGES · TILE_M · 128 + FILTER_STAGES · MIDDLE · 128 bytes, dynamic.
// Requires   one group, C a multiple of 64, K of 128, MIDDLE of 64, 128 or 256; a residual.
// This rung  against conv2d_wgmma twice: the map between the two is neither stored nor read. The sums of a product lie in
//            registers just as the next product wants its pixels there, so that what is left of that map is a conversion.
//            Two rings of stages run through both products and from tile to tile without a pause: pixels share theirs
//            with the residual, and the first filter with the second, as a slice of one has the size of a slice of the other.
//            The output takes the residual's place in its stage, and leaves it while the next columns are multiplied.
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "tensor_core.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef TILE_M
#define ELEMENT Half     // of input, filters, residual, output: Half or BFloat16
#define TILE_M 128       // pixels per tile: 64 or 128
#define MIDDLE 256       // filters of the first convolution
#define PIXEL_STAGES 6   // slices of the input, or of the residual and then the output, in shared memory
#define FILTER_STAGES 4  // slices of either filter
#endif

constexpr int WARPGROUP = 128, CONSUMERS = TILE_M / 64, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int ROW_BYTES = 128, SLICE = ROW_BYTES / static_cast<int>(sizeof(ELEMENT));  // channels, or columns of the output
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES, CONSUMER_BYTES = 64 * ROW_BYTES, FILTER_BYTES = MIDDLE * ROW_BYTES;
constexpr int SECOND_BOX_BYTES = SLICE * ROW_BYTES;  // of the second filter: SLICE filters by SLICE of depth
constexpr int STEP = 16, STEPS = SLICE / STEP;       // the depth of an instruction
static_assert(TILE_M % 64 == 0 && MIDDLE % SLICE == 0, "whole instructions and boxes");

WARPGROUP_MMA_FROM_REGISTERS(64, 32)

template <int STAGES>
struct Ring {
    unsigned long long full[STAGES], empty[STAGES];
};

struct Barriers {
    Ring<PIXEL_STAGES> pixels;
    Ring<FILTER_STAGES> filters;
};

// Waits until a stage is free and announces what will fill it; returns the barrier that this is to be reported to.
template <int STAGES>
__device__ __forceinline__ unsigned claim(Ring<STAGES>& ring, const Place& place, int bytes) {
    const unsigned full = shared_address(&ring.full[place.stage]);
    barrier_wait(shared_address(&ring.empty[place.stage]), place.parity);
    barrier_arrive_expecting(full, bytes);
    return full;
}
template <int STAGES>
__device__ __forceinline__ void wait_until_full(Ring<STAGES>& ring, const Place& place) {
    barrier_wait(shared_address(&ring.full[place.stage]), place.parity);
}
template <int STAGES>
__device__ __forceinline__ void release(Ring<STAGES>& ring, int stage) {
    barrier_arrive(shared_address(&ring.empty[stage]));
}

// Stores what load_matrices loads.
__device__ __forceinline__ void store_matrices(unsigned row_address, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// What pairs of results are raised to: 0 for ReLU, else −∞, which changes none. As in relu_of NaN stays NaN.
__device__ __forceinline__ unsigned floor_word(int with_relu, Half) { return with_relu ? 0u : 0xfc00fc00u; }
__device__ __forceinline__ unsigned floor_word(int with_relu, BFloat16) { return with_relu ? 0u : 0xff80ff80u; }

__device__ __forceinline__ unsigned finished_pair(float low, float high, unsigned floor) {
    return larger_word(pack_pair(low, high, ELEMENT{}), floor, ELEMENT{});
}

// The biases of this thread's two columns in each of COUNT blocks of 8.
template <int COUNT>
__device__ __forceinline__ void load_biases(float2 (&biases)[COUNT], const float* bias, int k) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const int column = k + j * 8 + threadIdx.x % 4 * 2;
        biases[j] = bias ? *reinterpret_cast<const float2*>(bias + column) : make_float2(0.0f, 0.0f);
    }
}

struct Maps {
    const TensorMap &pixels, &first, &second, &residuals, &outputs;
};

// What both sides know of the block's work.
struct Work {
    int tiles, slices;         // of the output; of the first product's depth
    bool resident;             // both filters have room as a whole: they are fetched once
    unsigned pixels, filters;  // where the stages begin

    __device__ __forceinline__ Work(const Conv2dParams& first, const Conv2dParams& second, unsigned shared)
        : tiles((first.gemm_m + TILE_M - 1) / TILE_M),
          slices(first.R * first.S * (first.C / SLICE)),
          resident(slices + second.K / SLICE <= FILTER_STAGES),
          pixels(shared),
          filters(shared + PIXEL_STAGES * PIXEL_BYTES) {}
    __device__ __forceinline__ unsigned pixel_stage(int stage) const { return pixels + stage * PIXEL_BYTES; }
    __device__ __forceinline__ unsigned filter_stage(int stage) const { return filters + stage * FILTER_BYTES; }
};

// Asks for all slices of the block's tiles in the order of their use, as stages become free.
__device__ __forceinline__ void produce(const Maps& maps, Barriers& barriers, const Work& work, const Conv2dParams& first,
                                        const Conv2dParams& second) {
    Place pixel{0, 1};  // the phase before the first counts as complete: all stages are free
    Place filter{0, 1};
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        const bool with_filters = !work.resident || tile == blockIdx.x;
        const int m0 = tile * TILE_M;
        const OutputPixel begin = output_pixel(first, m0);
        const int w = begin.q * first.stride_w - first.pad_w, h = begin.p * first.stride_h - first.pad_h;
        int depth = 0;
        for (int r = 0; r < first.R; ++r) {
            for (int s = 0; s < first.S; ++s) {
                for (int c = 0; c < first.C; c += SLICE, depth += SLICE) {
                    if (with_filters) {
                        const unsigned full = claim(barriers.filters, filter, FILTER_BYTES);
                        fetch_box(work.filter_stage(filter.stage), maps.first, full, depth, 0);
                        filter.advance(1, FILTER_STAGES);
                    }
                    const unsigned full = claim(barriers.pixels, pixel, PIXEL_BYTES);
                    fetch_im2col(work.pixel_stage(pixel.stage), maps.pixels, full, c, w, h, begin.n, s * first.dilation_w,
                                 r * first.dilation_h);
                    pixel.advance(1, PIXEL_STAGES);
                }
            }
        }
        for (int k = 0; k < second.K; k += SLICE) {
            if (with_filters) {
                const unsigned full = claim(barriers.filters, filter, FILTER_BYTES);
                for (int i = 0; i < MIDDLE / SLICE; ++i) {
                    fetch_box(work.filter_stage(filter.stage) + i * SECOND_BOX_BYTES, maps.second, full, i * SLICE, k);
                }
                filter.advance(1, FILTER_STAGES);
            }
            const unsigned full = claim(barriers.pixels, pixel, PIXEL_BYTES);
            fetch_box(work.pixel_stage(pixel.stage), maps.residuals, full, k, m0);
            pixel.advance(1, PIXEL_STAGES);
        }
    }
}

// One of the consumers: 64 pixels of every tile.
struct Consumer {
    const Maps& maps;
    Barriers& barriers;
    const Work& work;
    const int number;
    const bool elected;
    Place pixel;
    Place filter;
    int stored;  // the stage that the accelerator may still be storing from; negative: none. The elected thread knows

    __device__ __forceinline__ unsigned rows(int stage) const { return work.pixel_stage(stage) + number * CONSUMER_BYTES; }
    __device__ __forceinline__ void release_filter(int stage) {
        if (elected && !work.resident) release(barriers.filters, stage);
    }
    // Gives back the stage that was stored from before the newest PENDING.
    template <int PENDING>
    __device__ __forceinline__ void release_stored() {
        if (stored < 0) return;
        store_wait<PENDING>();
        release(barriers.pixels, stored);
        stored = -1;
    }

    // The first convolution's sums.
    __device__ __forceinline__ void multiply_first(float (&sums)[MIDDLE / 2]) {
        int read_pixel = 0, read_filter = 0;
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
                release_filter(read_filter);
            }
            read_pixel = pixel.stage, read_filter = filter.stage;
            pixel.advance(1, PIXEL_STAGES), filter.advance(1, FILTER_STAGES);
        }
        warpgroup_wait<0>();
        warpgroup_results(sums);
        if (elected) release(barriers.pixels, read_pixel);
        release_filter(read_filter);
    }

    // Begins the products of all MIDDLE channels with SLICE filters of the second convolution.
    __device__ __forceinline__ void begin_second(float (&sums)[SLICE / 2],
                                                 const unsigned long long (&middle)[MIDDLE / STEP][2]) {
        wait_until_full(barriers.filters, filter);
        const unsigned long long b = operand(work.filter_stage(filter.stage));
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < MIDDLE / STEP; ++step) {
            const int offset = step / STEPS * SECOND_BOX_BYTES + step % STEPS * 32;
            warpgroup_mma<ELEMENT, SLICE>(sums, middle[step], b + offset / 16, step > 0);
        }
        warpgroup_commit();
        filter.advance(1, FILTER_STAGES);
    }

    // Waits for the products that were begun, but for the PENDING newest, and finishes columns k … k + SLICE − 1 of the
    // output: bias, residual and ReLU. The results take the residual's place and begin to be stored.
    // Of 16 × 16 elements lanes 8i … 8i + 7 know where the rows of matrix i begin: i % 2 tells lower ones, i / 2 those to the
    // right.
    template <int PENDING>
    __device__ __forceinline__ void end_second(float (&sums)[SLICE / 2], int k, int m0, const float* bias, unsigned floor) {
        float2 biases[SLICE / 8];
        load_biases(biases, bias, k);
        warpgroup_wait<PENDING>();
        warpgroup_results(sums);
        release_filter((filter.stage + FILTER_STAGES - 1 - PENDING) % FILTER_STAGES);
        const int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
        const unsigned tile = rows(pixel.stage), corner = tile + row * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
        wait_until_full(barriers.pixels, pixel);
        unsigned words[SLICE / 16][4];
#pragma unroll
        for (int j = 0; j < SLICE / 16; ++j) load_matrices(words[j], corner ^ j * 32);
#pragma unroll
        for (int j = 0; j < SLICE / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int block = j * 2 + i / 2;
                const float* const pair = sums + block * 4 + i % 2 * 2;
                const unsigned word = words[j][i];
                const float low = pair[0] + biases[block].x + to_float(ELEMENT{static_cast<unsigned short>(word)});
                const float high = pair[1] + biases[block].y + to_float(ELEMENT{static_cast<unsigned short>(word >> 16)});
                words[j][i] = finished_pair(low, high, floor);
            }
            store_matrices(corner ^ j * 32, words[j]);
        }
        written_for_storing();
        warpgroup_sync(1 + number);
        if (elected) {
            store_box(maps.outputs, tile, k, m0 + number * 64);
            store_commit();
            release_stored<1>();
            stored = pixel.stage;
        }
        pixel.advance(1, PIXEL_STAGES);
    }
};

// The first convolution's results, rounded: the sums of two neighbouring blocks of 8 columns are what an instruction takes of
// 16 channels.
__device__ __forceinline__ void round_middle(unsigned long long (&middle)[MIDDLE / STEP][2], const float (&sums)[MIDDLE / 2],
                                             const float* bias, unsigned floor) {
#pragma unroll
    for (int step = 0; step < MIDDLE / STEP; ++step) {
        float2 biases[2];
        load_biases(biases, bias, step * STEP);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float* const block = sums + (step * 2 + j) * 4;
            const unsigned upper = finished_pair(block[0] + biases[j].x, block[1] + biases[j].y, floor);
            const unsigned lower = finished_pair(block[2] + biases[j].x, block[3] + biases[j].y, floor);
            middle[step][j] = upper | static_cast<unsigned long long>(lower) << 32;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma_b2b(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap first_filters,
                     const __grid_constant__ TensorMap second_filters, const __grid_constant__ TensorMap residuals,
                     const __grid_constant__ TensorMap outputs, const float* __restrict__ first_bias,
                     const float* __restrict__ second_bias, const Conv2dParams first, const Conv2dParams second) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PIXEL_STAGES; ++i) {
            barrier_init(shared_address(&barriers.pixels.full[i]), 1);
            barrier_init(shared_address(&barriers.pixels.empty[i]), CONSUMERS);
        }
        for (int i = 0; i < FILTER_STAGES; ++i) {
            barrier_init(shared_address(&barriers.filters.full[i]), 1);
            barrier_init(shared_address(&barriers.filters.empty[i]), CONSUMERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const Maps maps{pixels, first_filters, second_filters, residuals, outputs};
    const Work work(first, second, shared_address(shared));

    let_next_kernel_start();
    wait_for_earlier_kernels();
    if (warpgroup == 0) {
        if (CONSUMERS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) produce(maps, barriers, work, first, second);
        return;
    }
    if (CONSUMERS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer consumer{maps, barriers, work, warpgroup - 1, threadIdx.x % WARPGROUP == 0, {0, 0}, {0, 0}, -1};
    const unsigned first_floor = floor_word(first.relu, ELEMENT{}), second_floor = floor_word(second.relu, ELEMENT{});
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        if (work.resident) consumer.filter = {0, 0};
        unsigned long long middle[MIDDLE / STEP][2];
        {
            float sums[MIDDLE / 2] = {};  // or they would be kept from tile to tile
            consumer.multiply_first(sums);
            round_middle(middle, sums, first_bias, first_floor);
        }
        // While the even columns are finished the odd ones are multiplied, and those of the other consumer while these are.
        for (int k = 0; k < second.K; k += 2 * SLICE) {
            float even[SLICE / 2], odd[SLICE / 2];
            consumer.begin_second(even, middle);
            consumer.begin_second(odd, middle);
            consumer.end_second<1>(even, k, tile * TILE_M, second_bias, second_floor);
            consumer.end_second<0>(odd, k + SLICE, tile * TILE_M, second_bias, second_floor);
        }
    }
    if (consumer.elected) store_wait<0>();  // shared memory ends with the block
}
