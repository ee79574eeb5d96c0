// global_avg_pool2d: the mean over height and width.
// @solves global average pooling (fp32, NHWC)
// @arch sm_70
//
// Equation   y[n,c] = (1 / (H·W)) Σ_{h,w} x[n,h,w,c]
// Layouts    x NHWC, y NC; fp32.
// Grid       x: ceil(C/32) blocks, y: images (a grid-stride loop past 65535). Block 32 channels × 8 rows of pixels.
// Bound      memory: one read of x, neighbouring threads on neighbouring channels. The 8 partial sums of a channel are
//            added in a fixed order, so that runs agree bit for bit.
constexpr int CHANNELS = 32, ROWS = 8;

extern "C" __global__ void __launch_bounds__(CHANNELS * ROWS)
global_avg_pool2d(const float* __restrict__ x, float* __restrict__ y, int N, int pixels, int C) {
    __shared__ float partial[ROWS][CHANNELS];
    const int c = blockIdx.x * CHANNELS + threadIdx.x;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const float* image = x + static_cast<long long>(n) * pixels * C;
        float sum = 0.0f;
        if (c < C) {
            for (int pixel = threadIdx.y; pixel < pixels; pixel += ROWS) sum += image[static_cast<long long>(pixel) * C + c];
        }
        partial[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y == 0 && c < C) {
#pragma unroll
            for (int row = 1; row < ROWS; ++row) sum += partial[row][threadIdx.x];
            y[static_cast<long long>(n) * C + c] = sum / static_cast<float>(pixels);
        }
        __syncthreads();
    }
}
