// How pixels become the cells that conv2d_stem_wgmma multiplies. Included by the kernel behind its constants and
// stem_pixels.cuh.
#pragma once

#include "element.cuh"
#include "normalize.cuh"

// What the table has of a byte.
__device__ __forceinline__ Entry entry(float value) { return static_cast<Entry>(pack_pair(value, 0, ELEMENT{})); }

template <typename A, typename B>
constexpr bool SAME = false;
template <typename A>
constexpr bool SAME<A, A> = true;

// Channels c and c + 1 of a pixel, rounded, in a word; zero behind the last channel.
template <bool NORMALIZE, typename Input>
__device__ __forceinline__ unsigned convert(const Input (&pixel)[CHANNELS], int c, const Conversion& conversion) {
    const int second = min(c + 1, CHANNELS - 1);
    const unsigned upper = second > c ? ~0u : 0xffff;
    if constexpr (sizeof(Input) == 1) {
        return (conversion.table[c * 256 + pixel[c]] | conversion.table[second * 256 + pixel[second]] << 16) & upper;
    } else if constexpr (SAME<Input, ELEMENT> && !NORMALIZE) {
        return (pixel[c].bits | pixel[second].bits << 16) & upper;
    } else {
        const auto value = [&](int i) {
            return NORMALIZE ? normalized(pixel[i], conversion.means, conversion.stds, i) : scaled(pixel[i]);
        };
        return pack_pair(value(c), second > c ? value(second) : 0.0f, ELEMENT{});
    }
}

// Converts and stores a thread's cells of a pair; zeros outside the image. Beside the last column stand ones for the bias.
template <bool NORMALIZE>
__device__ __forceinline__ void store_cells(unsigned char* pair, const Cells& cells, const Conversion& conversion) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        Chunk cell;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            const unsigned mask = cells.inside >> (2 * row + column) & 1 ? ~0u : 0;
            const INPUT(&pixel)[CHANNELS] = cells.values[row][column];
            cell.words[2 * column] = convert<NORMALIZE>(pixel, 0, conversion) & mask;
            cell.words[2 * column + 1] = CHANNELS > 2 ? convert<NORMALIZE>(pixel, 2 % CHANNELS, conversion) & mask : 0;
        }
        unsigned char* const place = pair + row * ROW_BYTES + thread * CELL_BYTES;
        if (thread < CELLS) store_chunk(place, cell);
        cell.words[2] = pack_pair(1, 1, ELEMENT{}), cell.words[3] = pack_pair(1, 0, ELEMENT{});
        if (thread >= 3) store_chunk(place + (CELLS - 3) * CELL_BYTES, cell);
    }
}
