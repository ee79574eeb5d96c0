// conv2d_wgmma_b2b: a warpgroup that multiplies 64 pixels of each tile by all filters, and finishes them.
//
// The including file defines the constants of its form, Barriers and the rings, and includes back_to_back_producer.cuh.
#pragma once

// STEP channels of finished results as an instruction takes them from registers.
__device__ __forceinline__ void to_operand(unsigned long long (&operand)[2], const unsigned (&words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned low = words[half * 2], high = words[half * 2 + 1];
        if constexpr (sizeof(ELEMENT) == 4) low = round_to_tf32(low), high = round_to_tf32(high);
        operand[half] = low | static_cast<unsigned long long>(high) << 32;
    }
}

// One of the consumers: 64 pixels of every tile.
struct Consumer {
    const Maps& maps;
    Barriers& barriers;
    const Work& work;
    const int number;
    const bool elected;
    Place pixel;
    Place filter;
    Place shortcut;
    int sent;    // parity of the tile, of what blocks send each other
    int oldest;  // of the filter stages that are not yet given back
    int stored;  // the stage that the accelerator may still be storing from; negative: none. The elected thread knows

    __device__ __forceinline__ unsigned rows(int stage) const { return work.pixel_stage(stage) + number * CONSUMER_BYTES; }
    // Where in a stage this lane's rows begin for load_matrices and store_matrices. Of 16 × 16 elements lanes 8i … 8i + 7 know
    // where the rows of matrix i begin: i % 2 the lower rows, i / 2 the right columns. The next 16 columns are at ^ 32.
    __device__ __forceinline__ unsigned corner(int stage) const {
        const int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
        return rows(stage) + row * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
    }
    // Sends the other block what this consumer has between the two convolutions, by way of stages that the producer leaves
    // empty, and waits for what it sends. Both have come as far in their rings, so that what is here is there in the same place.
    __device__ __forceinline__ void exchange(const unsigned long long (&middle)[MIDDLE / STEP][2]) {
        const int other = work.rank() ^ 1, first = pixel.stage;
        const unsigned received = shared_address(&barriers.received[number]);
#pragma unroll
        for (int slice = 0; slice < MIDDLE / SLICE; ++slice) {
            const unsigned place = corner(pixel.stage);
            wait_until_full(barriers.pixels, pixel);
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                const unsigned long long(&operand)[2] = middle[slice * STEPS + j];
                const unsigned words[4] = {static_cast<unsigned>(operand[0]), static_cast<unsigned>(operand[0] >> 32),
                                           static_cast<unsigned>(operand[1]), static_cast<unsigned>(operand[1] >> 32)};
                store_matrices(place ^ j * 32, words);
            }
            written_for_storing();
            warpgroup_sync(1 + number);
            if (elected) {
                if (slice == 0) {
                    barrier_arrive_expecting(received, MIDDLE / SLICE * CONSUMER_BYTES);
                    barrier_wait(shared_address(&barriers.may_send[number]), sent ^ 1);
                }
                const unsigned target = work.staying + slice * PIXEL_BYTES + number * CONSUMER_BYTES;
                copy_to_block(address_in_block(target, other), rows(pixel.stage), CONSUMER_BYTES,
                              address_in_block(received, other));
            }
            pixel.next(PIXEL_STAGES);
        }
        barrier_wait(received, sent);
        if (elected) {  // what has come here has been read there
            for (int i = 0; i < MIDDLE / SLICE; ++i) {
                const int stage = first + i < PIXEL_STAGES ? first + i : first + i - PIXEL_STAGES;
                arrive_in_block(address_in_block(shared_address(&barriers.pixels.empty[stage]), other));
            }
        }
    }
    // Lets the other block send the next tile's: all of this tile's has been read.
    __device__ __forceinline__ void end_exchange() {
        if (elected) arrive_in_block(address_in_block(shared_address(&barriers.may_send[number]), work.rank() ^ 1));
        sent ^= 1;
    }
    // Gives back the shortcut's pixels, of which all has been read.
    __device__ __forceinline__ void release_shortcut() {
        if (elected) release(barriers.shortcut, 0);
        shortcut.next(1);
    }
    // Gives back the oldest of the stages: they are read in the order of the ring.
    __device__ __forceinline__ void release_filter() {
        if (!elected || work.resident) return;
        release(barriers.filters, oldest);
        oldest = oldest + 1 < FILTER_STAGES ? oldest + 1 : 0;
    }
    // Gives back the stage that was stored from before the newest PENDING.
    template <int PENDING>
    __device__ __forceinline__ void release_stored() {
        if (stored < 0) return;
        store_wait<PENDING>();
        release(barriers.pixels, stored);
        stored = -1;
    }
    // Begins to store what all threads have written to the present stage, as columns k … k + SLICE − 1, and goes on to the
    // next stage.
    __device__ __forceinline__ void store_stage(const TensorMap& map, int k, int m0) {
        written_for_storing();
        warpgroup_sync(1 + number);
        if (elected) {
            store_box(map, rows(pixel.stage), k, m0 + number * 64);
            store_commit();
            release_stored<1>();
            stored = pixel.stage;
        }
        pixel.next(PIXEL_STAGES);
    }

    // The first convolution's sums.
    __device__ __forceinline__ void multiply_first(float (&sums)[MIDDLE / 2]) {
        int read_pixel = 0;
        for (int slice = 0; slice < work.slices; ++slice) {
            wait_until_full(barriers.filters, filter);
            wait_until_full(barriers.pixels, pixel);
            const unsigned long long a = operand(rows(pixel.stage)), b = operand(work.filter_stage(filter.stage));
            warpgroup_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                warpgroup_mma<ELEMENT, MIDDLE>(sums, a + step * 2, b + step * 2, slice + step > 0);
            }
            warpgroup_commit();
            if (slice == 0 && elected) release_stored<0>();  // of the tile before: by now it is under way for long
            warpgroup_wait<1>();                             // the slice before has been read
            if (slice > 0) {
                if (elected) release(barriers.pixels, read_pixel);
                release_filter();
            }
            read_pixel = pixel.stage;
            pixel.next(PIXEL_STAGES), filter.next(FILTER_STAGES);
        }
        warpgroup_wait<0>();
        warpgroup_results(sums);
        if (elected) release(barriers.pixels, read_pixel);
        release_filter();
    }

    // Waits for the next COUNT stages of filters, and returns them as operands: what multiplies from registers does not branch
    // between its instructions.
    template <int COUNT>
    __device__ __forceinline__ void next_filters(unsigned long long (&b)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            wait_until_full(barriers.filters, filter);
            b[i] = operand(work.filter_stage(filter.stage));
            filter.next(FILTER_STAGES);
        }
    }

    // Begins the products of all MIDDLE channels, and of those that stay, with COLUMNS filters of the second convolution.
    __device__ __forceinline__ void begin_second(float (&sums)[COLUMNS / 2],
                                                 const unsigned long long (&middle)[MIDDLE / STEP][2]) {
        constexpr int IN_STAGE = MIDDLE / STEP / SLICES;
        unsigned long long b[SECOND_STAGES];
        next_filters(b);
        const unsigned long long a = operand(work.staying + number * CONSUMER_BYTES);
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < (MIDDLE + STAYING) / STEP; ++step) {
            const int at = step % IN_STAGE, offset = at / STEPS * SECOND_BOX_BYTES + at % STEPS * 32;
            const unsigned long long filters = b[step / IN_STAGE] + offset / 16;
            if (step < MIDDLE / STEP) {
                warpgroup_mma<ELEMENT, COLUMNS>(sums, middle[step], filters, step > 0);
            } else {
                const int behind = step - MIDDLE / STEP, pixels = behind / STEPS * PIXEL_BYTES + behind % STEPS * 32;
                warpgroup_mma<ELEMENT, COLUMNS>(sums, a + pixels / 16, filters, true);
            }
        }
        warpgroup_commit();
    }

    // Finishes columns k … k + COLUMNS − 1 of the output: bias, residual, ReLU. The results take the residual's place, or one
    // that the producer leaves empty, and begin to be stored; `finished` has them as well, as what instructions take of COLUMNS
    // channels. `biases` are those of the first slice.
    __device__ __forceinline__ void finish_second(const float (&sums)[COLUMNS / 2], float2 (&biases)[SLICE / 8],
                                                  unsigned long long (&finished)[COLUMNS / STEP][2], int k, int m0,
                                                  const float* bias, unsigned floor) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (slice > 0) load_biases_of_matrices<ELEMENT>(biases, bias, k + slice * SLICE);
            const unsigned place = corner(pixel.stage);
            wait_until_full(barriers.pixels, pixel);
