// conv2d_wgmma_patch: conv2d_wgmma for stride 1, with the input of a tile kept in shared memory for all taps.
// @solves 2-D convolution of stride 1 that keeps the size, on the tensor cores of compute capability 9.0 (fp16, bf16)
// @arch sm_90a
//
// Equation   as conv2d_direct with stride 1, dilation 1, one group, R = 2·pad_h + 1, S = 2·pad_w + 1; sums in fp32.
// GEMM view  the product is transposed: 64 filters by PIXELS pixels. The depth is ordered (slice of channels, r, s, channel).
// Layouts    x NHWC, filter KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: one block per multiprocessor, or fewer; tiles are taken in turn, filters fastest.
//            Block 384 threads: a producer warpgroup, of which one thread works, and two consumers that take turns.
// Shared     2 patches, 2 tiles on their way out, num_stages · 64 · 128 bytes of filter; see PatchTile and
//            cupy_resnet/conv2d/wgmma_patch.py.
// Requires   C a multiple of 64, K of 8.
// This rung  against conv2d_wgmma: that kernel fetches every pixel R·S times, and L2 cannot deliver as fast as tensor cores
//            multiply. Here a tile's pixels and their surroundings, the patch, come once per 64 channels. Its rows of pixels lie
//            one after the other with pad_w zeros between them, images with pad_h rows of zeros: so a tap's operand is the same
//            memory, begun r rows and s pixels later. The few columns of the product that fall on zeros are left out when
//            the accelerator stores the tile, as they lie outside of the output. The many columns are the pixels, since an
//            instruction asks less of shared memory the wider it is.
#include "conv2d_params.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

#ifndef PIXELS
#define ELEMENT Half    // of input, filter, residual, output: Half or BFloat16
#define PIXELS 232      // columns of the product: a multiple of 8
#define ACCUMULATORS 116  // PIXELS / 2, as a number
#endif

#if PIXELS != 64 && PIXELS != 128 && PIXELS != 256
WARPGROUP_MMA_OF_BYTES_2(PIXELS, ACCUMULATORS)
#endif

constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = 64, STEPS = ROW_BYTES / 32, FILTERS = 64, STAGE_BYTES = FILTERS * ROW_BYTES;
constexpr int PATCHES = 2, MAX_STAGES = 16, BLOCKS = PIXELS / 8;

// What a tile is; cupy_resnet/conv2d/wgmma_patch.py fills it in.
struct PatchTile {
    int images;        // whole images per tile, if more than one
    int rows;          // of the output, per image
    int columns;       // of the patch: W + pad_w
    int patch_rows;    // of the patch, per image
    int row_tiles;     // per image
    int pixel_tiles;   // in all
    int box_bytes;     // of a fetched patch
    int patch_bytes;   // of its place: zeros follow, to a multiple of 1024
    int store_bytes;   // of a tile on its way out
    int staged_bytes;  // of its place
    int num_stages;    // of the filter
};

struct Barriers {
    unsigned long long full[MAX_STAGES], empty[MAX_STAGES];       // of the filter's stages
    unsigned long long patch_full[PATCHES], patch_empty[PATCHES];
    unsigned long long turn[CONSUMERS];      // the other consumer's products of this turn are all issued
    unsigned long long residual[CONSUMERS];  // the residual of a consumer's tile has come
};

// Where a tile begins.
struct Tile {
    int n, p, k;

    __device__ __forceinline__ Tile(int number, int tiles_k, const PatchTile& shape) {
        const int pixels = number / tiles_k;
        n = pixels / shape.row_tiles * shape.images;
        p = pixels % shape.row_tiles * shape.rows;
        k = number % tiles_k * FILTERS;
    }
};

// Two or four 8×8 matrices of 2-byte elements between registers and shared memory, transposed: lane l holds elements
// (2 · (l % 4), l / 4) and the one below, of matrix i in word i. Lanes 8i … 8i + 7 give the addresses of matrix i's rows.
template <int COUNT>
__device__ __forceinline__ void load_transposed(unsigned (&words)[COUNT], unsigned address) {
    static_assert(COUNT == 2 || COUNT == 4, "what ldmatrix loads");
    if constexpr (COUNT == 4) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(words[0]), "=r"(words[1])
                     : "r"(address)
                     : "memory");
    }
}
template <int COUNT>
__device__ __forceinline__ void store_transposed(unsigned address, const unsigned (&words)[COUNT]) {
    if constexpr (COUNT == 4) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1])
                     : "memory");
    }
}

