// Tensor cores one warp at a time: ldmatrix brings fragments from shared memory, mma.sync multiplies them.
//
// Every instruction here multiplies a 16-row by an 8-row operand over 32 bytes of depth (16 elements of 2 bytes, 8 of
// 4), both operands with depth innermost, so that one addressing scheme serves fp16, bf16 and TF32. With g = lane / 4
// and t = lane % 4 an accumulator d[4] holds (row, column) = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once

#include "element.cuh"
#include "shared_address.cuh"

// Loads four matrices of 8 rows × 16 bytes; lanes 8i .. 8i+7 give the addresses of the rows of matrix i, and lane l
// receives 4 bytes: word l % 4 of row l / 4.
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], unsigned row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row_address)
                 : "memory");
}
// Stores what load_matrices loads.
__device__ __forceinline__ void store_matrices(unsigned row_address, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// d += a · b. For Half and BFloat16 the fragments hold pairs of elements, for float one TF32 a word.
template <typename Element>
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ __forceinline__ void mma<Half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma<BFloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma<float>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A float rounded to the nearest TF32 (10 bits of mantissa); the hardware itself would cut the rest off.
__device__ __forceinline__ unsigned round_to_tf32(unsigned bits) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

template <int WORDS>
__device__ __forceinline__ void round_to_tf32(unsigned (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = round_to_tf32(words[i]);
}

// Splits fp32 operands into the nearest TF32 (`high`, in place) and what that leaves (`low`), of which the hardware takes
// the first 11 bits. Rounding by addition is cheaper than cvt.rna; it may carry a NaN over to −0, but then `low` is NaN.
template <int WORDS>
__device__ __forceinline__ void split_tf32(unsigned (&high)[WORDS], unsigned (&low)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const float value = __uint_as_float(high[i]);
        high[i] = (high[i] + 0x1000u) & 0xffffe000u;
        low[i] = __float_as_uint(value - __uint_as_float(high[i]));
    }
}

// Adds to the low part of one operand what the sum of products loses on average, since tensor cores round it toward zero:
// 3.7e-8 of it, as measured on an H100 over the layers of ResNet-50. What is added is less than the last bit of a sum, and is
// cut off again where nothing was to be rounded: an exact sum stays exact.
template <int WORDS>
__device__ __forceinline__ void make_up_for_truncation(const unsigned (&high)[WORDS], unsigned (&low)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        low[i] = __float_as_uint(fmaf(__uint_as_float(high[i]), 0x1.4p-25f, __uint_as_float(low[i])));
    }
}
