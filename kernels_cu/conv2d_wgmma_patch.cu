// conv2d_wgmma_patch: conv2d_wgmma for stride 1, with the input of a tile kept in shared memory for all taps.
// @solves 2-D convolution of stride 1 that keeps the size, on the tensor cores of compute capability 9.0 (fp16, bf16, TF32)
// @arch sm_90a
//
// Equation   as conv2d_direct with stride 1, dilation 1, one group, R = 2·pad_h + 1, S = 2·pad_w + 1; sums in fp32.
//            The accelerator rounds TF32 operands to nearest on their way; residual and output do not pass through it.
// GEMM view  the product is transposed: 64 filters by PIXELS pixels. The depth is ordered (slice of channels, r, s, channel).
// Layouts    x NHWC, filter KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: one block per multiprocessor, or fewer; tiles are taken in turn, filters fastest, from either end.
//            Block a producer warpgroup, of which one thread works, and two or three consumers that take turns.
// Shared     2 patches, 2 tiles on their way out (without the latter for TF32), num_stages · 64 · 128 bytes of filter; see
//            PatchTile and cupy_resnet/conv2d/wgmma_patch.py.
// Requires   C a multiple of 128 bytes, K of 16 bytes.
// This rung  against conv2d_wgmma: that kernel fetches every pixel R·S times, and L2 cannot deliver as fast as tensor cores
//            multiply. Here a tile's pixels and their surroundings, the patch, come once per 128 bytes of channels. Its rows of
//            pixels lie one after the other with pad_w zeros between them, images with pad_h rows of zeros: so a tap's
//            operand is the same memory, begun r rows and s pixels later. The few columns of the product that fall on
//            zeros are left out when the tile is stored, as they lie outside of the output. The many columns are the
//            pixels, since an instruction asks less of shared memory the wider it is.
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "pair_epilogue.cuh"
#include "tensor_memory.cuh"
#include "transposed_matrices.cuh"
#include "turns.cuh"
#include "warpgroup.cuh"

#ifndef PIXELS
#define ELEMENT Half    // of input, filter, residual, output: Half, BFloat16, or float (TF32)
#define PIXELS 232      // columns of the product: a multiple of 8
#define ACCUMULATORS 116  // PIXELS / 2, as a number
#endif

#if PIXELS != 64 && PIXELS != 128 && PIXELS != 256
WARPGROUP_MMA_OF_ALL(PIXELS, ACCUMULATORS)
#endif

#include "patch_tile.cuh"

// A finished tile of 2-byte elements goes by way of shared memory. One of floats would be twice as large.
constexpr bool STAGED = sizeof(ELEMENT) == 2;
// What is not staged takes longer to finish than to multiply: then there are three consumers, unless sums need the registers.
constexpr int CONSUMERS = STAGED || PIXELS > 200 ? 2 : 3;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160, PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS), WARPS = WARPGROUP / 32, BLOCKS = PIXELS / 8;
// Blocks of 8 pixels that are loaded before the first of them is stored, if not staged.
constexpr int TOGETHER = CONSUMERS == 2 ? 11 : 6;

struct Barriers : PatchBarriers {
    unsigned long long turn[CONSUMERS];      // all warps of the consumer before have issued all products of their turn
    unsigned long long residual[CONSUMERS];  // the residual of a consumer's tile has come
};

// Asks for all patches and slices of the filter that the block's tiles need, as their places become free; for `residuals` to
// come to L2 meanwhile, unless that is null.
__device__ __forceinline__ void produce(const TensorMap& pixels, const TensorMap& filters, Barriers& barriers, unsigned patches,
                                        unsigned stages, const PatchTile& shape, const Conv2dParams& params, const Turns& turns,
                                        int tiles_k, bool resident, const TensorMap* residuals) {
    Place stage{0, 1}, patch{0, 1};  // the phase before the first counts as complete: all places are free
    for (int number = turns.first; turns.have(number); number += turns.step) {
        const Tile tile(number, tiles_k, shape);
        for (int k = 0; residuals && k < FILTERS; k += SLICE_CHANNELS) {
            prefetch_box(*residuals, tile.k + k, 0, tile.p, tile.n);
        }
        for (int c = 0; c < params.C; c += SLICE_CHANNELS) {
            fetch_patch(pixels, barriers, patches, patch, shape, params, tile, c);
            if (!resident || number == turns.first) fetch_taps(filters, barriers, stages, stage, shape, params, tile, c);
        }
    }
}

