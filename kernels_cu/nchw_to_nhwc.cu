// nchw_to_nhwc: brings a batch into the layout of the kernels, normalising on the way.
// @solves NCHW to NHWC, with the normalisation of uint8 or fp32 pixels fused in
// @arch sm_70
//
// Equation   y[n,h,w,c] = (scale(x[n,c,h,w]) − mean[c]) / std[c];  scale(u) = u / 255 for uint8, u for fp32.
//            Rounded after each step, as torchvision's ToTensor and Normalize do. mean and std may be null.
// Layouts    x NCHW (INPUT: float or unsigned char), y NHWC fp32; pixels = H·W; mean, std: C.
// Grid       x: images × tiles of 32 pixels (grid-stride), y: tiles of 32 channels (grid-stride). Block 32 × 8.
// Bound      memory.
#include "normalize.cuh"
#include "transpose.cuh"

#ifndef INPUT
#define INPUT float
#endif

extern "C" __global__ void __launch_bounds__(TRANSPOSE_TILE * TRANSPOSE_ROWS)
nchw_to_nhwc(const INPUT* __restrict__ x, float* __restrict__ y, const float* __restrict__ mean,
             const float* __restrict__ std, int N, int C, int pixels) {
    transpose(x, y, N, C, pixels, [=](INPUT v, int c) { return normalized(v, mean, std, c); });
}
