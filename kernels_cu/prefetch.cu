// prefetch: brings arrays to L2, for kernels that come later.
// @solves the filters of a network on their way to L2 while its first layers run
// @arch sm_70
//
// Equation   none: nothing is computed, and nothing written.
// Layouts    starts: `count` addresses, multiples of 128; lines: how many lines of 128 bytes each array has.
// Grid       any; the blocks' threads go through the arrays one after the other, neighbouring threads on neighbouring lines.
// Bound      memory: one read. Nothing waits for it.
// At batch 1 a deep layer reads its filter faster than it multiplies: from memory it waits, from L2 it hardly does. What
// a network has for filters fits L2, but not what else ran since the last call.

constexpr int LINE = 128;

extern "C" __global__ void __launch_bounds__(256)
prefetch(const unsigned long long* __restrict__ starts, const int* __restrict__ lines, int count) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = 0; i < count; ++i) {
        const char* const array = reinterpret_cast<const char*>(starts[i]);
        for (int line = first; line < lines[i]; line += step) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(array + static_cast<long long>(line) * LINE));
        }
    }
}
