// im2col: writes the matrix whose product with the filters is the convolution.
// @solves materialises the im2col matrix of a convolution, for sgemm to multiply (fp32, any shape)
// @arch sm_70
//
// Equation   columns[g, m − row0, (r,s,c)] = x[n, p·stride_h − pad_h + r·dilation_h, q·stride_w − pad_w + s·dilation_w,
//                                              g·C/G + c], zero outside the image;  m = (n,p,q)
// Layouts    x NHWC; columns [groups][rows][gemm_k], row-major, gemm_k = R·S·C/groups ordered as KRSC's last three axes.
// Grid       x: rows / 8, y: groups. Block 32 × 8 threads: threadIdx.y a row, threadIdx.x along its depth, VECTOR elements
//            each, so that a row's pixel is found once and a warp writes one contiguous run.
// Requires   VECTOR = 4: channels per group a multiple of 4. VECTOR = 1: nothing. Only rows row0 .. row0+rows of gemm_m
//            are written, so that the host can bound the workspace.
// This rung  R·S times the input's size goes out to memory and comes back: that traffic is what implicit GEMM saves.
#include "conv2d_params.cuh"
#include "elementwise.cuh"

#ifndef VECTOR
#define VECTOR 4
#endif

constexpr int ROWS = 8;

extern "C" __global__ void __launch_bounds__(32 * ROWS)
im2col(const float* __restrict__ x, float* __restrict__ columns, const Conv2dParams params, int row0, int rows) {
    const int row = blockIdx.x * ROWS + threadIdx.y;
    if (row >= rows) return;
    const int group = blockIdx.y;
    const OutputPixel pixel = output_pixel(params, row0 + row);
    const int h0 = pixel.p * params.stride_h - params.pad_h, w0 = pixel.q * params.stride_w - params.pad_w;
    const float* image = x + static_cast<long long>(pixel.n) * params.H * params.W * params.C + group * params.group_channels;
    float* column = columns + (static_cast<long long>(group) * rows + row) * params.gemm_k;

    for (int depth = threadIdx.x * VECTOR; depth < params.gemm_k; depth += 32 * VECTOR) {
        const int c = depth % params.group_channels;
        const int tap = depth / params.group_channels;
        const int h = h0 + tap / params.S * params.dilation_h;
        const int w = w0 + tap % params.S * params.dilation_w;
        const bool inside = h >= 0 && h < params.H && w >= 0 && w < params.W;
        const float* source = image + (h * params.W + w) * params.C + c;
        if constexpr (VECTOR == 4) {
            store4(column + depth, inside ? load4(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        } else {
            column[depth] = inside ? *source : 0.0f;
        }
    }
}
