// The loop shared by kernels that treat every element alike, in 64-bit indices, and access to neighbours at once.
#pragma once

#include "element.cuh"

__device__ __forceinline__ long long first_index() {
    return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ long long index_step() { return static_cast<long long>(gridDim.x) * blockDim.x; }

// Four elements at a time where a kernel is bound by memory: 16-byte accesses.
__device__ __forceinline__ float4 load4(const float* source) { return *reinterpret_cast<const float4*>(source); }
__device__ __forceinline__ void store4(float* destination, float4 v) { *reinterpret_cast<float4*>(destination) = v; }

// COUNT neighbouring elements as floats: in chunks of 16 bytes where they are a multiple of that (and then aligned to
// it), else one by one.
template <typename Element, int COUNT>
__device__ __forceinline__ void load(const Element* source, float (&values)[COUNT]) {
    constexpr int SIZE = PER_CHUNK<Element>;
    if constexpr (COUNT % SIZE == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += SIZE) {
            float part[SIZE];
            unpack<Element>(load_chunk(source + i), part);
#pragma unroll
            for (int v = 0; v < SIZE; ++v) values[i + v] = part[v];
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = to_float(source[i]);
    }
}

// Rounds and stores one element, or 16 bytes of them.
template <typename Element, int COUNT>
__device__ __forceinline__ void store(Element* destination, const float (&values)[COUNT]) {
    static_assert(COUNT == 1 || COUNT == PER_CHUNK<Element>, "one element or a chunk");
    if constexpr (COUNT == 1) {
        *destination = from_float<Element>(values[0]);
    } else {
        store_chunk(destination, pack<Element>(values));
    }
}
