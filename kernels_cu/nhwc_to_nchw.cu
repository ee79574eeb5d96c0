// nhwc_to_nchw: brings an activation back to torch's default layout.
// @solves NHWC to NCHW, fp32 from any type
// @arch sm_70
//
// Equation   y[n,c,h,w] = x[n,h,w,c]
// Layouts    x NHWC, ELEMENT; y NCHW, fp32; pixels = H·W.
// Grid       x: images × tiles of 32 channels (grid-stride), y: tiles of 32 pixels (grid-stride). Block 32 × 8.
// Bound      memory.
#include "transpose.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif

extern "C" __global__ void __launch_bounds__(TRANSPOSE_TILE * TRANSPOSE_ROWS)
nhwc_to_nchw(const ELEMENT* __restrict__ x, float* __restrict__ y, int N, int pixels, int C) {
    transpose(x, y, N, pixels, C, [](ELEMENT v, int) { return to_float(v); });
}
