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

// Orders this warpgroup's accesses to accumulators before the instructions that follow.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of instructions issued since the last commit.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the newest groups are still computing.
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// sums = a · b, or sums += a · b if `accumulate`, for 64 rows and N columns.
template <typename Element, int N>
__device__ __forceinline__ void warpgroup_mma(float (&sums)[N / 2], unsigned long long a, unsigned long long b, bool accumulate);

// The accumulators of N = 64, 128 and 256 in the text of an instruction, and as its operands.
#define REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 \
    REGISTERS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_128 \
    REGISTERS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_8(i) \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define SUMS_64 SUMS_32(0), SUMS_32(32)
#define SUMS_128 SUMS_64, SUMS_32(64), SUMS_32(96)

#define WARPGROUP_MMA(ELEMENT, N, SHAPE_AND_TYPES, LAYOUTS, REGISTERS, SUMS, A, B, ACCUMULATE) \
    template <> \
    __device__ __forceinline__ void warpgroup_mma<ELEMENT, N>(float (&sums)[N / 2], unsigned long long a, \
                                                              unsigned long long b, bool accumulate) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned." SHAPE_AND_TYPES \
                     " {" REGISTERS "}, " A ", " B ", p, 1, 1" LAYOUTS "; }" \
                     : SUMS \
                     : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))); \
    }
WARPGROUP_MMA(Half, 64, "m64n64k16.f32.f16.f16", ", 0, 0", REGISTERS_32, SUMS_32(0), "%32", "%33", "%34")
WARPGROUP_MMA(Half, 128, "m64n128k16.f32.f16.f16", ", 0, 0", REGISTERS_64, SUMS_64, "%64", "%65", "%66")
WARPGROUP_MMA(Half, 256, "m64n256k16.f32.f16.f16", ", 0, 0", REGISTERS_128, SUMS_128, "%128", "%129", "%130")
WARPGROUP_MMA(BFloat16, 64, "m64n64k16.f32.bf16.bf16", ", 0, 0", REGISTERS_32, SUMS_32(0), "%32", "%33", "%34")
WARPGROUP_MMA(BFloat16, 128, "m64n128k16.f32.bf16.bf16", ", 0, 0", REGISTERS_64, SUMS_64, "%64", "%65", "%66")
WARPGROUP_MMA(BFloat16, 256, "m64n256k16.f32.bf16.bf16", ", 0, 0", REGISTERS_128, SUMS_128, "%128", "%129", "%130")
WARPGROUP_MMA(float, 64, "m64n64k8.f32.tf32.tf32", "", REGISTERS_32, SUMS_32(0), "%32", "%33", "%34")
WARPGROUP_MMA(float, 128, "m64n128k8.f32.tf32.tf32", "", REGISTERS_64, SUMS_64, "%64", "%65", "%66")
WARPGROUP_MMA(float, 256, "m64n256k8.f32.tf32.tf32", "", REGISTERS_128, SUMS_128, "%128", "%129", "%130")

#undef REGISTERS_32
#undef REGISTERS_64
#undef REGISTERS_128
#undef SUMS_8
#undef SUMS_32
#undef SUMS_64
#undef SUMS_128
#undef WARPGROUP_MMA
