// A transposed product's sums, 64 filters by pixels, on their way to an output whose filters are neighbours: elements of 2 bytes
// by way of shared memory, in matrices of 8 × 8, those of 4 bytes traded among the lanes of a warp.
#pragma once

// Two or four 8 × 8 matrices of 2-byte elements between registers and shared memory, transposed: lane l holds elements
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

// values[i] becomes what was values[i ^ key]. They must be copies: chosen places in the sums would have the assembler serialise
// the products.
__device__ __forceinline__ void exchange(float* values, int key) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const float low = values[i], high = values[i | bit];
            values[i] = key & bit ? high : low;
            values[i | bit] = key & bit ? low : high;
        }
    }
}

// A lane l has sums of filters l / 4 and l / 4 + 8, of pixels l % 4 * 2 and the next; afterwards those of pixel l / 4, of filters
// l % 4 * 4 and the next three. So 4 lanes after each other move 64 bytes of a pixel: what a quarter of a warp moves lies in two
// lines of the cache, not in eight. All four come from the same place in four lanes; in round i each lane gives from another
// place, values[i ^ l / 4 % 4], to the one that wants just that.
__device__ __forceinline__ void transpose_filters(float* values) {
    const int lane = threadIdx.x % 32, wanted = lane / 2 % 2 * 2 + lane / 4 % 2;
    exchange(values, lane / 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = __shfl_sync(~0u, values[i], lane % 2 * 16 + (wanted ^ i) * 4 + lane / 8);
    }
    exchange(values, wanted);
}