// Asks for all patches and slices of the filter that the block's tiles need, as their places become free.
__device__ __forceinline__ void produce(const TensorMap& pixels, const TensorMap& filters, Barriers& barriers, unsigned patches,
                                        unsigned stages, const PatchTile& shape, const Conv2dParams& params, int tiles,
                                        int tiles_k, bool resident) {
    Place stage{0, 1}, patch{0, 1};  // the phase before the first counts as complete: all places are free
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(number, tiles_k, shape);
        for (int c = 0; c < params.C; c += SLICE_CHANNELS) {
            const unsigned patch_full = shared_address(&barriers.patch_full[patch.stage]);
            barrier_wait(shared_address(&barriers.patch_empty[patch.stage]), patch.parity);
            barrier_arrive_expecting(patch_full, shape.box_bytes);
            fetch_box(patches + patch.stage * shape.patch_bytes, pixels, patch_full, c, -params.pad_w, tile.p - params.pad_h,
                      tile.n);
            patch.advance(1, PATCHES);
            if (resident && number != blockIdx.x) continue;
            for (int tap = 0; tap < params.R * params.S; ++tap) {
                const unsigned full = shared_address(&barriers.full[stage.stage]);
                barrier_wait(shared_address(&barriers.empty[stage.stage]), stage.parity);
                barrier_arrive_expecting(full, STAGE_BYTES);
                fetch_box(stages + stage.stage * STAGE_BYTES, filters, full, tap * params.C + c, tile.k);
                stage.advance(1, shape.num_stages);
            }
        }
    }
}

// The products of one tile, once it is this consumer's turn.
__device__ __forceinline__ void multiply(float (&sums)[PIXELS / 2], Barriers& barriers, unsigned patches, unsigned stages,
                                         Place& patch, Place& stage, const PatchTile& shape, const Conv2dParams& params,
                                         int consumer, int tiles_before, bool resident) {
    const bool elected = threadIdx.x % WARPGROUP == 0;
    if (tiles_before > 0) barrier_wait(shared_address(&barriers.turn[consumer]), (tiles_before - 1) & 1);
    int previous_stage = 0, previous_patch = 0;
    for (int c = 0; c < params.C; c += SLICE_CHANNELS) {
        barrier_wait(shared_address(&barriers.patch_full[patch.stage]), patch.parity);
        const unsigned long long b = operand(patches + patch.stage * shape.patch_bytes);
        for (int r = 0; r < params.R; ++r) {
            for (int s = 0; s < params.S; ++s) {
                barrier_wait(shared_address(&barriers.full[stage.stage]), resident ? 0 : stage.parity);
                const unsigned long long a = operand(stages + stage.stage * STAGE_BYTES);
                unsigned long long tap = b + (r * shape.columns + s) * (ROW_BYTES / 16);
#ifdef BASE_OFFSET
                tap |= static_cast<unsigned long long>((r * shape.columns + s) & 7) << 49;
#endif
                warpgroup_fence();
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    warpgroup_mma<ELEMENT, PIXELS>(sums, a + step * 2, tap + step * 2, c + r + s + step > 0);
                }
                warpgroup_commit();
                const bool first = r + s == 0;
                if (elected && r == params.R - 1 && s == params.S - 1 && c + SLICE_CHANNELS >= params.C) {
                    barrier_arrive(shared_address(&barriers.turn[1 - consumer]));
                }
                warpgroup_wait<1>();  // the slice before has been read
                if (elected && c + r + s > 0) {
                    if (!resident) barrier_arrive(shared_address(&barriers.empty[previous_stage]));
                    if (first) barrier_arrive(shared_address(&barriers.patch_empty[previous_patch]));
                }
                previous_stage = stage.stage;
                stage.advance(1, shape.num_stages);
            }
        }
        previous_patch = patch.stage;
        patch.advance(1, PATCHES);
    }
    warpgroup_wait<0>();
    if (elected) {
        if (!resident) barrier_arrive(shared_address(&barriers.empty[previous_stage]));
        barrier_arrive(shared_address(&barriers.patch_empty[previous_patch]));
    }
}

