// relu: ReLU as a pass of its own.
// @solves ReLU as a pass of its own (fp32)
// @arch sm_70
//
// Equation   y = max(x, 0), NaN stays NaN
// Layouts    x, y: `size` fp32 elements of any shape, 16-byte aligned (as every allocation is).
// Grid       grid-stride over groups of 4 elements; the first threads also take the size % 4 elements left over.
// Bound      memory: 8 bytes per element. Fused into the convolution that made x it would cost nothing.
#include "elementwise.cuh"
#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256)
relu(const float* __restrict__ x, float* __restrict__ y, long long size) {
    const long long groups = size / 4;
    for (long long i = first_index(); i < groups; i += index_step()) {
        const float4 v = load4(x + 4 * i);
        store4(y + 4 * i, make_float4(relu_of(v.x), relu_of(v.y), relu_of(v.z), relu_of(v.w)));
    }
    const long long rest = 4 * groups + first_index();
    if (rest < size) y[rest] = relu_of(x[rest]);
}
