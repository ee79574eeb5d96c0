// batch_norm2d: inference BatchNorm as a pass of its own.
// @solves BatchNorm at inference as a pass of its own (fp32, NHWC)
// @arch sm_70
//
// Equation   y[..., c] = (x[..., c] − mean[c]) · (weight[c] / sqrt(var[c] + eps)) + bias[c]
// Layouts    x, y: NHWC, `size` elements; weight, bias, mean, var: C; all fp32.
// Grid       grid-stride over single elements; neighbouring threads on neighbouring channels.
// Bound      memory: 8 bytes per element. Folded into the convolution's filter and bias it would cost nothing.
#include "elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
batch_norm2d(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             const float* __restrict__ mean, const float* __restrict__ var, float* __restrict__ y, long long size, int C,
             float eps) {
    for (long long i = first_index(); i < size; i += index_step()) {
        const int c = static_cast<int>(i % C);
        y[i] = (x[i] - mean[c]) * (weight[c] / sqrtf(var[c] + eps)) + bias[c];
    }
}
