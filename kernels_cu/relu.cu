// relu: ReLU as a pass of its own.
// @solves ReLU as a pass of its own
// @arch sm_70
//
// Equation   y = max(x, 0), NaN stays NaN
// Layouts    x, y: `size` elements of any shape, ELEMENT, 16-byte aligned (as every allocation is).
// Grid       grid-stride over chunks of 16 bytes; the first threads also take the elements left over.
// Bound      memory: one read, one write. Fused into the convolution that made x it would cost nothing.
#include "elementwise.cuh"
#include "epilogue.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif

extern "C" __global__ void __launch_bounds__(256)
relu(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ y, long long size) {
    constexpr int VECTOR = PER_CHUNK<ELEMENT>;
    const long long chunks = size / VECTOR;
    for (long long i = first_index(); i < chunks; i += index_step()) {
        float values[VECTOR];
        load(x + VECTOR * i, values);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] = relu_of(values[v]);
        store(y + VECTOR * i, values);
    }
    const long long rest = VECTOR * chunks + first_index();
    if (rest < size) y[rest] = from_float<ELEMENT>(relu_of(to_float(x[rest])));
}