#pragma unroll
            for (int first = 0; first < STEPS; first += TOGETHER) {
                unsigned words[TOGETHER][4];
                if constexpr (SHORTCUT == 0) {
#pragma unroll
                    for (int i = 0; i < TOGETHER; ++i) load_matrices(words[i], place ^ (first + i) * 32);
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    const int j = first + i, step = slice * STEPS + j;
                    finish_matrices<ELEMENT, SHORTCUT == 0>(words[i], &sums[step * STEP / 2], &biases[j * STEP / 8], floor);
                    store_matrices(place ^ j * 32, words[i]);
                    to_operand(finished[step], words[i]);
                }
            }
            store_stage(maps.outputs, k + slice * SLICE, m0);
        }
    }

    // Waits for the products that were begun, but for the PENDING newest, and finishes their columns.
    template <int PENDING>
    __device__ __forceinline__ void end_second(float (&sums)[COLUMNS / 2], int k, int m0, const float* bias, unsigned floor) {
        float2 biases[SLICE / 8];
        load_biases_of_matrices<ELEMENT>(biases, bias, k);
        warpgroup_wait<PENDING>();
        warpgroup_results(sums);
#pragma unroll
        for (int stage = 0; stage < SECOND_STAGES; ++stage) release_filter();
        unsigned long long finished[COLUMNS / STEP][2];
        finish_second(sums, biases, finished, k, m0, bias, floor);
    }

    // Begins the products of COLUMNS finished channels with all filters of the next convolution.
    __device__ __forceinline__ void begin_next(float (&sums)[PARTS][MIDDLE / 2],
                                               unsigned long long (&finished)[COLUMNS / STEP][2]) {
        unsigned long long b[SLICES * PARTS];
        next_filters(b);
        warpgroup_operands(finished);
        warpgroup_fence();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    warpgroup_mma<ELEMENT, MIDDLE>(sums[part], finished[slice * STEPS + step],
                                                   b[slice * PARTS + part] + step * 2, true);
                }
            }
        }
        warpgroup_commit();
    }

    // Waits for all products that were begun, at least one, and gives back their filters.
    __device__ __forceinline__ void wait_for_products() {
        warpgroup_wait<0>();
        do {
            release_filter();
        } while (elected && !work.resident && oldest != filter.stage);
    }

    // Waits for all products, and finishes COLUMNS of the second's.
    __device__ __forceinline__ void finish_products(float (&sums)[COLUMNS / 2], unsigned long long (&finished)[COLUMNS / STEP][2],
                                                    int k, int m0, const float* bias, unsigned floor) {
        float2 biases[SLICE / 8];
        load_biases_of_matrices<ELEMENT>(biases, bias, k);
        wait_for_products();
        warpgroup_results(sums);
        finish_second(sums, biases, finished, k, m0, bias, floor);
    }

    // Finishes the next convolution's results, when all has been waited for: bias and ReLU. They begin to be stored by way of
    // stages that the producer leaves empty for them.
    __device__ __forceinline__ void end_next(float (&sums)[PARTS][MIDDLE / 2], int m0, const float* bias, unsigned floor) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) warpgroup_results(sums[part]);
