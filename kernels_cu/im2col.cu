// im2col: writes the matrix whose product with the filters is the convolution.
// @solves materialises the im2col matrix of a convolution, for sgemm to multiply (fp32, any shape)
// @arch sm_70
//
// Equation   columns[g, m − row0, (r,s,c)] = x[n, p·stride_h − pad_h + r·dilation_h, q·stride_w − pad_w + s·dilation_w,
//                                              g·C/G + c], zero outside the image;  m = (n,p,q)
// Layouts    x NHWC; columns [groups][rows][gemm_k], row-major, gemm_k = R·S·C/groups ordered as KRSC's last three axes.
// Grid       grid-stride over groups·rows·gemm_k elements, neighbouring threads along the depth.
// Requires   nothing. Only rows row0 .. row0+rows of gemm_m are written, so that the host can bound the workspace.
// This rung  R·S times the input's size goes out to memory and comes back: that traffic is what implicit GEMM saves.
#include "conv2d_params.cuh"
#include "elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
im2col(const float* __restrict__ x, float* __restrict__ columns, const Conv2dParams params, int row0, int rows) {
    const long long total = static_cast<long long>(params.groups) * rows * params.gemm_k;
    for (long long index = first_index(); index < total; index += index_step()) {
        const int depth = static_cast<int>(index % params.gemm_k);
        const long long group_row = index / params.gemm_k;
        const int group = static_cast<int>(group_row / rows);
        const OutputPixel pixel = output_pixel(params, row0 + static_cast<int>(group_row % rows));

        const int c = depth % params.group_channels;
        const int s = depth / params.group_channels % params.S;
        const int r = depth / params.group_channels / params.S;
        const int h = pixel.p * params.stride_h - params.pad_h + r * params.dilation_h;
        const int w = pixel.q * params.stride_w - params.pad_w + s * params.dilation_w;
        const bool inside = h >= 0 && h < params.H && w >= 0 && w < params.W;
        const long long image = static_cast<long long>(pixel.n) * params.H * params.W * params.C;
        columns[index] = inside ? x[image + (h * params.W + w) * params.C + group * params.group_channels + c] : 0.0f;
    }
}
