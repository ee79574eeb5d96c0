// The description of one convolution as every conv2d kernel receives it, by value.
//
// cupy_resnet/conv2d/params.py mirrors this struct field by field as a NumPy dtype (a test compares the two).
// The host refuses problems whose gemm_m, filter, or single image (H·W·C, P·Q·K) has 2^31 elements or more, so that
// these fit an int; whole tensors may be larger, and kernels form such offsets in 64 bits.
#pragma once

struct Conv2dParams {
    int N, H, W, C;              // input: batch, height, width, channels (NHWC)
    int K, R, S;                 // filter: output channels, height, width (KRSC)
    int P, Q;                    // output height, width (NPQK)
    int stride_h, stride_w;      // step of the filter, in input pixels
    int pad_h, pad_w;            // zeros added on each side
    int dilation_h, dilation_w;  // distance of neighbouring taps, in input pixels (1 = dense)
    int groups;                  // independent convolutions side by side in the channels
    int group_channels;          // C / groups
    int group_filters;           // K / groups
    int gemm_m;                  // N·P·Q: rows of the equivalent matrix product
    int gemm_k;                  // R·S·C/groups: its depth, without the shortcut
    int relu;                    // whether the epilogue ends with ReLU
    int shortcut_channels;       // C of a second input, a 1×1 convolution of which is added; 0: there is none
    int shortcut_stride;         // its step in both directions
    int backwards;               // whether a persistent kernel of Hopper takes its tiles from the last one on
};

// Splits a row of the matrix product into its output pixel.
struct OutputPixel {
    int n, p, q;
};

__device__ __forceinline__ OutputPixel output_pixel(const Conv2dParams& params, int m) {
    OutputPixel pixel;
    pixel.q = m % params.Q;
    m /= params.Q;
    pixel.p = m % params.P;
    pixel.n = m / params.P;
    return pixel;
}
