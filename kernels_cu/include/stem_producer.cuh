// The warpgroup that brings input rows to where they are multiplied. Included by a kernel of a stem on Hopper behind its
// constants, Barriers, role_sync and pair_stored, and behind what it consists of: stem_units.cuh, stem_pixels.cuh, and the
// kernel's cells or words.
#pragma once

#include "normalize.cuh"
#include "tensor_memory.cuh"

// Brings the input rows of all units of the block, in order.
template <Source FROM>
__device__ __forceinline__ void produce(const INPUT* x, const float* mean, const float* std, unsigned char* shared,
                                        Entry* table, Barriers& barriers, const Units& units,
                                        const StemParams& params) {
    unsigned char* const stages = shared + STAGES_OFFSET;
    const int thread = static_cast<int>(threadIdx.x);
    const bool asks = FROM != STRIDED && thread == 0;
    Pairs pairs(units, params), asked(units, params);
    const auto ask_next = [&](unsigned stage) {
        if (!asked.next()) return;
        ask<FROM>(x, shared_address(stages + stage * STAGE_BYTES), shared_address(&barriers.staged[stage]), asked, params);
    };
    if (asks) {
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; ++stage) ask_next(stage);
    }
    const bool normalize = mean && !BYTES;  // bytes when the table is made
    Conversion conversion = {{}, {}, table};
#pragma unroll
    for (int c = 0; c < CHANNELS && normalize; ++c) conversion.means[c] = mean[c], conversion.stds[c] = std[c];
    if constexpr (BYTES) {
        for (int i = thread; i < TABLE; i += WARPGROUP) {
            const float value = normalized(static_cast<unsigned char>(i % 256), mean, std, i / 256);
            table[i] = entry(value);
        }
        role_sync(1);
    }
    for (unsigned number = 0; pairs.next(); ++number) {
        const unsigned place = number % PAIRS, before = number - 1;
        if constexpr (FROM != STRIDED) {
            if (asks) {
                // The stage that comes next is free when all warps have stored what it held.
                if (number > 0) barrier_wait(shared_address(&barriers.full[before % PAIRS]), before / PAIRS & 1);
                ask_next((number + STAGES - 1) % STAGES);
            }
            __syncwarp();
            barrier_wait(shared_address(&barriers.staged[number % STAGES]), number / STAGES & 1);
        }
        Cells cells;
        const bool works = thread < PIXELS + 3;
        if (works) load_cells<FROM>(cells, x, stages + number % STAGES * STAGE_BYTES, pairs, params);
        // The phase before the first counts as complete: all places are free.
        barrier_wait(shared_address(&barriers.empty[place]), ~(number / PAIRS) & 1);
        if (works) {
            unsigned char* const pair = shared + place * PAIR_BYTES;
            normalize ? store_cells<true>(pair, cells, conversion) : store_cells<false>(pair, cells, conversion);
        }
        pair_stored(shared_address(&barriers.full[place]));
    }
}
