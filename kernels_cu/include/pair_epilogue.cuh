// The end of a convolution whose sums lie in pairs of neighbouring columns, as warpgroup.cuh says, in elements of 2 bytes:
// biases ahead of time, and pairs rounded and bounded at once. Elements of 4 bytes end the same way if the filters of every 8
// stand in the order 0 4 1 5 2 6 3 7: then a pair has the columns that load_matrices gives a lane of two rows of 16 bytes.
#pragma once

#include "element.cuh"
#include "epilogue.cuh"

// What results are raised to, pairs of 2 bytes at once: 0 for ReLU, else −∞, which changes none. As in relu_of NaN stays NaN.
__device__ __forceinline__ unsigned floor_word(int with_relu, Half) { return with_relu ? 0u : 0xfc00fc00u; }
__device__ __forceinline__ unsigned floor_word(int with_relu, BFloat16) { return with_relu ? 0u : 0xff80ff80u; }
__device__ __forceinline__ unsigned floor_word(int with_relu, float) { return with_relu ? 0u : 0xff800000u; }

template <typename Element>
__device__ __forceinline__ unsigned finished_pair(float low, float high, unsigned floor) {
    return larger_word(pack_pair(low, high, Element{}), floor, Element{});
}

template <typename Element>
__device__ __forceinline__ Element lower_element(unsigned word) {
    return Element{static_cast<unsigned short>(word)};
}
template <typename Element>
__device__ __forceinline__ Element upper_element(unsigned word) {
    return Element{static_cast<unsigned short>(word >> 16)};
}

// The biases of this thread's two columns in each of COUNT blocks of 8, of which the first begins with filter k; zeros for
// blocks that begin behind the last of K filters, or if there are none.
template <int COUNT>
__device__ __forceinline__ void load_biases(float2 (&biases)[COUNT], const float* bias, int k, int K = 0x7fffffff) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const int column = k + j * 8 + threadIdx.x % 4 * 2;
        biases[j] = bias && column < K ? *reinterpret_cast<const float2*>(bias + column) : make_float2(0.0f, 0.0f);
    }
}

// The same for sums that finish_matrices ends, of elements of 4 bytes in its order.
template <typename Element, int COUNT>
__device__ __forceinline__ void load_biases_of_matrices(float2 (&biases)[COUNT], const float* bias, int k) {
    if constexpr (sizeof(Element) == 2) {
        load_biases(biases, bias, k);
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const float* const first = bias + k + j * 8 + threadIdx.x % 4;
            biases[j] = bias ? make_float2(first[0], first[4]) : make_float2(0.0f, 0.0f);
        }
    }
}

// Finishes 16 rows by COUNT / 2 blocks of 8 columns of a transposed product, elements of 2 bytes: a row is a filter, of whose
// biases this thread has two. `words` has residuals, if ADD, as load_transposed gives them, and then results, as
// store_transposed takes them.
template <typename Element, bool ADD, int COUNT>
__device__ __forceinline__ void finish_matrices_of_rows(unsigned (&words)[COUNT], const float* sums, float2 biases,
                                                        unsigned floor) {
#pragma unroll
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        const float bias = matrix % 2 ? biases.y : biases.x;
        const float* const pair = sums + matrix * 2;
        float low = pair[0] + bias, high = pair[1] + bias;
        if (ADD) low += to_float(lower_element<Element>(words[matrix])), high += to_float(upper_element<Element>(words[matrix]));
        words[matrix] = finished_pair<Element>(low, high, floor);
    }
}

// Finishes the outputs of a warp in 16 rows of 32 bytes, one block of 8 columns or two: `words` has their residuals, if ADD, as
// load_matrices gives them, and then the results, as store_matrices takes them.
template <typename Element, bool ADD>
__device__ __forceinline__ void finish_matrices(unsigned (&words)[4], const float* sums, const float2* biases, unsigned floor) {
#pragma unroll
    for (int matrix = 0; matrix < 4; ++matrix) {
        if constexpr (sizeof(Element) == 4) {
            float value = sums[matrix % 2 * 2 + matrix / 2] + (matrix / 2 ? biases->y : biases->x);
            if (ADD) value += __uint_as_float(words[matrix]);
            words[matrix] = __float_as_uint(relu_of(value, __uint_as_float(floor)));
        } else {
            const float* const pair = sums + matrix / 2 * 4 + matrix % 2 * 2;
            float low = pair[0] + biases[matrix / 2].x, high = pair[1] + biases[matrix / 2].y;
            if (ADD) low += to_float(lower_element<Element>(words[matrix])), high += to_float(upper_element<Element>(words[matrix]));
            words[matrix] = finished_pair<Element>(low, high, floor);
        }
    }
}
