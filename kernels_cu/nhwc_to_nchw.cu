// nhwc_to_nchw: brings an activation back to torch's default layout.
// @solves NHWC to NCHW (fp32)
// @arch sm_70
//
// Equation   y[n,c,h,w] = x[n,h,w,c]
// Layouts    x NHWC, y NCHW; pixels = H·W; fp32.
// Grid       as nchw_to_nhwc, whose mirror this is.
// Bound      memory.
constexpr int TILE = 32, ROWS = 8;

extern "C" __global__ void __launch_bounds__(TILE * ROWS)
nhwc_to_nchw(const float* __restrict__ x, float* __restrict__ y, int N, int C, int pixels) {
    __shared__ float tile[TILE][TILE + 1];
    const int pixel_tiles = (pixels + TILE - 1) / TILE;
    for (long long block = blockIdx.x; block < static_cast<long long>(N) * pixel_tiles; block += gridDim.x) {
        const long long n = block / pixel_tiles;
        const int pixel0 = static_cast<int>(block % pixel_tiles) * TILE;
        for (int c0 = blockIdx.y * TILE; c0 < C; c0 += gridDim.y * TILE) {
#pragma unroll 1
            for (int i = threadIdx.y; i < TILE; i += ROWS) {
                const int c = c0 + threadIdx.x, pixel = pixel0 + i;
                if (c < C && pixel < pixels) tile[i][threadIdx.x] = x[(n * pixels + pixel) * C + c];
            }
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.y; i < TILE; i += ROWS) {
                const int c = c0 + i, pixel = pixel0 + threadIdx.x;
                if (c < C && pixel < pixels) y[(n * C + c) * pixels + pixel] = tile[threadIdx.x][i];
            }
            __syncthreads();
        }
    }
}