#pragma unroll
        for (int k = 0; k < NEXT; k += SLICE) {
            float2 biases[SLICE / 8];
            load_biases_of_matrices<ELEMENT>(biases, bias, k);
            const unsigned place = corner(pixel.stage);
            wait_until_full(barriers.pixels, pixel);
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                unsigned words[4];
                finish_matrices<ELEMENT, false>(words, &sums[k / MIDDLE][k % MIDDLE / 2 + j * STEP / 2], &biases[j * STEP / 8],
                                                floor);
                store_matrices(place ^ j * 32, words);
            }
            store_stage(maps.next_outputs, k, m0);
        }
    }

    // Both products behind the first. While columns are multiplied, those finished last are, with the next convolution's
    // filters; while they are finished the other consumers multiply.
    __device__ __forceinline__ void multiply_both(const unsigned long long (&middle)[MIDDLE / STEP][2], int columns, int m0,
                                                  const float* second_bias, unsigned second_floor, const float* next_bias,
                                                  unsigned next_floor) {
        float sums[COLUMNS / 2], next[PARTS][MIDDLE / 2] = {};
        unsigned long long finished[COLUMNS / STEP][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) warpgroup_results(next[part]);
        begin_second(sums, middle);
        finish_products(sums, finished, 0, m0, second_bias, second_floor);
        for (int k = COLUMNS; k < columns; k += COLUMNS) {
            begin_second(sums, middle);
            begin_next(next, finished);
            finish_products(sums, finished, k, m0, second_bias, second_floor);
        }
        begin_next(next, finished);
        wait_for_products();
        end_next(next, m0, next_bias, next_floor);
    }
};

// The first convolution's results, rounded: the sums of two neighbouring blocks of 8 columns are what an instruction takes of
// 16 channels of 2 bytes; one block, of 8 channels of TF32.
__device__ __forceinline__ void round_middle(unsigned long long (&middle)[MIDDLE / STEP][2], const float (&sums)[MIDDLE / 2],
                                             const float* bias, unsigned floor) {
#pragma unroll
    for (int step = 0; step < MIDDLE / STEP; ++step) {
        float2 biases[STEP / 8];
        load_biases_of_matrices<ELEMENT>(biases, bias, step * STEP);
        unsigned words[4];
        finish_matrices<ELEMENT, false>(words, sums + step * STEP / 2, biases, floor);
        to_operand(middle[step], words);
    }
}
