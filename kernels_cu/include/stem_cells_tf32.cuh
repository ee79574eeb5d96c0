// How pixels become the cells that conv2d_stem_wgmma_tf32 multiplies. Included by the kernel behind its constants and
// stem_pixels.cuh.
#pragma once

#include "element.cuh"
#include "normalize.cuh"
#include "tensor_core.cuh"

// What the table has of a byte.
__device__ __forceinline__ Entry entry(float value) { return round_to_tf32(__float_as_uint(value)); }

// A channel of a pixel, rounded.
template <bool NORMALIZE, typename Input>
__device__ __forceinline__ unsigned convert(const Input (&pixel)[CHANNELS], int c, const Conversion& conversion) {
    if constexpr (sizeof(Input) == 1) {
        return conversion.table[c * 256 + pixel[c]];
    } else {
        return entry(NORMALIZE ? normalized(pixel[c], conversion.means, conversion.stds, c) : scaled(pixel[c]));
    }
}

// Converts and stores a thread's pixels of a pair, a cell each; zeros outside the image.
template <bool NORMALIZE>
__device__ __forceinline__ void store_cells(unsigned char* pair, const Cells& cells, const Conversion& conversion) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2, column = i % 2;
        const unsigned mask = cells.inside >> i & 1 ? ~0u : 0;
        Chunk cell = {};
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) cell.words[c] = convert<NORMALIZE>(cells.values[row][column], c, conversion) & mask;
        unsigned char* const place = pair + row * ROW_BYTES + (column * ODD_CELLS + thread) * CELL_BYTES;
        if (column == 0 || thread < EVEN_CELLS) store_chunk(place, cell);
    }
}
