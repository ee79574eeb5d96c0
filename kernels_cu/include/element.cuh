// What tensors are made of: float, Half or BFloat16 in memory, float in every register. No toolkit header is needed.
//
// Memory is moved in chunks of 16 bytes: 4 floats, or 8 elements of 2 bytes.
#pragma once

struct Half {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(Half v) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(v.bits));
    return result;
}
__device__ __forceinline__ float to_float(BFloat16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }

// Two floats rounded to nearest even, `low` in the lower half of the word, as it comes first in memory.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned pack_pair(float low, float high, Half) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ unsigned pack_pair(float low, float high, BFloat16) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#else
__device__ __forceinline__ unsigned half_bits(float v) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}
__device__ __forceinline__ unsigned pack_pair(float low, float high, Half) { return half_bits(low) | half_bits(high) << 16; }
__device__ __forceinline__ unsigned bfloat16_bits(float v) {
    const unsigned bits = __float_as_uint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // NaN stays NaN
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
__device__ __forceinline__ unsigned pack_pair(float low, float high, BFloat16) {
    return bfloat16_bits(low) | bfloat16_bits(high) << 16;
}
#endif

// The larger of two elements, NaN if either is: fmaxf and its relatives would drop it.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

template <typename Element>
__device__ __forceinline__ Element from_float(float v) {
    if constexpr (sizeof(Element) == 4) {
        return v;
    } else {
        return Element{static_cast<unsigned short>(pack_pair(v, 0.0f, Element{}))};
    }
}

struct alignas(16) Chunk {
    unsigned words[4];
};

template <typename Element>
constexpr int PER_CHUNK = 16 / static_cast<int>(sizeof(Element));

template <typename Element>
__device__ __forceinline__ void unpack(const Chunk& chunk, float (&values)[PER_CHUNK<Element>]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Element) == 4) {
            values[i] = __uint_as_float(chunk.words[i]);
        } else {
            values[2 * i] = to_float(Element{static_cast<unsigned short>(chunk.words[i])});
            values[2 * i + 1] = to_float(Element{static_cast<unsigned short>(chunk.words[i] >> 16)});
        }
    }
}

template <typename Element>
__device__ __forceinline__ Chunk pack(const float (&values)[PER_CHUNK<Element>]) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Element) == 4) {
            chunk.words[i] = __float_as_uint(values[i]);
        } else {
            chunk.words[i] = pack_pair(values[2 * i], values[2 * i + 1], Element{});
        }
    }
    return chunk;
}

// Element by element the larger of two words or chunks, NaN if either is.
__device__ __forceinline__ unsigned larger_word(unsigned a, unsigned b, float) {
    return __float_as_uint(larger(__uint_as_float(a), __uint_as_float(b)));
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned larger_word(unsigned a, unsigned b, Half) {
    unsigned result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ unsigned larger_word(unsigned a, unsigned b, BFloat16) {
    unsigned result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
#else
template <typename Element>
__device__ __forceinline__ float half_of_word(unsigned word) {
    return to_float(Element{static_cast<unsigned short>(word)});
}
template <typename Element>
__device__ __forceinline__ unsigned larger_word(unsigned a, unsigned b, Element) {
    return pack_pair(larger(half_of_word<Element>(a), half_of_word<Element>(b)),
                     larger(half_of_word<Element>(a >> 16), half_of_word<Element>(b >> 16)), Element{});
}
#endif
template <typename Element>
__device__ __forceinline__ Chunk larger(const Chunk& a, const Chunk& b) {
    Chunk result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.words[i] = larger_word(a.words[i], b.words[i], Element{});
    return result;
}

// Stores two neighbouring elements at an address that is a multiple of their size.
template <typename Element>
__device__ __forceinline__ void store_pair(void* destination, float low, float high) {
    if constexpr (sizeof(Element) == 4) {
        *static_cast<float2*>(destination) = make_float2(low, high);
    } else {
        *static_cast<unsigned*>(destination) = pack_pair(low, high, Element{});
    }
}

// The reverse.
template <typename Element>
__device__ __forceinline__ float2 load_pair(const void* source) {
    if constexpr (sizeof(Element) == 4) {
        return *static_cast<const float2*>(source);
    } else {
        const unsigned word = *static_cast<const unsigned*>(source);
        return make_float2(to_float(Element{static_cast<unsigned short>(word)}),
                           to_float(Element{static_cast<unsigned short>(word >> 16)}));
    }
}

__device__ __forceinline__ Chunk load_chunk(const void* source) { return *static_cast<const Chunk*>(source); }
__device__ __forceinline__ void store_chunk(void* destination, const Chunk& chunk) {
    *static_cast<Chunk*>(destination) = chunk;
}
