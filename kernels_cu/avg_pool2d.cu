// avg_pool2d: the mean of each window, with or without counting padding.
// @solves 2-D average pooling, padding counted or not (fp32, NHWC)
// @arch sm_70
//
// Equation   y[n,p,q,c] = Σ over the window's pixels inside the image of x[n,h,w,c], divided by the pixels of the window
//            within the padded image (count_include_pad) or within the image
// Layouts    x NHWC, y NPQC; fp32.
// Grid       grid-stride over outputs, one element per thread, neighbouring threads on neighbouring channels.
// Bound      memory.
#include "elementwise.cuh"
#include "pool2d.cuh"

extern "C" __global__ void __launch_bounds__(256)
avg_pool2d(const float* __restrict__ x, float* __restrict__ y, const Pool2dParams params) {
    const long long total = static_cast<long long>(params.N) * params.P * params.Q * params.C;
    for (long long i = first_index(); i < total; i += index_step()) {
        const int c = static_cast<int>(i % params.C);
        const long long pixel = i / params.C;
        const int q = static_cast<int>(pixel % params.Q);
        const int p = static_cast<int>(pixel / params.Q % params.P);
        const float* image = x + pixel / params.Q / params.P * params.H * params.W * params.C + c;

        const Window window(params, p, q);
        float sum = 0.0f;
        for (int h = window.h_begin; h < window.h_end; ++h) {
#pragma unroll 1
            for (int w = window.w_begin; w < window.w_end; ++w) sum += image[(h * params.W + w) * params.C];
        }
        int count = (window.h_end - window.h_begin) * (window.w_end - window.w_begin);
        if (params.count_include_pad) {  // the padded image ends pad pixels past the image; a window may reach beyond
            const int h = p * params.stride_h - params.pad_h, w = q * params.stride_w - params.pad_w;
            count = (min(h + params.R, params.H + params.pad_h) - h) * (min(w + params.S, params.W + params.pad_w) - w);
        }
        y[i] = sum / static_cast<float>(count);
    }
}
