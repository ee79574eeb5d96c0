// sgemm: tiled fp32 matrix product with register tiles; multiplies what im2col wrote.
// @solves tiled fp32 matrix product A·Bᵀ with the convolution epilogue: the second half of im2col + sgemm
// @arch sm_70
//
// Equation   y[g, m, n] = epilogue( Σ_k a[g, m, k] · b[g, n, k] )
// Layouts    a: rows of `lda` elements, batch stride `stride_a`; b: filters, rows of gemm_k elements, batch stride
//            gemm_n·gemm_k; y: row m at m·ldy, column g·gemm_n + n (the groups of one pixel lie side by side).
// Grid       x: tiles of n × tiles of m (n fastest); y: batch (groups). Block 256 threads.
//            Shared 2·TILE_K·(128+PAD)·4 bytes. Each thread accumulates 8×8 outputs.
// Requires   nothing; edges are predicated. VECTOR = 4 reads 16 bytes at a time (gemm_k, lda, stride_a multiples of 4),
//            VECTOR = 1 reads single elements.
// This rung  64 multiply-adds for 16 values read from shared memory, against one for two in conv2d_shared. Loads and
//            arithmetic still take turns around two barriers per step.
#include "epilogue.cuh"

#ifndef VECTOR
#define VECTOR 4
#endif

constexpr int TILE_M = 128, TILE_N = 128, TILE_K = 16;
constexpr int THREAD_M = 8, THREAD_N = 8;
constexpr int THREADS = 256;
constexpr int UNDER_WAY = 32;  // residuals of a thread at once, so that 128 registers hold them
constexpr int PAD = 4;  // keeps the transposing stores of a warp in different banks and rows 16-byte aligned
static_assert(TILE_M / THREAD_M * (TILE_N / THREAD_N) == THREADS, "one 8×8 tile per thread");
static_assert(VECTOR == 1 || VECTOR == 4, "elements per load");

// Brings a TILE_K-deep slice of 128 rows into shared memory, transposed to [depth][row].
__device__ __forceinline__ void load_tile(float (&tile)[TILE_K][128 + PAD], const float* __restrict__ matrix,
                                          long long row_stride, int row0, int rows, int k0, int gemm_k) {
    constexpr int LOADS_PER_ROW = TILE_K / VECTOR;
#pragma unroll
    for (int i = threadIdx.x; i < 128 * LOADS_PER_ROW; i += THREADS) {
        const int row = i / LOADS_PER_ROW;
        const int k = i % LOADS_PER_ROW * VECTOR;
        const bool inside = row0 + row < rows && k0 + k < gemm_k;
        const float* source = matrix + (row0 + row) * row_stride + k0 + k;
        if constexpr (VECTOR == 4) {
            const float4 v = inside ? *reinterpret_cast<const float4*>(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            tile[k + 0][row] = v.x;
            tile[k + 1][row] = v.y;
            tile[k + 2][row] = v.z;
            tile[k + 3][row] = v.w;
        } else {
            tile[k][row] = inside ? *source : 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
sgemm(const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ bias,
      const float* residual, float* y, long long lda, long long stride_a, int ldy, int gemm_m,
      int gemm_n, int gemm_k, int with_relu) {
    __shared__ __align__(16) float a_tile[TILE_K][TILE_M + PAD];
    __shared__ __align__(16) float b_tile[TILE_K][TILE_N + PAD];

    const int tiles_n = (gemm_n + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / tiles_n * TILE_M;
    const int n0 = blockIdx.x % tiles_n * TILE_N;
    const int group = blockIdx.y;
    a += group * stride_a;
    b += static_cast<long long>(group) * gemm_n * gemm_k;

    const int tm = threadIdx.x / 16 * THREAD_M;
    const int tn = threadIdx.x % 16 * 4;  // columns tn .. tn+3 and 64+tn .. 64+tn+3: neighbours read neighbouring float4

    float accumulator[THREAD_M][THREAD_N] = {};
    for (int k0 = 0; k0 < gemm_k; k0 += TILE_K) {
        load_tile(a_tile, a, lda, m0, gemm_m, k0, gemm_k);
        load_tile(b_tile, b, gemm_k, n0, gemm_n, k0, gemm_k);
        __syncthreads();
#pragma unroll 1  // unrolled, the fragments of several steps would not fit in 128 registers, and one block fewer would run
        for (int k = 0; k < TILE_K; ++k) {
            float a_fragment[THREAD_M], b_fragment[THREAD_N];
#pragma unroll
            for (int i = 0; i < THREAD_M; i += 4) {
                *reinterpret_cast<float4*>(a_fragment + i) = *reinterpret_cast<const float4*>(&a_tile[k][tm + i]);
            }
#pragma unroll
            for (int j = 0; j < THREAD_N; j += 4) {
                *reinterpret_cast<float4*>(b_fragment + j) = *reinterpret_cast<const float4*>(&b_tile[k][tn + j * 16]);
            }
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) accumulator[i][j] += a_fragment[i] * b_fragment[j];
            }
        }
        __syncthreads();
    }

    const Epilogue epilogue{bias, residual, with_relu};
    const int first_k = group * gemm_n + n0 + tn;
    const auto columns_of = [&](int j) { return min(max(gemm_n - n0 - tn - j * 16, 0), 4); };
    float biases[THREAD_N];
#pragma unroll
    for (int j = 0; j < THREAD_N; j += 4) epilogue.load_bias<false>(biases + j, first_k + j * 16, columns_of(j));

    // Many residuals are under way before the first of these outputs is stored: y may be the residual.
#pragma unroll
    for (int first = 0; first < THREAD_M * THREAD_N; first += UNDER_WAY) {
        float shortcuts[UNDER_WAY];
#pragma unroll
        for (int f = 0; f < UNDER_WAY; f += 4) {
            const int i = (first + f) / THREAD_N, j = (first + f) % THREAD_N, m = m0 + tm + i, k = first_k + j * 16;
            const int columns = m < gemm_m ? columns_of(j) : 0;
            epilogue.load_residual<false>(shortcuts + f, static_cast<long long>(m) * ldy + k, columns);
        }
#pragma unroll
        for (int f = 0; f < UNDER_WAY; f += 4) {
            const int i = (first + f) / THREAD_N, j = (first + f) % THREAD_N, m = m0 + tm + i, k = first_k + j * 16;
            const int columns = m < gemm_m ? columns_of(j) : 0;
            epilogue.store<false>(y, static_cast<long long>(m) * ldy + k, columns, &accumulator[i][j], biases + j,
                                  shortcuts + f);
        }
    }
}
