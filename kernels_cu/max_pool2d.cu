// max_pool2d: the largest value of each window; a window with a NaN gives NaN.
// @solves 2-D max pooling (NHWC)
// @arch sm_70
//
// Equation   y[n,p,q,c] = max over the window's pixels inside the image of x[n,h,w,c]
// Layouts    x NHWC, y NPQC; ELEMENT.
// Grid       grid-stride over outputs, VECTOR neighbouring channels per thread: 16 bytes' worth (C a multiple of it) or
//            one. Chunks are compared as they are, two elements per instruction where they have 2 bytes.
// Bound      memory: overlapping windows are served by L1 and L2, so about one read of x and one write of y.
//            4 blocks per multiprocessor leave registers enough for every form; unasked, the compiler spills a few.
#include "elementwise.cuh"
#include "pool2d.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef VECTOR
#define VECTOR 4
#endif

extern "C" __global__ void __launch_bounds__(256, 4)
max_pool2d(const ELEMENT* __restrict__ x, ELEMENT* __restrict__ y, const Pool2dParams params) {
    for (long long i = first_index(); i < output_groups<VECTOR>(params); i += index_step()) {
        const Window<VECTOR> window(params, i);
        const ELEMENT* const image = x + window.image;
        if constexpr (VECTOR == 1) {
            float best = -__int_as_float(0x7f800000);
            for (int h = window.h_begin; h < window.h_end; ++h) {
                for (int w = window.w_begin; w < window.w_end; ++w) {
                    best = larger(to_float(image[(h * params.W + w) * params.C]), best);
                }
            }
            y[i] = from_float<ELEMENT>(best);
        } else {
            // The first pixel of the window, which is never empty, is met twice: no element type needs its own −Inf.
            Chunk best = load_chunk(image + (window.h_begin * params.W + window.w_begin) * params.C);
            for (int h = window.h_begin; h < window.h_end; ++h) {
                for (int w = window.w_begin; w < window.w_end; ++w) {
                    best = larger<ELEMENT>(load_chunk(image + (h * params.W + w) * params.C), best);
                }
            }
            store_chunk(y + VECTOR * i, best);
        }
    }
}
