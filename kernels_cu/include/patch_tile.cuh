// Tiles of a convolution of stride 1 whose input stays in shared memory for all taps: what conv2d_wgmma_patch and
// conv2d_wgmma_patch_split_k share.
//
// The including file defines ELEMENT, and instantiates the instructions that multiply_tap issues.
#pragma once

#include "conv2d_params.cuh"
#include "element.cuh"
#include "tensor_memory.cuh"
#include "warpgroup.cuh"

constexpr int WARPGROUP = 128;
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT)), STEPS = ROW_BYTES / 32;
constexpr int FILTERS = 64, STAGE_BYTES = FILTERS * ROW_BYTES, PATCHES = 2, MAX_STAGES = sizeof(ELEMENT) == 2 ? 16 : 18;
constexpr unsigned short NO_PIXEL = 0xffff;

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
    int store_bytes;   // of a tile on its way out; 0 if not staged
    int staged_bytes;  // of its place; 0 if not staged
    int sum_bytes;     // of the partial sums that a block receives; 0 if it shares its tiles with none
    int num_stages;    // of the filter
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

    // Of the output, as pixels lie in memory: the first one's place, and how many there are.
    __device__ __forceinline__ long long first_pixel(const Conv2dParams& params) const {
        return (static_cast<long long>(n) * params.P + p) * params.Q;
    }
    __device__ __forceinline__ int pixels(const PatchTile& shape, const Conv2dParams& params) const {
        const int images = min(shape.images, params.N - n), rows = min(shape.rows, params.P - p);
        return ((images - 1) * params.P + rows) * params.Q;
    }
};

// Which of a tile's output pixels, counted as they lie in memory, is a column of the product; NO_PIXEL if it falls on zeros.
__device__ __forceinline__ unsigned short pixel_at(int column, const PatchTile& shape, const Conv2dParams& params) {
    const int row = column / shape.columns, q = column % shape.columns;
    const int image = row / shape.patch_rows, p = row % shape.patch_rows;
    if (q >= params.Q || p >= shape.rows || image >= shape.images) return NO_PIXEL;
    return static_cast<unsigned short>((image * params.P + p) * params.Q + q);
}

// For what is fetched: its places are full, or empty again.
struct PatchBarriers {
    unsigned long long full[MAX_STAGES], empty[MAX_STAGES];  // of the filter's stages
    unsigned long long patch_full[PATCHES], patch_empty[PATCHES];

    // A single thread calls it. `readers` consumers give each place back.
    __device__ __forceinline__ void prepare(const PatchTile& shape, int readers) {
        for (int i = 0; i < shape.num_stages; ++i) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), readers);
        }
        for (int i = 0; i < PATCHES; ++i) {
            barrier_init(shared_address(&patch_full[i]), 1);
            barrier_init(shared_address(&patch_empty[i]), readers);
        }
    }
};

// All of `threads` write the zeros behind each patch, below and to the right of its last pixel.
__device__ __forceinline__ void write_zeros_behind_patches(unsigned char* patches, const PatchTile& shape, int threads) {
    for (int patch = 0; patch < PATCHES; ++patch) {
        for (int i = shape.box_bytes + threadIdx.x * 16; i < shape.patch_bytes; i += threads * 16) {
            store_chunk(patches + patch * shape.patch_bytes + i, Chunk{});
        }
    }
    written_for_storing();
}

// Asks for a tile's patch of the slice of channels from c on, as soon as its place is free.
__device__ __forceinline__ void fetch_patch(const TensorMap& pixels, PatchBarriers& barriers, unsigned patches, Place& patch,
                                            const PatchTile& shape, const Conv2dParams& params, const Tile& tile, int c) {
    const unsigned full = shared_address(&barriers.patch_full[patch.stage]);
    barrier_wait(shared_address(&barriers.patch_empty[patch.stage]), patch.parity);
    barrier_arrive_expecting(full, shape.box_bytes);
    fetch_box(patches + patch.stage * shape.patch_bytes, pixels, full, c, -params.pad_w, tile.p - params.pad_h, tile.n);
    patch.next(PATCHES);
}

// The same for the filter's taps of these channels, each a stage.
__device__ __forceinline__ void fetch_taps(const TensorMap& filters, PatchBarriers& barriers, unsigned stages, Place& stage,
                                           const PatchTile& shape, const Conv2dParams& params, const Tile& tile, int c) {
    for (int tap = 0; tap < params.R * params.S; ++tap) {
        const unsigned full = shared_address(&barriers.full[stage.stage]);
        barrier_wait(shared_address(&barriers.empty[stage.stage]), stage.parity);
        barrier_arrive_expecting(full, STAGE_BYTES);
        fetch_box(stages + stage.stage * STAGE_BYTES, filters, full, tap * params.C + c, tile.k);
        stage.next(shape.num_stages);
    }
}

// The products of one tap of a slice of channels for N pixels: of the operand `pixels`, begun some rows of 128 bytes later. They are
// added to `sums` where any came `before`, which is not 0 then.
template <int N>
__device__ __forceinline__ void multiply_tap(float (&sums)[N / 2], unsigned long long filters, unsigned long long pixels,
                                             int rows, int before) {
    unsigned long long tap = pixels + rows * (ROW_BYTES / 16);
#ifdef BASE_OFFSET
    tap |= static_cast<unsigned long long>(rows & 7) << 49;
#endif
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        warpgroup_mma<ELEMENT, N>(sums, filters + step * 2, tap + step * 2, before + step > 0);
    }
    warpgroup_commit();
}
