// global_avg_pool2d: the mean over height and width.
// @solves global average pooling (NHWC)
// @arch sm_70
//
// Equation   y[n,c] = (1 / (H·W)) Σ_{h,w} x[n,h,w,c], in fp32
// Layouts    x NHWC, ELEMENT; y NC, fp32; pixels = H·W.
// Grid       x: ceil(C / CHANNELS) blocks, y: images (a grid-stride loop past 65535). Block COLUMNS × 8 rows of pixels; a
//            thread has VECTOR neighbouring channels: 16 bytes' worth (C a multiple of it) or one.
// Bound      memory: one read of x. A thread has IN_FLIGHT loads under way, all there are on a 7×7 map; a minimum of
//            resident blocks is stated so that the compiler does not save registers by taking turns. The 8 partial sums of
//            a channel are added in a fixed order, so that runs agree bit for bit.
#include "dependent_launch.cuh"
#include "elementwise.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef VECTOR
#define VECTOR 1
#endif

constexpr int ROWS = 8, IN_FLIGHT = 7;
constexpr int COLUMNS = VECTOR == 1 ? 32 : 8;  // 128 bytes or more side by side
constexpr int CHANNELS = COLUMNS * VECTOR;
static_assert(CHANNELS <= COLUMNS * ROWS, "at the end a thread has one channel");

extern "C" __global__ void __launch_bounds__(COLUMNS * ROWS, 4)
global_avg_pool2d(const ELEMENT* x, float* __restrict__ y, int N, int pixels, int C) {  // x: no load before the wait
    __shared__ float partial[ROWS][CHANNELS];
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int column = threadIdx.x * VECTOR;  // within the block's channels
    const int c = blockIdx.x * CHANNELS + column;
    const int thread = threadIdx.y * COLUMNS + threadIdx.x;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const ELEMENT* image = x + static_cast<long long>(n) * pixels * C + c;
        float sums[VECTOR] = {};
        for (int first = threadIdx.y; first < pixels; first += ROWS * IN_FLIGHT) {
            float values[IN_FLIGHT][VECTOR] = {};
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int pixel = first + i * ROWS;
                if (pixel < pixels && c < C) load(image + static_cast<long long>(pixel) * C, values[i]);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[v] += values[i][v];  // past the end + 0, which changes no sum
            }
        }
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) partial[threadIdx.y][column + v] = sums[v];
        __syncthreads();
        const int channel = blockIdx.x * CHANNELS + thread;
        if (thread < CHANNELS && channel < C) {
            float sum = partial[0][thread];
#pragma unroll
            for (int row = 1; row < ROWS; ++row) sum += partial[row][thread];
            y[static_cast<long long>(n) * C + channel] = sum / static_cast<float>(pixels);
        }
        __syncthreads();
    }
}
