// The window of a pooling kernel, as max_pool2d and avg_pool2d receive it, by value.
//
// cupy_resnet/engines/cuda_engine.py builds the matching NumPy record.
#pragma once

struct Pool2dParams {
    int N, H, W, C;            // input (NHWC)
    int P, Q;                  // output height, width
    int R, S;                  // window height, width
    int stride_h, stride_w;    // step of the window
    int pad_h, pad_w;          // padding on each side
    int count_include_pad;     // avg_pool2d: whether padding counts in the divisor
};

// Clips the window of output (p, q) to the image: rows [h_begin, h_end), columns [w_begin, w_end).
struct Window {
    int h_begin, h_end, w_begin, w_end;

    __device__ __forceinline__ Window(const Pool2dParams& params, int p, int q) {
        const int h = p * params.stride_h - params.pad_h, w = q * params.stride_w - params.pad_w;
        h_begin = max(h, 0);
        w_begin = max(w, 0);
        h_end = min(h + params.R, params.H);
        w_end = min(w + params.S, params.W);
    }
};