// The products of one tile, once it is this consumer's turn, which it was handed `handed` times with this one.
__device__ __forceinline__ void multiply(float (&sums)[PIXELS / 2], Barriers& barriers, unsigned patches, unsigned stages,
                                         Place& patch, Place& stage, const PatchTile& shape, const Conv2dParams& params,
                                         int consumer, int handed, bool resident) {
    const bool elected = threadIdx.x % WARPGROUP == 0;
    if (handed > 0) barrier_wait(shared_address(&barriers.turn[consumer]), (handed - 1) & 1);
    int previous_stage = 0, previous_patch = 0;
    for (int c = 0; c < params.C; c += SLICE_CHANNELS) {
        barrier_wait(shared_address(&barriers.patch_full[patch.stage]), patch.parity);
        const unsigned long long b = operand(patches + patch.stage * shape.patch_bytes);
        for (int r = 0; r < params.R; ++r) {
            for (int s = 0; s < params.S; ++s) {
                barrier_wait(shared_address(&barriers.full[stage.stage]), resident ? 0 : stage.parity);
                const unsigned long long a = operand(stages + stage.stage * STAGE_BYTES);
                multiply_tap<PIXELS>(sums, a, b, r * shape.columns + s, c + r + s);
                const bool first = r + s == 0;
                if (r == params.R - 1 && s == params.S - 1 && c + SLICE_CHANNELS >= params.C) {
                    // Each warp for itself: others' turns would else overtake one that still waits for this turn.
                    __syncwarp();
                    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barriers.turn[(consumer + 1) % CONSUMERS]));
                }
                warpgroup_wait<1>();  // the slice before has been read
                if (elected && c + r + s > 0) {
                    if (!resident) barrier_arrive(shared_address(&barriers.empty[previous_stage]));
                    if (first) barrier_arrive(shared_address(&barriers.patch_empty[previous_patch]));
                }
                previous_stage = stage.stage;
                stage.next(shape.num_stages);
            }
        }
        previous_patch = patch.stage;
        patch.next(PATCHES);
    }
    warpgroup_wait<0>();
    if (elected) {
        if (!resident) barrier_arrive(shared_address(&barriers.empty[previous_stage]));
        barrier_arrive(shared_address(&barriers.patch_empty[previous_patch]));
    }
}

// Bias, residual and ReLU for COUNT / 2 blocks of 8 pixels from block j on, on their way to the staged tile, where the residual is.
template <typename Element, bool ADD, int COUNT>
__device__ __forceinline__ void finish_blocks(const float* sums, unsigned staged, int j, float2 biases, unsigned floor) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = (j + lane / 16 % (COUNT / 2)) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
    const unsigned address = staged + row * ROW_BYTES + ((chunk ^ row % 8) * 16);
    unsigned words[COUNT] = {};
    if (ADD) load_transposed(words, address);
    finish_matrices_of_rows<Element, ADD>(words, sums + j * 4, biases, floor);
    store_transposed(address, words);
}

template <typename Element, bool ADD>
__device__ __forceinline__ void finish(const float* sums, unsigned staged, float2 biases, unsigned floor) {
#pragma unroll
    for (int j = 0; j + 1 < BLOCKS; j += 2) finish_blocks<Element, ADD, 4>(sums, staged, j, biases, floor);
    if constexpr (BLOCKS % 2 == 1) finish_blocks<Element, ADD, 2>(sums, staged, BLOCKS - 1, biases, floor);
}

// The outputs that a thread stores itself, of neighbouring filters from k on.
template <typename Element>
struct Outputs {
    const Element* residual;  // of the tile's first pixel, or null
    Element* y;               // the same
    int pixels;               // of the tile; none where there are no such filters

    __device__ __forceinline__ Outputs(const Element* all_residuals, Element* all, const Tile& tile, int k,
                                       const PatchTile& shape, const Conv2dParams& params) {
        const long long first = tile.first_pixel(params) * params.K + k;
        residual = all_residuals ? all_residuals + first : nullptr;
        y = all + first;
        pixels = k < params.K ? tile.pixels(shape, params) : 0;
    }
};

