// How the producer of a stem on Hopper comes by its pixels: from x to a stage, and from there to registers. Included by the
// kernel behind its constants and stem_units.cuh.
#pragma once

#include "stem_params.cuh"
#include "tensor_memory.cuh"

// Where a row's pixels are found: anywhere, all channels of a pixel together, or a channel's pixels together. Of the latter
// two, if aligned, the accelerator brings what a tile needs of a row to a stage, as it lies in x.
enum Source { STRIDED, CHANNELS_LAST, PLANES };

__device__ __forceinline__ Source source_of(const INPUT* x, const StemParams& params) {
    const bool last = params.stride_w == CHANNELS && (params.stride_c == 1 || CHANNELS == 1);
    const bool planes = params.stride_w == 1;
    const long long steps = params.stride_n | params.stride_h | (last ? params.W * CHANNELS : params.stride_c | params.W);
    const bool aligned = (reinterpret_cast<unsigned long long>(x) | steps * INPUT_BYTES) % 16 == 0;
    if (!aligned || params.W >= 1 << 24) return STRIDED;
    return last ? CHANNELS_LAST : planes ? PLANES : STRIDED;
}

// What a tile needs of a row, or of a channel of a row, in bytes from its beginning: multiples of 16.
template <Source FROM>
struct Run {
    static constexpr int PIXEL = FROM == CHANNELS_LAST ? CHANNELS * INPUT_BYTES : INPUT_BYTES;
    int begin, bytes;

    __device__ __forceinline__ Run(int column, const StemParams& params) {
        begin = max(2 * column - 3, 0) * PIXEL / 16 * 16;
        bytes = (min(2 * (column + PIXELS) + 3, params.W) * PIXEL + 15) / 16 * 16 - begin;
    }
};

// Asks for a pair's rows, as far as they lie in the image; one thread does.
template <Source FROM>
__device__ __forceinline__ void ask(const INPUT* x, unsigned stage, unsigned barrier, const Pairs& pair,
                                    const StemParams& params) {
    constexpr int RUNS = FROM == PLANES ? CHANNELS : 1;
    const Run<FROM> run(pair.column, params);
    const unsigned height = params.H, h = pair.h;  // a row above the image counts as far below
    barrier_arrive_expecting(barrier, ((h < height) + (h + 1 < height)) * RUNS * run.bytes);
    for (int row = 0; row < 2; ++row) {
        if (h + row >= height) continue;
        const INPUT* const source = x + pair.n * params.stride_n + (pair.h + row) * params.stride_h;
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
            fetch_bytes(stage + row * STAGE_ROW_BYTES + c * RUN_BYTES,
                        reinterpret_cast<const unsigned char*>(source + c * params.stride_c) + run.begin, run.bytes, barrier);
        }
    }
}

// A producer thread's cells of a pair of rows.
struct Cells {
    INPUT values[2][2][CHANNELS];  // of both rows, both columns
    unsigned inside;               // bit 2 · row + column: it lies in the image
};

// What lies outside of the image is read from the nearest place inside, or a stage's old content, and not used.
template <Source FROM>
__device__ __forceinline__ void load_cells(Cells& cells, const INPUT* x, const unsigned char* stage, const Pairs& pair,
                                           const StemParams& params) {
    const Run<FROM> run(pair.column, params);
    cells.inside = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2, column = i % 2, h = pair.h + row;
        const int w = 2 * (pair.column + static_cast<int>(threadIdx.x)) - 3 + column;
        const int near_h = min(max(h, 0), params.H - 1), near_w = min(max(w, 0), params.W - 1);
        cells.inside |= (h == near_h && w == near_w ? 1 : 0) << i;
        const INPUT* pixel;
        if constexpr (FROM == STRIDED) {
            pixel = x + pair.n * params.stride_n + near_h * params.stride_h + near_w * params.stride_w;
        } else {
            pixel = reinterpret_cast<const INPUT*>(stage + row * STAGE_ROW_BYTES + (near_w * run.PIXEL - run.begin));
        }
        const long long step = FROM == STRIDED ? params.stride_c : FROM == PLANES ? RUN_BYTES / INPUT_BYTES : 1;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) cells.values[row][column][c] = pixel[c * step];
    }
}

// How pixels become elements.
struct Conversion {
    float means[CHANNELS], stds[CHANNELS];
    const Entry* table;  // of bytes: element 256 · channel + byte
};
