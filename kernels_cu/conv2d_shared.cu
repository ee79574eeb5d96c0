// conv2d_shared: tiles of input and filter in shared memory, one output per thread.
// @solves 2-D convolution with input and filter tiles in shared memory, one output per thread (fp32, any shape)
// @arch sm_70
//
// Equation   as conv2d_direct.
// Layouts    x NHWC, filter KRSC (C/groups channels), bias K, residual and y NPQK; all fp32.
// GEMM view  rows m = output pixels (gemm_m = N·P·Q), columns k = filters (gemm_n = K/groups), depth = taps × channels
//            (gemm_k = R·S·C/groups), walked TILE at a time. Row m, depth (r,s,c) of the left operand is the input
//            value under that tap, zero outside the image.
// Grid       x: tiles of filters × tiles of pixels (filters fastest, so that blocks running together share input);
//            y: groups. Block TILE × TILE threads. Shared 2·TILE·(TILE+1)·4 bytes.
// Requires   nothing; accepts every problem.
// This rung  Each value is fetched from global memory once per block and used TILE times. What limits it now is shared
//            memory itself: two loads for every multiply-add.
#include "conv2d_params.cuh"
#include "epilogue.cuh"

constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(TILE * TILE)
conv2d_shared(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ bias,
              const float* __restrict__ residual, float* __restrict__ y, const Conv2dParams params) {
    __shared__ float input_tile[TILE][TILE + 1];   // [pixel][depth]; the extra column keeps column reads conflict-free
    __shared__ float filter_tile[TILE][TILE + 1];  // [filter][depth]

    const int tx = threadIdx.x, ty = threadIdx.y;
    const int filter_tiles = (params.group_filters + TILE - 1) / TILE;
    const int m0 = blockIdx.x / filter_tiles * TILE;
    const int k0 = blockIdx.x % filter_tiles * TILE;
    const int group = blockIdx.y;

    // Loading: thread (tx, ty) brings depth tx of pixel row ty and of filter row ty, so that a warp reads neighbours.
    const int load_m = m0 + ty;
    const bool load_pixel = load_m < params.gemm_m;
    const OutputPixel pixel = output_pixel(params, load_pixel ? load_m : 0);
    const int h0 = pixel.p * params.stride_h - params.pad_h;
    const int w0 = pixel.q * params.stride_w - params.pad_w;
    const float* image = x + static_cast<long long>(pixel.n) * params.H * params.W * params.C + group * params.group_channels;
    const bool load_filter = k0 + ty < params.group_filters;
    const float* filter_row = filter + (group * params.group_filters + (load_filter ? k0 + ty : 0)) * params.gemm_k;

    float accumulator = 0.0f;
    for (int depth0 = 0; depth0 < params.gemm_k; depth0 += TILE) {
        const int depth = depth0 + tx;
        const int c = depth % params.group_channels;
        const int s = depth / params.group_channels % params.S;
        const int r = depth / params.group_channels / params.S;
        const int h = h0 + r * params.dilation_h;
        const int w = w0 + s * params.dilation_w;
        const bool inside = load_pixel && depth < params.gemm_k && h >= 0 && h < params.H && w >= 0 && w < params.W;
        input_tile[ty][tx] = inside ? image[(h * params.W + w) * params.C + c] : 0.0f;
        filter_tile[ty][tx] = load_filter && depth < params.gemm_k ? filter_row[depth] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; ++i) accumulator += input_tile[ty][i] * filter_tile[tx][i];
        __syncthreads();
    }

    // Storing: thread (tx, ty) owns filter tx of pixel ty.
    const int k = k0 + tx;
    if (!load_pixel || k >= params.group_filters) return;
    const int out_k = group * params.group_filters + k;
    const long long offset = static_cast<long long>(load_m) * params.K + out_k;
    const Epilogue epilogue{bias, residual, params.relu};
    y[offset] = epilogue(accumulator, out_k, offset);
}
