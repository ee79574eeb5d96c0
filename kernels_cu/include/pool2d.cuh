// The window of a pooling kernel, and its description as max_pool2d and avg_pool2d receive it, by value.
//
// cupy_resnet/engines/cuda/pooling.py builds the matching NumPy record.
#pragma once

struct Pool2dParams {
    int N, H, W, C;            // input (NHWC)
    int P, Q;                  // output height, width
    int R, S;                  // window height, width
    int stride_h, stride_w;    // step of the window
    int pad_h, pad_w;          // padding on each side
    int count_include_pad;     // avg_pool2d: whether padding counts in the divisor
};

// Groups of CHANNELS neighbouring channels that the output has.
template <int CHANNELS>
__device__ __forceinline__ long long output_groups(const Pool2dParams& params) {
    return static_cast<long long>(params.N) * params.P * params.Q * (params.C / CHANNELS);
}

// The window of one such group, clipped to the image: rows [h_begin, h_end), columns [w_begin, w_end).
template <int CHANNELS>
struct Window {
    long long image;  // offset of the group's first channel in the image's first pixel
    int p, q;         // output pixel
    int h_begin, h_end, w_begin, w_end;

    __device__ __forceinline__ Window(const Pool2dParams& params, long long group) {
        const int groups = params.C / CHANNELS;
        const int c = static_cast<int>(group % groups) * CHANNELS;
        const long long pixel = group / groups;
        q = static_cast<int>(pixel % params.Q);
        p = static_cast<int>(pixel / params.Q % params.P);
        image = pixel / params.Q / params.P * params.H * params.W * params.C + c;
        const int h = p * params.stride_h - params.pad_h, w = q * params.stride_w - params.pad_w;
        h_begin = max(h, 0);
        w_begin = max(w, 0);
        h_end = min(h + params.R, params.H);
        w_end = min(w + params.S, params.W);
    }

    // By what a sum over the window is divided. The padded image ends pad pixels past the image; a window may reach
    // beyond that.
    __device__ __forceinline__ int count(const Pool2dParams& params) const {
        if (!params.count_include_pad) return (h_end - h_begin) * (w_end - w_begin);
        const int h = p * params.stride_h - params.pad_h, w = q * params.stride_w - params.pad_w;
        return (min(h + params.R, params.H + params.pad_h) - h) * (min(w + params.S, params.W + params.pad_w) - w);
    }
};
