// How pixels become the words that conv2d_stem_wgmma_tf32 multiplies. Included by the kernel behind its constants and
// stem_pixels.cuh.
#pragma once

#include "element.cuh"
#include "normalize.cuh"
#include "tensor_core.cuh"

// What is stored of a channel of a pixel, and in the table of a byte: what is split later is not rounded before.
__device__ __forceinline__ Entry entry(float value) {
    const unsigned bits = __float_as_uint(value);
    return PRODUCTS == 1 ? round_to_tf32(bits) : bits;
}

template <bool NORMALIZE, typename Input>
__device__ __forceinline__ unsigned convert(const Input (&pixel)[CHANNELS], int c, const Conversion& conversion) {
    if constexpr (sizeof(Input) == 1) {
        return conversion.table[c * 256 + pixel[c]];
    } else {
        return entry(NORMALIZE ? normalized(pixel[c], conversion.means, conversion.stds, c) : scaled(pixel[c]));
    }
}

// Converts and stores a thread's pixels of a pair, a word for each channel; zeros outside the image.
template <bool NORMALIZE>
__device__ __forceinline__ void store_cells(unsigned char* pair, const Cells& cells, const Conversion& conversion) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2, column = i % 2;
        const unsigned mask = cells.inside >> i & 1 ? ~0u : 0;
        unsigned* const words = reinterpret_cast<unsigned*>(pair + row * ROW_BYTES) + column * ODD_WORDS + thread;
        if (column == 1 && thread >= EVEN_WORDS) continue;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            words[c * CHANNEL_WORDS] = convert<NORMALIZE>(cells.values[row][column], c, conversion) & mask;
        }
    }
}
