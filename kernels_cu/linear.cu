// linear: the classifier's matrix product for few images, a warp per output column.
// @solves fully connected layer on few images (fp32)
// @arch sm_70
//
// Equation   y[n,k] = Σ_c x[n,c] · weight[k,c] + bias[k]
// Layouts    x NC, weight KC, bias K or null, y NK; fp32.
// Grid       x: ceil(K/8) blocks, y: groups of ROWS images. Block 8 warps; a warp owns one k and ROWS images: each weight
//            is read once per ROWS images, and the 8 warps of a block share x through L1.
// Requires   VECTOR = 4: C a multiple of 4.
// Bound      memory, by the weights: a lane has IN_FLIGHT loads of them under way; a minimum of resident blocks is
//            stated so that the compiler does not save registers by taking turns. Started before the kernel in front of it
//            has ended, it loads them meanwhile: of one image all that a classifier of up to 2048 features has, of more as
//            much as there are registers for. Many images are a matter for the convolution kernels.
// Numbers    An image's result depends neither on N nor on its place among them.
#include "dependent_launch.cuh"
#include "elementwise.cuh"

#ifndef ROWS
#define ROWS 1    // images per warp
#define VECTOR 4  // elements per load: 4 or 1
#endif

constexpr int WARPS = 8, IN_FLIGHT = ROWS == 1 ? 16 : 4;

// Loads VECTOR values, or sets them to zero.
__device__ __forceinline__ void load_if(bool valid, const float* source, float (&values)[VECTOR]) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) values[v] = 0.0f;
    if (valid) load(source, values);
}

// Neither x nor weight is __restrict__, so that no load of x moves before the wait, and none of the weights behind it.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
linear(const float* x, const float* weight, const float* __restrict__ bias, float* __restrict__ y, int N, int C,
       int K) {
    const int lane = threadIdx.x % 32;
    const int k = blockIdx.x * WARPS + threadIdx.x / 32;
    if (k >= K) return;
    const float* const weight_row = weight + static_cast<long long>(k) * C;
    constexpr int STEP = 32 * VECTOR;
    float weights[IN_FLIGHT][VECTOR];
    const auto load_weights = [&](int c0) {
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; ++j) load_if(c0 + j * STEP < C, weight_row + c0 + j * STEP, weights[j]);
    };
    load_weights(lane * VECTOR);  // no kernel's output, so that they need not wait for earlier kernels
    wait_for_earlier_kernels();

    const int n0 = blockIdx.y * ROWS;
    const float* x_rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) x_rows[i] = x + static_cast<long long>(min(n0 + i, N - 1)) * C;

    float sums[ROWS] = {};
    for (int c0 = lane * VECTOR; c0 < C; c0 += STEP * IN_FLIGHT) {
        if (c0 >= STEP * IN_FLIGHT) load_weights(c0);
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; ++j) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                float values[VECTOR];
                load_if(c0 + j * STEP < C, x_rows[i] + c0 + j * STEP, values);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[i] = fmaf(values[v], weights[j][v], sums[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sums[i] += __shfl_down_sync(0xffffffff, sums[i], step);
        if (lane == 0 && n0 + i < N) {
            y[static_cast<long long>(n0 + i) * K + k] = bias ? sums[i] + bias[k] : sums[i];
        }
    }
}
