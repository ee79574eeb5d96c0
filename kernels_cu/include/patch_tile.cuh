// Tiles of a convolution of stride 1 whose input stays in shared memory for all taps: what conv2d_wgmma_patch and
// conv2d_wgmma_patch_split_k share.
//
// The including file defines ELEMENT, and instantiates the instructions that multiply_tap issues.
#pragma once

#include "warpgroup.cuh"

constexpr int CONSUMERS = 2, WARPGROUP = 128;
constexpr int ROW_BYTES = 128, SLICE_CHANNELS = ROW_BYTES / static_cast<int>(sizeof(ELEMENT)), STEPS = ROW_BYTES / 32;
constexpr int FILTERS = 64, STAGE_BYTES = FILTERS * ROW_BYTES, PATCHES = 2, MAX_STAGES = sizeof(ELEMENT) == 2 ? 16 : 18;

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
    int staged_bytes;  // of its place; 0 if not staged; where blocks share a tile, of a consumer's partial sums
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
};

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
