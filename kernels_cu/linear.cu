// linear: the classifier's matrix product, a warp per output column.
// @solves fully connected layer (fp32)
// @arch sm_70
//
// Equation   y[n,k] = Σ_c x[n,c] · weight[k,c] + bias[k]
// Layouts    x NC, weight KC, bias K or null, y NK; fp32.
// Grid       x: ceil(K/8) blocks, y: groups of ROWS images (grid-stride past 65535). Block 8 warps; a warp owns one k and
//            ROWS images: each weight is read once per ROWS images, and the 8 warps of a block share x through L1.
// Bound      memory for few images, L1 for many; either way small beside the convolutions.
constexpr int WARPS = 8, ROWS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
linear(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ y,
       int N, int C, int K) {
    const int lane = threadIdx.x % 32;
    const int k = blockIdx.x * WARPS + threadIdx.x / 32;
    if (k >= K) return;
    const float* weight_row = weight + static_cast<long long>(k) * C;
    for (int n0 = blockIdx.y * ROWS; n0 < N; n0 += gridDim.y * ROWS) {
        float sum[ROWS] = {};
        for (int c = lane; c < C; c += 32) {
            const float w = weight_row[c];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                if (n0 + i < N) sum[i] = fmaf(x[static_cast<long long>(n0 + i) * C + c], w, sum[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum[i] += __shfl_down_sync(0xffffffff, sum[i], step);
            if (lane == 0 && n0 + i < N) y[static_cast<long long>(n0 + i) * K + k] = bias ? sum[i] + bias[k] : sum[i];
        }
    }
}
