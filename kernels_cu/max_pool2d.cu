// max_pool2d: the largest value of each window; a window with a NaN gives NaN.
// @solves 2-D max pooling (fp32, NHWC)
// @arch sm_70
//
// Equation   y[n,p,q,c] = max over the window's pixels inside the image of x[n,h,w,c]
// Layouts    x NHWC, y NPQC; fp32.
// Grid       grid-stride over outputs, VECTOR neighbouring channels per thread (4 needs C a multiple of 4).
// Bound      memory: overlapping windows are served by L1 and L2, so about one read of x and one write of y.
#include "elementwise.cuh"
#include "pool2d.cuh"

#ifndef VECTOR
#define VECTOR 4
#endif

// The larger of two, NaN if either is: a comparison with NaN is false, so NaN must be asked for.
__device__ __forceinline__ float larger(float best, float v) { return v > best || v != v ? v : best; }

extern "C" __global__ void __launch_bounds__(256)
max_pool2d(const float* __restrict__ x, float* __restrict__ y, const Pool2dParams params) {
    const int groups = params.C / VECTOR;
    const long long total = static_cast<long long>(params.N) * params.P * params.Q * groups;
    for (long long i = first_index(); i < total; i += index_step()) {
        const int c = static_cast<int>(i % groups) * VECTOR;
        const long long pixel = i / groups;
        const int q = static_cast<int>(pixel % params.Q);
        const int p = static_cast<int>(pixel / params.Q % params.P);
        const float* image = x + pixel / params.Q / params.P * params.H * params.W * params.C + c;

        const Window window(params, p, q);
        float best[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) best[v] = -__int_as_float(0x7f800000);
        for (int h = window.h_begin; h < window.h_end; ++h) {
            for (int w = window.w_begin; w < window.w_end; ++w) {
                const float* source = image + (h * params.W + w) * params.C;
                if constexpr (VECTOR == 4) {
                    const float4 v = load4(source);
                    best[0] = larger(best[0], v.x);
                    best[1] = larger(best[1], v.y);
                    best[2] = larger(best[2], v.z);
                    best[3] = larger(best[3], v.w);
                } else {
                    best[0] = larger(best[0], *source);
                }
            }
        }
        if constexpr (VECTOR == 4) {
            store4(y + 4 * i, make_float4(best[0], best[1], best[2], best[3]));
        } else {
            y[i] = best[0];
        }
    }
}