// Bias, residual and ReLU for 8 · COUNT / 2 pixels from block j on, on their way to the staged tile, where the residual is.
template <int COUNT>
__device__ __forceinline__ void finish(const float* sums, unsigned staged, int j, const float (&bias)[2], bool with_residual,
                                       bool with_relu) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int row = (j + lane / 16 % (COUNT / 2)) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
    const unsigned address = staged + row * ROW_BYTES + ((chunk ^ row % 8) * 16);
    unsigned words[COUNT] = {};
    if (with_residual) load_transposed<COUNT>(words, address);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float* const pair = sums + (j + i / 2) * 4 + i % 2 * 2;
        float low = pair[0] + bias[i % 2], high = pair[1] + bias[i % 2];
        if (with_residual) {
            low += to_float(ELEMENT{static_cast<unsigned short>(words[i])});
            high += to_float(ELEMENT{static_cast<unsigned short>(words[i] >> 16)});
        }
        words[i] = pack_pair(with_relu ? relu_of(low) : low, with_relu ? relu_of(high) : high, ELEMENT{});
    }
    store_transposed<COUNT>(address, words);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d_wgmma_patch(const __grid_constant__ TensorMap pixels, const __grid_constant__ TensorMap filters,
                       const __grid_constant__ TensorMap residuals, const __grid_constant__ TensorMap outputs,
                       const float* __restrict__ bias, const ELEMENT* residual, const PatchTile shape,
                       const Conv2dParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Barriers barriers;
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape.num_stages; ++i) {
            barrier_init(shared_address(&barriers.full[i]), 1);
            barrier_init(shared_address(&barriers.empty[i]), 1);
        }
        for (int i = 0; i < PATCHES; ++i) {
            barrier_init(shared_address(&barriers.patch_full[i]), 1);
            barrier_init(shared_address(&barriers.patch_empty[i]), 1);
        }
        for (int i = 0; i < CONSUMERS; ++i) {
            barrier_init(shared_address(&barriers.turn[i]), 1);
            barrier_init(shared_address(&barriers.residual[i]), 1);
        }
        barrier_init_done();
    }
    // The zeros behind each patch, below and to the right of its last pixel.
    for (int patch = 0; patch < PATCHES; ++patch) {
        for (int i = shape.box_bytes + threadIdx.x * 16; i < shape.patch_bytes; i += THREADS * 16) {
            store_chunk(shared + patch * shape.patch_bytes + i, Chunk{});
        }
    }
    written_for_storing();
    __syncthreads();
    const int tiles_k = (params.K + FILTERS - 1) / FILTERS, tiles = shape.pixel_tiles * tiles_k;
    const int chunks = params.C / SLICE_CHANNELS, slices = params.R * params.S * chunks;
    const bool resident = tiles_k == 1 && slices <= shape.num_stages;  // the whole filter has room: it is fetched once
    const unsigned patches = shared_address(shared), staged_tiles = patches + PATCHES * shape.patch_bytes;
    const unsigned stages = staged_tiles + CONSUMERS * shape.staged_bytes;

    let_next_kernel_start();
    wait_for_earlier_kernels();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            produce(pixels, filters, barriers, patches, stages, shape, params, tiles, tiles_k, resident);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = warpgroup - 1, filter0 = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    const bool elected = threadIdx.x % WARPGROUP == 0;
    const unsigned staged = staged_tiles + consumer * shape.staged_bytes;
    Place stage{0, 0}, patch{0, 0};
    if (consumer == 1) {
        if (!resident) stage.advance(slices % (2 * shape.num_stages), shape.num_stages);
        patch.advance(chunks % (2 * PATCHES), PATCHES);
    }
    int turn = 0;
    for (int number = blockIdx.x + consumer * gridDim.x; number < tiles; number += CONSUMERS * gridDim.x, ++turn) {
        const Tile tile(number, tiles_k, shape);
        if (elected) {
            store_wait();
            if (residual) {
                const unsigned barrier = shared_address(&barriers.residual[consumer]);
                barrier_arrive_expecting(barrier, shape.store_bytes);
                fetch_box(staged, residuals, barrier, tile.k, 0, tile.p, tile.n);
            }
        }
        float biases[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = tile.k + filter0 + i * 8;
            biases[i] = bias && k < params.K ? bias[k] : 0.0f;
        }
        float sums[PIXELS / 2];
        if (resident) stage.stage = 0;
        multiply(sums, barriers, patches, stages, patch, stage, shape, params, consumer, turn + consumer, resident);
        // Those of the other consumer.
        if (!resident) stage.advance(slices % (2 * shape.num_stages), shape.num_stages);
        patch.advance(chunks % (2 * PATCHES), PATCHES);
        if (residual) {
            barrier_wait(shared_address(&barriers.residual[consumer]), turn & 1);
        } else {
            warpgroup_sync(1 + consumer);  // the elected thread has waited for the tile before
        }
#pragma unroll
        for (int j = 0; j + 1 < BLOCKS; j += 2) finish<4>(sums, staged, j, biases, residual, params.relu);
        if constexpr (BLOCKS % 2 == 1) finish<2>(sums, staged, BLOCKS - 1, biases, residual, params.relu);
        written_for_storing();
        warpgroup_sync(1 + consumer);
        if (elected) {
            store_box(outputs, staged, tile.k, 0, tile.p, tile.n);
            store_commit();
        }
    }
    if (elected) store_wait();  // shared memory ends with the block
}
