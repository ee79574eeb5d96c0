// nchw_to_nhwc: brings a batch into the layout of the kernels, normalising on the way.
// @solves NCHW to NHWC, with the normalisation of pixels fused in
// @arch sm_70
//
// Equation   y[n,h,w,c] = (scale(x[n,c,h,w]) − mean[c]) / std[c];  scale(u) = u / 255 for uint8, u for floats.
//            Rounded to fp32 after each step, as torchvision's ToTensor and Normalize do, then to ELEMENT. mean and std
//            may be null.
// Layouts    x NCHW, INPUT; y NHWC, ELEMENT; pixels = H·W; mean, std: C, fp32.
// Grid       x: images × tiles of 32 pixels (grid-stride), y: tiles of 32 channels (grid-stride). Block 32 × 8.
// Bound      memory.
#include "normalize.cuh"
#include "transpose.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef INPUT
#define INPUT float  // or unsigned char, Half, BFloat16
#endif

extern "C" __global__ void __launch_bounds__(TRANSPOSE_TILE * TRANSPOSE_ROWS)
nchw_to_nhwc(const INPUT* __restrict__ x, ELEMENT* __restrict__ y, const float* __restrict__ mean,
             const float* __restrict__ std, int N, int C, int pixels) {
    transpose(x, y, N, C, pixels, [=](INPUT v, int c) { return normalized(v, mean, std, c); });
}
