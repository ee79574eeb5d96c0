// add: elementwise sum, the shortcut of a residual block.
// @solves elementwise sum of two tensors
// @arch sm_70
//
// Equation   y = a + b
// Layouts    a, b, y: `size` elements of any shape, ELEMENT, 16-byte aligned (as every allocation is).
// Grid       grid-stride over chunks of 16 bytes; the first threads also take the elements left over.
// Bound      memory: two reads, one write. As the convolution's residual it would cost one read.
#include "elementwise.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif

extern "C" __global__ void __launch_bounds__(256)
add(const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, ELEMENT* __restrict__ y, long long size) {
    constexpr int VECTOR = PER_CHUNK<ELEMENT>;
    const long long chunks = size / VECTOR;
    for (long long i = first_index(); i < chunks; i += index_step()) {
        float values[VECTOR], others[VECTOR];
        load(a + VECTOR * i, values);
        load(b + VECTOR * i, others);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] += others[v];
        store(y + VECTOR * i, values);
    }
    const long long rest = VECTOR * chunks + first_index();
    if (rest < size) y[rest] = from_float<ELEMENT>(to_float(a[rest]) + to_float(b[rest]));
}
