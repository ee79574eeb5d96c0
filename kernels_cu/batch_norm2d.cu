// batch_norm2d: inference BatchNorm as a pass of its own.
// @solves BatchNorm at inference as a pass of its own (NHWC)
// @arch sm_70
//
// Equation   y[..., c] = (x[..., c] − mean[c]) · (weight[c] / sqrt(var[c] + eps)) + bias[c], in fp32, rounded at the end
// Layouts    x, y: NHWC, `size` elements, ELEMENT; weight, bias, mean, var: C, fp32.
// Grid       grid-stride over VECTOR neighbouring channels: 16 bytes' worth (C a multiple of it) or one.
// Bound      memory: one read, one write. Folded into the convolution's filter and bias it would cost nothing.
#include "elementwise.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef VECTOR
#define VECTOR 1
#endif

extern "C" __global__ void __launch_bounds__(256)
batch_norm2d(const ELEMENT* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             const float* __restrict__ mean, const float* __restrict__ var, ELEMENT* __restrict__ y, long long size, int C,
             float eps) {
    for (long long i = first_index(); i < size / VECTOR; i += index_step()) {
        const int c = static_cast<int>(i % (C / VECTOR)) * VECTOR;
        float values[VECTOR], weights[VECTOR], biases[VECTOR], means[VECTOR], variances[VECTOR];
        load(x + VECTOR * i, values);
        load(weight + c, weights);
        load(bias + c, biases);
        load(mean + c, means);
        load(var + c, variances);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            values[v] = (values[v] - means[v]) * (weights[v] / sqrtf(variances[v] + eps)) + biases[v];
        }
        store(y + VECTOR * i, values);
    }
}
