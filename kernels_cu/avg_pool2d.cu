// avg_pool2d: the mean of each window, with or without counting padding.
// @solves 2-D average pooling, padding counted or not (NHWC)
// @arch sm_70
//
// Equation   y[n,p,q,c] = Σ over the window's pixels inside the image of x[n,h,w,c], divided by the pixels of the window
//            within the padded image (count_include_pad) or within the image; in fp32, rounded at the end
// Layouts    x NHWC, y NPQC; ELEMENT.
// Grid       grid-stride over outputs, VECTOR neighbouring channels per thread: 16 bytes' worth (C a multiple of it) or
//            one.
// Bound      memory. 4 blocks per multiprocessor leave registers enough for every form; unasked, the compiler spills.
#include "elementwise.cuh"
#include "pool2d.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef VECTOR
#define VECTOR 1
#endif

extern "C" __global__ void __launch_bounds__(256, 4)
avg_pool2d(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ y, const Pool2dParams params) {
    for (long long i = first_index(); i < output_groups<VECTOR>(params); i += index_step()) {
        const Window<VECTOR> window(params, i);
        float sums[VECTOR] = {};
        for (int h = window.h_begin; h < window.h_end; ++h) {
#pragma unroll 1
            for (int w = window.w_begin; w < window.w_end; ++w) {
                float values[VECTOR];
                load(x + window.image + (h * params.W + w) * params.C, values);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[v] += values[v];
            }
        }
        const float count = static_cast<float>(window.count(params));
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sums[v] /= count;
        store(y + VECTOR * i, sums);
    }
}
