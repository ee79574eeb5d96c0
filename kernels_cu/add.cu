// add: elementwise sum, the shortcut of a residual block.
// @solves elementwise sum of two tensors (fp32)
// @arch sm_70
//
// Equation   y = a + b
// Layouts    a, b, y: `size` fp32 elements of any shape, 16-byte aligned (as every allocation is).
// Grid       grid-stride over groups of 4 elements; the first threads also take the size % 4 elements left over.
// Bound      memory: 12 bytes per element. As the convolution's residual it would cost 4.
#include "elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
add(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y, long long size) {
    const long long groups = size / 4;
    for (long long i = first_index(); i < groups; i += index_step()) {
        const float4 u = load4(a + 4 * i);
        const float4 v = load4(b + 4 * i);
        store4(y + 4 * i, make_float4(u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w));
    }
    const long long rest = 4 * groups + first_index();
    if (rest < size) y[rest] = a[rest] + b[rest];
}