// Bias, residual and ReLU for a tile that is not staged, on its way to memory: a warp moves 64 bytes of each of 8 pixels at
// once. The residuals of several blocks are under way before the first of these is stored: y may be the residual.
template <typename Element>
__device__ __forceinline__ void finish_in_memory(float (&sums)[PIXELS / 2], const Outputs<Element>& outputs,
                                                 const float* bias, const unsigned short* pixel_of,
                                                 const Conv2dParams& params) {
    const int column = threadIdx.x % 32 / 4;
    const float least = least_kept(params.relu);
    const auto finished = [&](float sum, float added, float shortcut) { return relu_of(sum + added + shortcut, least); };
#pragma unroll
    for (int j = 0; j < BLOCKS; j += TOGETHER) {
        float4 shortcuts[TOGETHER] = {};
        int offsets[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER && j + i < BLOCKS; ++i) {
            const int pixel = pixel_of[(j + i) * 8 + column];
            offsets[i] = pixel < outputs.pixels ? pixel * params.K : -1;
            if (outputs.residual && offsets[i] >= 0) {
                shortcuts[i] = *reinterpret_cast<const float4*>(outputs.residual + offsets[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER && j + i < BLOCKS; ++i) {
            const float* const block = &sums[(j + i) * 4];
            float sum[4] = {block[0], block[1], block[2], block[3]};
            transpose_filters(sum);
            const float4 shortcut = shortcuts[i];
            const float4 result = make_float4(finished(sum[0], bias[0], shortcut.x), finished(sum[1], bias[1], shortcut.y),
                                              finished(sum[2], bias[2], shortcut.z), finished(sum[3], bias[3], shortcut.w));
            if (offsets[i] >= 0) *reinterpret_cast<float4*>(outputs.y + offsets[i]) = result;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma_patch(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                       const __grid_constant__ TensorMap residuals, const __grid_constant__ TensorMap outputs,
                       const float* __restrict__ bias, const ELEMENT* residual, ELEMENT* y, const PatchTile shape,
                       const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    __shared__ unsigned short pixel_of[PIXELS];
    const int warpgroup = this_warpgroup();
    if (threadIdx.x == 0) {
        barriers.prepare(shape, 1);
        for (int i = 0; i < CONSUMERS; ++i) {
            barrier_init(shared_address(&barriers.turn[i]), WARPS);
            barrier_init(shared_address(&barriers.residual[i]), 1);
        }
        barrier_init_done();
    }
    write_zeros_behind_patches(shared, shape, THREADS);
    for (int i = threadIdx.x; !STAGED && i < PIXELS; i += THREADS) pixel_of[i] = pixel_at(i, shape, params);
    __syncthreads();
    const int tiles_k = (params.K + FILTERS - 1) / FILTERS;
    const Turns turns(shape.pixel_tiles * tiles_k, params.backwards);
    const int chunks = params.C / SLICE_CHANNELS, slices = params.R * params.S * chunks;
    const bool resident = tiles_k == 1 && slices <= shape.num_stages;  // the whole filter has room: it is fetched once
    const unsigned patches = shared_address(shared), staged_tiles = patches + PATCHES * shape.patch_bytes;
    const unsigned stages = staged_tiles + CONSUMERS * shape.staged_bytes;

    let_next_kernel_start();
    if (threadIdx.x == 0) {
        prefetch_map(pixels), prefetch_map(filters);
        if (STAGED) prefetch_map(outputs);
        if (residual) prefetch_map(residuals);
    }
    wait_for_earlier_kernels();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) {
            produce(pixels, filters, barriers, patches, stages, shape, params, turns, tiles_k, resident,
                    !STAGED && residual ? &residuals : nullptr);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp_filter = threadIdx.x % WARPGROUP / 32 * 16;
    // Of the thread's filters, which are 8 apart, or 4 neighbours.
    const int filter0 = warp_filter + (STAGED ? lane / 4 : lane % 4 * 4);
    const bool elected = threadIdx.x % WARPGROUP == 0;
    const unsigned staged = staged_tiles + consumer * shape.staged_bytes;
    Place stage{0, 0}, patch{0, 0};
    const auto pass_over = [&](int others) {  // what belongs to other consumers
        if (!resident) stage.advance(others * slices % (2 * shape.num_stages), shape.num_stages);
        patch.advance(others * chunks % (2 * PATCHES), PATCHES);
    };
    pass_over(consumer);
    int turn = 0;
    for (int number = turns.first + consumer * turns.step; turns.have(number); number += CONSUMERS * turns.step, ++turn) {
        const Tile tile(number, tiles_k, shape);
        if (STAGED && elected) {
            store_wait();
            if (residual) {
                const unsigned barrier = shared_address(&barriers.residual[consumer]);
                barrier_arrive_expecting(barrier, shape.store_bytes);
                fetch_box(staged, residuals, barrier, tile.k, 0, tile.p, tile.n);
            }
        }
        float biases[STAGED ? 2 : 4];
#pragma unroll
        for (int i = 0; i < (STAGED ? 2 : 4); ++i) {
            const int k = tile.k + filter0 + i * (STAGED ? 8 : 1);
            biases[i] = bias && k < params.K ? bias[k] : 0.0f;
        }
        float sums[PIXELS / 2];
        if (resident) stage.stage = 0;
        multiply(sums, barriers, patches, stages, patch, stage, shape, params, consumer, turn + (consumer > 0), resident);
        pass_over(CONSUMERS - 1);
        if constexpr (STAGED) {
            if (residual) {
                barrier_wait(shared_address(&barriers.residual[consumer]), turn & 1);
            } else {
                warpgroup_sync(1 + consumer);  // the elected thread has waited for the tile before
            }
            const float2 pair = make_float2(biases[0], biases[1]);
            const unsigned floor = floor_word(params.relu, ELEMENT{});
            if (residual) {
                finish<ELEMENT, true>(sums, staged, pair, floor);
            } else {
                finish<ELEMENT, false>(sums, staged, pair, floor);
            }
            written_for_storing();
            warpgroup_sync(1 + consumer);
            if (elected) {
                store_box(outputs, staged, tile.k, 0, tile.p, tile.n);
                store_commit();
            }
        } else {
            warpgroup_results(sums);
            finish_in_memory<ELEMENT>(sums, {residual, y, tile, tile.k + filter0, shape, params}, biases, pixel_of, params);
        }
    }
    if (STAGED && elected) store_wait();  // shared memory ends with the block
}
