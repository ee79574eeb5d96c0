// Copies from global to shared memory that bypass registers (cp.async, sm_80 and newer), with zero fill.
//
// On older architectures they are ordinary loads and stores: same result, no overlap with arithmetic.
#pragma once

// Copies BYTES (4 or 16) from `source` if `valid`, else writes zeros; then nothing is read, wherever `source` points.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* destination, const void* source, bool valid) {
    static_assert(BYTES == 4 || BYTES == 16, "what cp.async moves");
#if __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(destination));
    const int bytes = valid ? BYTES : 0;  // the rest, up to BYTES, is filled with zeros
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(source), "r"(bytes) : "memory");
    }
#else
    if constexpr (BYTES == 16) {
        *static_cast<float4*>(destination) =
            valid ? *static_cast<const float4*>(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    } else {
        *static_cast<float*>(destination) = valid ? *static_cast<const float*>(source) : 0.0f;
    }
#endif
}

// Closes the group of copies issued since the last commit.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's newest groups are still in flight.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
