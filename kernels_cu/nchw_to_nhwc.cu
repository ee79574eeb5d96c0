// nchw_to_nhwc: brings a batch into the layout of the kernels, normalising on the way.
// @solves NCHW to NHWC, with the normalisation of uint8 or fp32 pixels fused in
// @arch sm_70
//
// Equation   y[n,h,w,c] = (scale(x[n,c,h,w]) − mean[c]) / std[c];  scale(u) = u / 255 for uint8, u for fp32.
//            Rounded after each step, as torchvision's ToTensor and Normalize do. mean and std may be null.
// Layouts    x NCHW (INPUT: float or unsigned char), y NHWC fp32; pixels = H·W.
// Grid       x: tiles of 32 pixels (grid-stride), y: tiles of 32 channels (grid-stride). Block 32 × 8. A tile is
//            turned in shared memory so that both reads and writes touch neighbours.
// Bound      memory.
#include "normalize.cuh"

#ifndef INPUT
#define INPUT float
#endif

constexpr int TILE = 32, ROWS = 8;

extern "C" __global__ void __launch_bounds__(TILE * ROWS)
nchw_to_nhwc(const INPUT* __restrict__ x, float* __restrict__ y, const float* __restrict__ mean,
             const float* __restrict__ std, int N, int C, int pixels) {
    __shared__ float tile[TILE][TILE + 1];
    const int pixel_tiles = (pixels + TILE - 1) / TILE;
    for (long long block = blockIdx.x; block < static_cast<long long>(N) * pixel_tiles; block += gridDim.x) {
        const long long n = block / pixel_tiles;
        const int pixel0 = static_cast<int>(block % pixel_tiles) * TILE;
        for (int c0 = blockIdx.y * TILE; c0 < C; c0 += gridDim.y * TILE) {
#pragma unroll 1
            for (int i = threadIdx.y; i < TILE; i += ROWS) {
                const int c = c0 + i, pixel = pixel0 + threadIdx.x;
                if (c < C && pixel < pixels) tile[i][threadIdx.x] = normalized(x[(n * C + c) * pixels + pixel], mean, std, c);
            }
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.y; i < TILE; i += ROWS) {
                const int c = c0 + threadIdx.x, pixel = pixel0 + i;
                if (c < C && pixel < pixels) y[(n * pixels + pixel) * C + c] = tile[threadIdx.x][i];
            }
            __syncthreads();
        }
    }
}
