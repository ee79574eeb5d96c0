// conv2d_direct: one thread per output. The first rung, and the oracle among the kernels.
// @solves 2-D convolution by its definition, one thread per output element (fp32, any shape)
// @arch sm_70
//
// Equation   y[n,p,q,k] = epilogue( Σ_{r,s,c} x[n, p·stride_h − pad_h + r·dilation_h, q·stride_w − pad_w + s·dilation_w,
//                                               g·C/G + c] · filter[k,r,s,c] ),   g = the group of k
// Layouts    x NHWC, filter KRSC (C/groups channels), bias K, residual and y NPQK; all fp32.
// Grid       ceil(N·P·Q·K / 256) blocks of 256 threads; neighbouring threads compute neighbouring k.
// Requires   nothing; this kernel accepts every problem.
// This rung  Every multiply-add reads both operands from global memory. Neighbouring threads share the input value
//            (one broadcast) but read filters R·S·C elements apart, so each load of a warp touches 32 lines: the
//            kernel waits on L1, far below both the arithmetic and the bandwidth of the card.
#include "conv2d_params.cuh"
#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256)
conv2d_direct(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ bias,
              const float* __restrict__ residual, float* __restrict__ y, const Conv2dParams params) {
    const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<long long>(params.gemm_m) * params.K) return;
    const int k = static_cast<int>(index % params.K);
    const OutputPixel pixel = output_pixel(params, static_cast<int>(index / params.K));

    const int first_channel = (k / params.group_filters) * params.group_channels;
    const float* image = x + static_cast<long long>(pixel.n) * params.H * params.W * params.C + first_channel;
    const float* tap = filter + k * params.gemm_k;  // fits: the host refuses filters of 2^31 elements

    float accumulator = 0.0f;
    for (int r = 0; r < params.R; ++r) {
        const int h = pixel.p * params.stride_h - params.pad_h + r * params.dilation_h;
        for (int s = 0; s < params.S; ++s, tap += params.group_channels) {
            const int w = pixel.q * params.stride_w - params.pad_w + s * params.dilation_w;
            if (h < 0 || h >= params.H || w < 0 || w >= params.W) continue;
            const float* input = image + (h * params.W + w) * params.C;
            for (int c = 0; c < params.group_channels; ++c) accumulator += input[c] * tap[c];
        }
    }
    const Epilogue epilogue{bias, residual, params.relu};
    y[index] = epilogue(accumulator, k, index);
}
