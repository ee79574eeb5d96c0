// Hopper's warpgroup instructions with their first operand in registers, for what threads have to work on before it is
// multiplied (PTX ISA, wgmma.mma_async). The second lies in shared memory as in warpgroup.cuh.
//
// With g = lane / 4 and t = lane % 4, a thread of warp w holds of 64 rows by 8 of TF32: (row, depth) = (16w + g, t),
// (16w + g + 8, t), (16w + g, t + 4), (16w + g + 8, t + 4). What an instruction reads from registers stays as it is until
// the instruction has been waited for.
#pragma once

#include "warpgroup.cuh"

// Call before the fence in front of instructions that take `words` from registers: they are complete by then.
template <int COUNT>
__device__ __forceinline__ void warpgroup_operands(unsigned (&words)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        asm volatile("" : "+r"(words[i][0]), "+r"(words[i][1]), "+r"(words[i][2]), "+r"(words[i][3])::"memory");
    }
}

// sums = a · b, or sums += a · b if `accumulate`, for 64 rows, N columns and a depth of 8 TF32.
template <int N>
__device__ __forceinline__ void warpgroup_mma_tf32(float (&sums)[N / 2], const unsigned (&a)[4], unsigned long long b,
                                                   bool accumulate);

#define FIRST_REGISTERS_32                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31"
#define FIRST_REGISTERS_64                                                                                                   \
    FIRST_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "   \
                       "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// A, B and ADDED are the numbers of the operands that follow the accumulators.
#define WARPGROUP_MMA_TF32(N, ACCUMULATORS, A, B, ADDED)                                                                      \
    template <>                                                                                                              \
    __device__ __forceinline__ void warpgroup_mma_tf32<N>(float (&sums)[N / 2], const unsigned (&a)[4],                      \
                                                          unsigned long long b, bool accumulate) {                           \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDED ", 0; wgmma.mma_async.sync.aligned.m64n" #N                     \
                     "k8.f32.tf32.tf32 {" FIRST_REGISTERS_##ACCUMULATORS "}, {" A "}, " B ", p, 1, 1; }"                     \
                     : SUMS_##ACCUMULATORS                                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));               \
    }

WARPGROUP_MMA_TF32(64, 32, "%32, %33, %34, %35", "%36", "%37")
WARPGROUP_MMA_TF32(128, 64, "%64, %65, %66, %67", "%68", "%69")
