// conv2d_wgmma_b2b: what its blocks have to do, and the thread that brings all they need to shared memory.
//
// The including file defines the constants of its form, Barriers and the rings.
#pragma once

struct Maps {
    const TensorMap &pixels, &first, &second;
    const TensorMap& added;  // the residual, or the shortcut's pixels
    const TensorMap &shortcut, &outputs, &next, &next_outputs;
};

// What both sides know of the block's work.
struct Work {
    Turns turns;         // at the tiles of the output
    int slices;          // of the first product's depth
    bool resident;       // all filters have room as a whole: they are fetched once
    unsigned pixels, filters, staying;  // where the stages, and what stays for a tile, begin

    __device__ __forceinline__ Work(const Conv2dParams& first, const Conv2dParams& second, unsigned shared)
        : turns((first.gemm_m + TILE_M - 1) / TILE_M, first.backwards),
          slices(first.R * first.S * (first.C / SLICE)),
          resident(slices + second.K / CLUSTER / COLUMNS * (SECOND_STAGES + (NEXT ? PARTS * SLICES : 0)) <= FILTER_STAGES),
          pixels(shared),
          filters(pixels + PIXEL_STAGES * PIXEL_BYTES),
          staying(filters + FILTER_STAGES * FILTER_BYTES) {}
    // Of this block among those that share its tiles.
    __device__ __forceinline__ static int rank() { return CLUSTER > 1 ? blockIdx.z : 0; }
    __device__ __forceinline__ unsigned pixel_stage(int stage) const { return pixels + stage * PIXEL_BYTES; }
    __device__ __forceinline__ unsigned filter_stage(int stage) const { return filters + stage * FILTER_BYTES; }
};

// Asks for COLUMNS of the second filter, and of the shortcut's, SLICE of whose depth are a box: first those of the channels that
// this block has.
__device__ __forceinline__ void fetch_second(const Maps& maps, Barriers& barriers, const Work& work, Place& filter, int k) {
    for (int depth = 0; depth < MIDDLE + STAYING; depth += SECOND_BOXES * SLICE) {
        const unsigned full = claim(barriers.filters, filter, FILTER_BYTES);
        const bool of_shortcut = SHORTCUT && depth >= MIDDLE;
        const int column = of_shortcut ? depth - MIDDLE : depth ^ work.rank() * MIDDLE;
        for (int i = 0; i < SECOND_BOXES; ++i) {
            fetch_box(work.filter_stage(filter.stage) + i * SECOND_BOX_BYTES, of_shortcut ? maps.shortcut : maps.second, full,
                      column + i * SLICE, k);
        }
        filter.next(FILTER_STAGES);
    }
}

// Asks for what the next filters have of COLUMNS of their depth.
__device__ __forceinline__ void fetch_next(const Maps& maps, Barriers& barriers, const Work& work, Place& filter, int k) {
    for (int slice = 0; slice < SLICES; ++slice) {
        for (int part = 0; part < PARTS; ++part) {
            const unsigned full = claim(barriers.filters, filter, FILTER_BYTES);
            fetch_box(work.filter_stage(filter.stage), maps.next, full, k + slice * SLICE, part * MIDDLE);
            filter.next(FILTER_STAGES);
        }
    }
}

// Asks for all slices of the block's tiles in the order of their use, as stages become free.
__device__ __forceinline__ void produce(const Maps& maps, Barriers& barriers, const Work& work, const Conv2dParams& first,
                                        const Conv2dParams& second) {
    Place pixel{0, 1};  // the phase before the first counts as complete: all stages are free
    Place filter{0, 1};
    Place shortcut{0, 1};
    for (int tile = work.turns.first; work.turns.have(tile); tile += work.turns.step) {
        const bool with_filters = !work.resident || tile == work.turns.first;
        const int m0 = tile * TILE_M;
        const OutputPixel begin = output_pixel(first, m0);
        const int w = begin.q * first.stride_w - first.pad_w, h = begin.p * first.stride_h - first.pad_h;
        int depth = 0;
        for (int r = 0; r < first.R; ++r) {
            for (int s = 0; s < first.S; ++s) {
                for (int c = 0; c < first.C; c += SLICE, depth += SLICE) {
                    if (with_filters) {
                        const unsigned full = claim(barriers.filters, filter, FILTER_BYTES);
                        fetch_box(work.filter_stage(filter.stage), maps.first, full, depth, work.rank() * MIDDLE);
                        filter.next(FILTER_STAGES);
                    }
                    const unsigned full = claim(barriers.pixels, pixel, PIXEL_BYTES);
                    fetch_im2col(work.pixel_stage(pixel.stage), maps.pixels, full, c, w, h, begin.n, s * first.dilation_w,
                                 r * first.dilation_h);
                    pixel.next(PIXEL_STAGES);
                }
            }
        }
        if constexpr (SHORTCUT > 0) {
            const unsigned full = claim(barriers.shortcut, shortcut, SHORTCUT / SLICE * PIXEL_BYTES);
            for (int i = 0; i < SHORTCUT / SLICE; ++i) {
                fetch_im2col(work.staying + i * PIXEL_BYTES, maps.added, full, i * SLICE, begin.q * second.shortcut_stride,
                             begin.p * second.shortcut_stride, begin.n, 0, 0);
            }
            shortcut.next(1);
        }
        for (int i = 0; CLUSTER > 1 && i < MIDDLE / SLICE; ++i) {  // nothing comes into what is sent to the other block
            claim(barriers.pixels, pixel, 0);
            pixel.next(PIXEL_STAGES);
        }
        const int columns = second.K / CLUSTER, first_column = work.rank() * columns;
        for (int k = first_column; k < first_column + columns; k += COLUMNS) {
            if (with_filters) fetch_second(maps, barriers, work, filter, k);
            for (int slice = 0; slice < SLICES; ++slice) {  // nor, without a residual, into what results leave from
                const unsigned full = claim(barriers.pixels, pixel, SHORTCUT ? 0 : PIXEL_BYTES);
                if (!SHORTCUT) fetch_box(work.pixel_stage(pixel.stage), maps.added, full, k + slice * SLICE, m0);
                pixel.next(PIXEL_STAGES);
            }
            if (NEXT && with_filters && k > 0) fetch_next(maps, barriers, work, filter, k - COLUMNS);
        }
        if (NEXT && with_filters) fetch_next(maps, barriers, work, filter, second.K - COLUMNS);
        for (int k = 0; k < NEXT; k += SLICE) {  // nor into these
            claim(barriers.pixels, pixel, 0);
            pixel.next(PIXEL_STAGES);
        }
    }
}
