// add_relu: elementwise sum and ReLU in one pass.
// @solves elementwise sum and ReLU in one pass (fp32)
// @arch sm_70
//
// Equation   y = max(a + b, 0), NaN stays NaN
// Layouts    a, b, y: `size` fp32 elements of any shape, 16-byte aligned (as every allocation is).
// Grid       grid-stride over groups of 4 elements; the first threads also take the size % 4 elements left over.
// Bound      memory: 12 bytes per element. add and relu apart move 20.
#include "elementwise.cuh"
#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256)
add_relu(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y, long long size) {
    const long long groups = size / 4;
    for (long long i = first_index(); i < groups; i += index_step()) {
        const float4 u = load4(a + 4 * i);
        const float4 v = load4(b + 4 * i);
        store4(y + 4 * i, make_float4(relu_of(u.x + v.x), relu_of(u.y + v.y), relu_of(u.z + v.z), relu_of(u.w + v.w)));
    }
    const long long rest = 4 * groups + first_index();
    if (rest < size) y[rest] = relu_of(a[rest] + b[rest]);
}
