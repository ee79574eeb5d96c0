// Programmatic dependent launch (sm_90 and newer): a kernel may start while the one before it on the stream still runs.
//
// Whoever launches decides; without the launch attribute, or on older GPUs, both functions do nothing. A kernel that
// is launched so must wait before it reads what an earlier kernel wrote, and before it writes anything: earlier kernels
// may still be reading. Every kernel waits, so that what came before the one before is finished too.
#pragma once

// Returns when all earlier kernels have finished and what they wrote is visible.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks begin, up to their wait, wherever there is room beside this kernel's blocks.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
