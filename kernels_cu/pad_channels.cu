// pad_channels: the option-A shortcut of He et al. (arXiv 1512.03385, §4.2): subsample, and pad channels with zeros.
// @solves parameter-free shortcut: every stride-th pixel, channels padded with zeros (NHWC)
// @arch sm_70
//
// Equation   y[n,p,q,k] = x[n, p·stride, q·stride, k − before] where 0 ≤ k − before < C, else 0
// Layouts    x NHWC, y NPQK; P = ceil(H/stride), Q = ceil(W/stride). Nothing is computed, so C, K, before and size count
//            whatever is moved at once, UNIT: a Chunk of 16 bytes where all of them are multiples of that, else an
//            element of 4 or 2 bytes.
// Grid       grid-stride over outputs, neighbouring threads on neighbouring channels.
// Bound      memory.
#include "elementwise.cuh"

#ifndef UNIT
#define UNIT float  // Chunk, float, or Half for either type of 2 bytes
#endif

extern "C" __global__ void __launch_bounds__(256)
pad_channels(const UNIT* __restrict__ x, UNIT* __restrict__ y, long long size, int H, int W, int C, int K, int before,
             int stride) {
    const int P = (H + stride - 1) / stride, Q = (W + stride - 1) / stride;
    for (long long i = first_index(); i < size; i += index_step()) {
        const int c = static_cast<int>(i % K) - before;
        const long long pixel = i / K;
        const long long q = pixel % Q, p = pixel / Q % P, n = pixel / Q / P;
        y[i] = c >= 0 && c < C ? x[((n * H + p * stride) * W + q * stride) * C + c] : UNIT{};
    }
}
