// softmax: class probabilities of a row of logits, a block per row.
// @solves softmax over the last axis (fp32)
// @arch sm_70
//
// Equation   y[n,k] = exp(x[n,k] − max_k x[n,k]) / Σ_k exp(x[n,k] − max_k x[n,k])
// Layouts    x, y: NK; fp32.
// Grid       rows (grid-stride); block 256 threads. Three passes over a row that stays in L1.
// Numbers    a NaN makes its whole row NaN, as torch does.
constexpr int THREADS = 256;

template <typename Combine>
__device__ float reduce(float v, float* scratch, Combine combine) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = combine(v, __shfl_xor_sync(0xffffffff, v, step));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    v = scratch[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) v = combine(v, scratch[warp]);
    __syncthreads();
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax(const float* __restrict__ x, float* __restrict__ y, long long rows, int K) {
    __shared__ float scratch[THREADS / 32];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const float* in = x + row * K;
        float* out = y + row * K;
        float largest = -__int_as_float(0x7f800000);
        for (int k = threadIdx.x; k < K; k += THREADS) largest = fmaxf(largest, in[k]);
        largest = reduce(largest, scratch, [](float a, float b) { return fmaxf(a, b); });
        float sum = 0.0f;  // fmaxf skipped a NaN; exp(NaN − largest) brings it back
        for (int k = threadIdx.x; k < K; k += THREADS) sum += expf(in[k] - largest);
        sum = reduce(sum, scratch, [](float a, float b) { return a + b; });
        for (int k = threadIdx.x; k < K; k += THREADS) out[k] = expf(in[k] - largest) / sum;
    }
}
