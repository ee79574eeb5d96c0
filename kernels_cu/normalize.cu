// normalize: pixels that already lie NHWC, as image decoders leave them.
// @solves normalisation of NHWC uint8 or fp32 pixels
// @arch sm_70
//
// Equation   y[..., c] = (scale(x[..., c]) − mean[c]) / std[c];  scale(u) = u / 255 for uint8, u for fp32.
// Layouts    x (INPUT: float or unsigned char), y fp32: NHWC, `size` elements; mean, std: C.
// Grid       grid-stride over elements.
// Bound      memory.
#include "elementwise.cuh"
#include "normalize.cuh"

#ifndef INPUT
#define INPUT float
#endif

extern "C" __global__ void __launch_bounds__(256)
normalize(const INPUT* __restrict__ x, float* __restrict__ y, const float* __restrict__ mean, const float* __restrict__ std,
          long long size, int C) {
    for (long long i = first_index(); i < size; i += index_step()) y[i] = normalized(x[i], mean, std, static_cast<int>(i % C));
}
