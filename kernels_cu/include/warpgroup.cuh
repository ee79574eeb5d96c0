// Hopper's tensor cores: one instruction of a whole warpgroup (4 warps) multiplies 64 rows by up to 256 columns over 32
// bytes of depth, both operands straight from shared memory, while the threads go on (PTX ISA, wgmma.mma_async).
//
// Both operands lie in rows of 128 bytes with depth innermost, swizzled by 128 bytes as the tensor memory accelerator
// leaves them: the 16-byte chunk c of row r at place c ^ (r % 8). Accumulators: with g = lane / 4 and t = lane % 4, warp w
// holds of every 8 columns (row, column) = (16w + g, 2t), (16w + g, 2t + 1), (16w + g + 8, 2t), (16w + g + 8, 2t + 1).
#pragma once

#include "element.cuh"

// An operand for the instruction: groups of 8 rows are 1024 bytes apart. A multiple of 16 bytes is added as its sixteenth.
__device__ __forceinline__ unsigned long long operand(unsigned shared_address) {
    return static_cast<unsigned long long>((shared_address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// An operand that is not swizzled: 8 rows of 16 bytes lie one after the other; the next 16 bytes of depth of these rows are
// `depth_step` bytes away, the next 8 rows `rows_step`. All may overlap. Addresses and steps are multiples of 16.
__device__ __forceinline__ unsigned long long plain_operand(unsigned shared_address, int depth_step, int rows_step) {
    return static_cast<unsigned long long>((shared_address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(depth_step / 16) << 16 | static_cast<unsigned long long>(rows_step / 16) << 32;
}

// Which of the block's warpgroups this thread belongs to, as the same for a whole warp so that the compiler sees it: otherwise
// it does not know that what depends on the number is uniform, and puts R2UR instructions ahead of each product.
__device__ __forceinline__ int this_warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// Orders this warpgroup's accesses to accumulators before the instructions that follow.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of instructions issued since the last commit.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the newest groups are still computing.
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Waits for the other threads of this warpgroup, or of COUNT of them, with a named barrier, not 0, that no others use.
template <int COUNT>
__device__ __forceinline__ void warpgroups_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT * 128) : "memory");
}
__device__ __forceinline__ void warpgroup_sync(int barrier) { warpgroups_sync<1>(barrier); }

// Call after the wait for whatever computed `sums`: the compiler takes them for complete as soon as the instruction is issued.
template <int COUNT>
__device__ __forceinline__ void warpgroup_results(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Call before the fence in front of instructions that take `words` from registers: they are complete by then.
template <int COUNT>
__device__ __forceinline__ void warpgroup_operands(unsigned long long (&words)[COUNT][2]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+l"(words[i][0]), "+l"(words[i][1])::"memory");
}

// sums = a · b, or sums += a · b if `accumulate`, for 64 rows and N columns; a kernel that needs another N than those below
// instantiates WARPGROUP_MMA_OF_BYTES_2 or _OF_ALL for it.
template <typename Element, int N>
__device__ __forceinline__ void warpgroup_mma(float (&sums)[N / 2], unsigned long long a, unsigned long long b, bool accumulate);

// The same with `a` in registers, 2 bytes an element: of 16 elements of depth warp w holds pairs, each a word, that begin at
// (row, element) = (16w + g, 2t) and (16w + g + 8, 2t) in a[0], the first of them in the lower half, at (16w + g, 2t + 8) and
// (16w + g + 8, 2t + 8) in a[1]. Of 8 elements of TF32 a word is one, at (16w + g, t) and (16w + g + 8, t), then at (16w + g,
// t + 4) and (16w + g + 8, t + 4). For each N that a kernel needs it instantiates WARPGROUP_MMA_FROM_REGISTERS, or
// WARPGROUP_MMA_TF32_FROM_REGISTERS.
template <typename Element, int N>
__device__ __forceinline__ void warpgroup_mma(float (&sums)[N / 2], const unsigned long long (&a)[2], unsigned long long b,
                                              bool accumulate);

// The accumulators in the text of an instruction, four at a time, and as its operands. They follow the three others, which
// are given as if they were written, so that numbers do not depend on N.
#define REGISTERS_4 "%3, %4, %5, %6"
#define REGISTERS_8 REGISTERS_4 ", %7, %8, %9, %10"
#define REGISTERS_12 REGISTERS_8 ", %11, %12, %13, %14"
#define REGISTERS_16 REGISTERS_12 ", %15, %16, %17, %18"
#define REGISTERS_20 REGISTERS_16 ", %19, %20, %21, %22"
#define REGISTERS_24 REGISTERS_20 ", %23, %24, %25, %26"
#define REGISTERS_28 REGISTERS_24 ", %27, %28, %29, %30"
#define REGISTERS_32 REGISTERS_28 ", %31, %32, %33, %34"
#define REGISTERS_36 REGISTERS_32 ", %35, %36, %37, %38"
#define REGISTERS_40 REGISTERS_36 ", %39, %40, %41, %42"
#define REGISTERS_44 REGISTERS_40 ", %43, %44, %45, %46"
#define REGISTERS_48 REGISTERS_44 ", %47, %48, %49, %50"
#define REGISTERS_52 REGISTERS_48 ", %51, %52, %53, %54"
#define REGISTERS_56 REGISTERS_52 ", %55, %56, %57, %58"
#define REGISTERS_60 REGISTERS_56 ", %59, %60, %61, %62"
#define REGISTERS_64 REGISTERS_60 ", %63, %64, %65, %66"
#define REGISTERS_68 REGISTERS_64 ", %67, %68, %69, %70"
#define REGISTERS_72 REGISTERS_68 ", %71, %72, %73, %74"
#define REGISTERS_76 REGISTERS_72 ", %75, %76, %77, %78"
#define REGISTERS_80 REGISTERS_76 ", %79, %80, %81, %82"
#define REGISTERS_84 REGISTERS_80 ", %83, %84, %85, %86"
#define REGISTERS_88 REGISTERS_84 ", %87, %88, %89, %90"
#define REGISTERS_92 REGISTERS_88 ", %91, %92, %93, %94"
#define REGISTERS_96 REGISTERS_92 ", %95, %96, %97, %98"
#define REGISTERS_100 REGISTERS_96 ", %99, %100, %101, %102"
#define REGISTERS_104 REGISTERS_100 ", %103, %104, %105, %106"
#define REGISTERS_108 REGISTERS_104 ", %107, %108, %109, %110"
#define REGISTERS_112 REGISTERS_108 ", %111, %112, %113, %114"
#define REGISTERS_116 REGISTERS_112 ", %115, %116, %117, %118"
#define REGISTERS_120 REGISTERS_116 ", %119, %120, %121, %122"
#define REGISTERS_124 REGISTERS_120 ", %123, %124, %125, %126"
#define REGISTERS_128 REGISTERS_124 ", %127, %128, %129, %130"
#define SUMS_4_FROM(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_4 SUMS_4_FROM(0)
#define SUMS_8 SUMS_4, SUMS_4_FROM(4)
#define SUMS_12 SUMS_8, SUMS_4_FROM(8)
#define SUMS_16 SUMS_12, SUMS_4_FROM(12)
#define SUMS_20 SUMS_16, SUMS_4_FROM(16)
#define SUMS_24 SUMS_20, SUMS_4_FROM(20)
#define SUMS_28 SUMS_24, SUMS_4_FROM(24)
#define SUMS_32 SUMS_28, SUMS_4_FROM(28)
#define SUMS_36 SUMS_32, SUMS_4_FROM(32)
#define SUMS_40 SUMS_36, SUMS_4_FROM(36)
#define SUMS_44 SUMS_40, SUMS_4_FROM(40)
#define SUMS_48 SUMS_44, SUMS_4_FROM(44)
#define SUMS_52 SUMS_48, SUMS_4_FROM(48)
#define SUMS_56 SUMS_52, SUMS_4_FROM(52)
#define SUMS_60 SUMS_56, SUMS_4_FROM(56)
#define SUMS_64 SUMS_60, SUMS_4_FROM(60)
#define SUMS_68 SUMS_64, SUMS_4_FROM(64)
#define SUMS_72 SUMS_68, SUMS_4_FROM(68)
#define SUMS_76 SUMS_72, SUMS_4_FROM(72)
#define SUMS_80 SUMS_76, SUMS_4_FROM(76)
#define SUMS_84 SUMS_80, SUMS_4_FROM(80)
#define SUMS_88 SUMS_84, SUMS_4_FROM(84)
#define SUMS_92 SUMS_88, SUMS_4_FROM(88)
#define SUMS_96 SUMS_92, SUMS_4_FROM(92)
#define SUMS_100 SUMS_96, SUMS_4_FROM(96)
#define SUMS_104 SUMS_100, SUMS_4_FROM(100)
#define SUMS_108 SUMS_104, SUMS_4_FROM(104)
#define SUMS_112 SUMS_108, SUMS_4_FROM(108)
#define SUMS_116 SUMS_112, SUMS_4_FROM(112)
#define SUMS_120 SUMS_116, SUMS_4_FROM(116)
#define SUMS_124 SUMS_120, SUMS_4_FROM(120)
#define SUMS_128 SUMS_124, SUMS_4_FROM(124)

#define WARPGROUP_MMA(ELEMENT, N, ACCUMULATORS, DEPTH_AND_TYPES, LAYOUTS)                                                     \
    template <>                                                                                                              \
    __device__ __forceinline__ void warpgroup_mma<ELEMENT, N>(float (&sums)[N / 2], unsigned long long a,                    \
                                                              unsigned long long b, bool accumulate) {                       \
        int added = accumulate;                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; wgmma.mma_async.sync.aligned.m64n" #N DEPTH_AND_TYPES            \
                     " {" REGISTERS_##ACCUMULATORS "}, %0, %1, p, 1, 1" LAYOUTS "; }"                                        \
                     : "+l"(a), "+l"(b), "+r"(added), SUMS_##ACCUMULATORS);                                                  \
    }
#define WARPGROUP_MMA_OF_BYTES_2(N, ACCUMULATORS)                                \
    WARPGROUP_MMA(Half, N, ACCUMULATORS, "k16.f32.f16.f16", ", 0, 0")            \
    WARPGROUP_MMA(BFloat16, N, ACCUMULATORS, "k16.f32.bf16.bf16", ", 0, 0")
#define WARPGROUP_MMA_OF_ALL(N, ACCUMULATORS)                                    \
    WARPGROUP_MMA_OF_BYTES_2(N, ACCUMULATORS)                                    \
    WARPGROUP_MMA(float, N, ACCUMULATORS, "k8.f32.tf32.tf32", "")

WARPGROUP_MMA_OF_ALL(64, 32)
WARPGROUP_MMA_OF_ALL(128, 64)
WARPGROUP_MMA_OF_ALL(256, 128)

// Words are passed in pairs, and whether to accumulate is known when the kernel is compiled, so that three operands are enough.
#define WARPGROUP_MMA_OF_WORDS(N, ACCUMULATORS, DEPTH_AND_TYPES, LAYOUT, ACCUMULATE)                                          \
    asm volatile("{ .reg .pred p; .reg .b32 a0, a1, a2, a3; mov.b64 {a0, a1}, %0; mov.b64 {a2, a3}, %1;\n"                    \
                 "setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N DEPTH_AND_TYPES                     \
                 " {" REGISTERS_##ACCUMULATORS "}, {a0, a1, a2, a3}, %2, p, 1, 1" LAYOUT "; }"                               \
                 : "+l"(low), "+l"(high), "+l"(b), SUMS_##ACCUMULATORS)
#define WARPGROUP_MMA_OF_REGISTERS(ELEMENT, N, ACCUMULATORS, DEPTH_AND_TYPES, LAYOUT)                                         \
    template <>                                                                                                              \
    __device__ __forceinline__ void warpgroup_mma<ELEMENT, N>(float (&sums)[N / 2], const unsigned long long (&a)[2],         \
                                                              unsigned long long b, bool accumulate) {                       \
        unsigned long long low = a[0], high = a[1];                                                                          \
        if (accumulate) {                                                                                                    \
            WARPGROUP_MMA_OF_WORDS(N, ACCUMULATORS, DEPTH_AND_TYPES, LAYOUT, "1");                                           \
        } else {                                                                                                             \
            WARPGROUP_MMA_OF_WORDS(N, ACCUMULATORS, DEPTH_AND_TYPES, LAYOUT, "0");                                           \
        }                                                                                                                    \
    }
#define WARPGROUP_MMA_FROM_REGISTERS(N, ACCUMULATORS)                                \
    WARPGROUP_MMA_OF_REGISTERS(Half, N, ACCUMULATORS, "k16.f32.f16.f16", ", 0")      \
    WARPGROUP_MMA_OF_REGISTERS(BFloat16, N, ACCUMULATORS, "k16.f32.bf16.bf16", ", 0")
#define WARPGROUP_MMA_TF32_FROM_REGISTERS(N, ACCUMULATORS)                           \
    WARPGROUP_MMA_OF_REGISTERS(float, N, ACCUMULATORS, "k8.f32.tf32.tf32", "")
