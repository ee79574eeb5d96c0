// conv2d_winograd: F(2×2, 3×3) in one kernel: input transform, 16 products and output transform without leaving the SM.
// @solves 3×3 stride-1 convolution with 2.25× fewer multiplications: Winograd F(2×2,3×3), fused (fp32)
// @arch sm_80
//
// Equation   Y = Aᵀ [ Σ_c (G g_c Gᵀ) ⊙ (Bᵀ d_c B) ] A for each 2×2 tile of outputs, d the 4×4 input tile under it
//            (Lavin and Gray 2015, arXiv 1509.09308). 16 multiplications instead of 36 per tile, channel and filter.
// GEMM view  for each of the 16 elements ξ of a transformed tile: gemm_m = tiles, gemm_n = K, gemm_k = C.
// Layouts    x NHWC, bias K, residual and y NPQK (P = H + 2·pad − 2). transformed: what winograd_filter_transform
//            wrote, [ceil(K/TILE_K)][ceil(C/CHUNK)][16][CHUNK][TILE_K], zero where c ≥ C or k ≥ K.
// Grid       tiles of filters × groups of 32 tiles (filters fastest). Block 512 threads: warp ξ accumulates element ξ,
//            8 tiles × 8 filters per thread. Shared 2·16·CHUNK·(32 + 64)·4 bytes.
// Requires   R = S = 3, stride 1, dilation 1, groups 1.
// Depth      `channels` of C: all, or, where C is a multiple of CHUNK, as many that are one too; x and transformed begin at
//            the first of them. Long sums lose more than the transforms do: where there are many channels, later launches
//            add to what the first one wrote, which they take as their residual.
// Numbers    exact on small integers. Otherwise the error is a few times that of a direct sum of as many products, because
//            transformed values are sums and differences of up to 4 inputs. A NaN or Inf reaches all outputs of the tiles
//            that read it, a 4×4 block instead of its true 3×3, and Inf − Inf makes NaN of an Inf: for that reason a
//            convolution on its own runs here only when asked to by name.
// This rung  against conv2d_implicit_gemm: 2.25× fewer multiply-adds for ~30 additions per tile and channel. Fusing
//            keeps the transformed tensors (4× the input) out of memory; warps that own one ξ need no exchange until
//            the output transform.
#include "async_copy.cuh"
#include "conv2d_params.cuh"
#include "epilogue.cuh"

#ifndef CHUNK
#define CHUNK 16   // channels per step
#define UNROLL 16  // of them multiplied per loop iteration
#endif

constexpr int TILES = 32;   // 2×2 output tiles per block
constexpr int TILE_K = 64;  // filters per block
constexpr int THREADS = 512;
constexpr int TRANSFORMED = 16 * CHUNK * TILE_K;  // floats of the filter slice of one step
constexpr int INPUT = 16 * CHUNK * TILES;         // floats of the input slice of one step
static_assert(CHUNK == 8 || CHUNK == 16, "the transform's lanes cover 8 channels");
static_assert(2 * (TRANSFORMED + INPUT) >= 16 * TILES * TILE_K / 2, "half the products must fit for the output transform");

// G g Gᵀ for every filter and channel, once per set of weights. One thread per (k, c) of the padded array.
extern "C" __global__ void __launch_bounds__(256)
winograd_filter_transform(const float* __restrict__ filter, float* __restrict__ transformed, int K, int C) {
    const int chunks = (C + CHUNK - 1) / CHUNK, k_tiles = (K + TILE_K - 1) / TILE_K;
    const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= static_cast<long long>(k_tiles) * TILE_K * chunks * CHUNK) return;
    const int c = static_cast<int>(index % (chunks * CHUNK));
    const int k = static_cast<int>(index / (chunks * CHUNK));

    float g[3][3];
#pragma unroll
    for (int i = 0; i < 9; ++i) g[i / 3][i % 3] = c < C && k < K ? filter[(k * 9 + i) * C + c] : 0.0f;
    float rows[4][3];  // G g
#pragma unroll
    for (int s = 0; s < 3; ++s) {
        rows[0][s] = g[0][s];
        rows[1][s] = 0.5f * (g[0][s] + g[1][s] + g[2][s]);
        rows[2][s] = 0.5f * (g[0][s] - g[1][s] + g[2][s]);
        rows[3][s] = g[2][s];
    }
    float* out = transformed + (static_cast<long long>(k / TILE_K) * chunks + c / CHUNK) * TRANSFORMED +
                 c % CHUNK * TILE_K + k % TILE_K;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* row = rows[i];
        const float element[4] = {row[0], 0.5f * (row[0] + row[1] + row[2]), 0.5f * (row[0] - row[1] + row[2]), row[2]};
#pragma unroll
        for (int j = 0; j < 4; ++j) out[(i * 4 + j) * CHUNK * TILE_K] = element[j];
    }
}

// Where tile `tile` of channel `c` lies within one ξ of the input slice. The XOR lets 8 channels × 4 tiles be stored
// by a warp without bank conflicts while 4 consecutive tiles stay one aligned float4.
__device__ __forceinline__ int input_place(int c, int tile) { return c * TILES + (tile ^ (c & 7) * 4); }

// One thread's share of the input transform: one tile and one channel of each step.
struct InputTile {
    const Conv2dParams& params;
    const float* image;
    int h0, w0;
    int c, tile;
    bool active;  // CHUNK = 8 needs only half the threads
    float d[4][4];

    __device__ __forceinline__ InputTile(const float* x, const Conv2dParams& params, int tile0, int tiles_p, int tiles_q)
        : params(params) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        c = warp % (CHUNK / 8) * 8 + lane % 8;
        tile = warp / (CHUNK / 8) * 4 + lane / 8;
        active = tile < TILES;
        int index = tile0 + tile;
        const bool valid = active && index < params.N * tiles_p * tiles_q;
        if (!valid) index = 0;
        w0 = index % tiles_q * 2 - params.pad_w;
        index /= tiles_q;
        h0 = valid ? index % tiles_p * 2 - params.pad_h : -(1 << 30);
        image = x + static_cast<long long>(index / tiles_p) * params.H * params.W * params.C;
    }

    // Reads the 4×4 input tile for channels chunk·CHUNK + c into registers.
    __device__ __forceinline__ void load(int chunk) {
        const int channel = chunk * CHUNK + c;
        const bool within = channel < params.C;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool row = within && static_cast<unsigned>(h0 + i) < static_cast<unsigned>(params.H);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool inside = row && static_cast<unsigned>(w0 + j) < static_cast<unsigned>(params.W);
                d[i][j] = inside ? image[((h0 + i) * params.W + w0 + j) * params.C + channel] : 0.0f;
            }
        }
    }

    // Writes Bᵀ d B to the slice, element ξ = 4·i + j.
    __device__ __forceinline__ void transform(float* slice) const {
        float rows[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            rows[0][j] = d[0][j] - d[2][j];
            rows[1][j] = d[1][j] + d[2][j];
            rows[2][j] = d[2][j] - d[1][j];
            rows[3][j] = d[1][j] - d[3][j];
        }
        float* out = slice + input_place(c, tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[(i * 4 + 0) * CHUNK * TILES] = rows[i][0] - rows[i][2];
            out[(i * 4 + 1) * CHUNK * TILES] = rows[i][1] + rows[i][2];
            out[(i * 4 + 2) * CHUNK * TILES] = rows[i][2] - rows[i][1];
            out[(i * 4 + 3) * CHUNK * TILES] = rows[i][1] - rows[i][3];
        }
    }
};

// Where the 2×2 outputs of one tile lie.
struct OutputTile {
    const Conv2dParams& params;
    int rows, columns;  // that exist: 2, 1 at the lower or right edge, none past the last tile
    long long first;    // element of the upper left output's first filter

    __device__ __forceinline__ OutputTile(const Conv2dParams& params, int tile, int tiles_p, int tiles_q) : params(params) {
        const int q = tile % tiles_q * 2, p = tile / tiles_q % tiles_p * 2, n = tile / tiles_q / tiles_p;
        rows = n < params.N ? min(params.P - p, 2) : 0;
        columns = min(params.Q - q, 2);
        first = ((static_cast<long long>(n) * params.P + p) * params.Q + q) * params.K;
    }

    __device__ __forceinline__ bool has(int i, int j) const { return i < rows && j < columns; }
    __device__ __forceinline__ long long offset(int i, int j) const {
        return first + (static_cast<long long>(i) * params.Q + j) * params.K;
    }
};

__device__ __forceinline__ void load_transformed(float* slice, const float* __restrict__ source) {
#pragma unroll
    for (int i = threadIdx.x * 4; i < TRANSFORMED; i += THREADS * 4) copy_async<16>(slice + i, source + i, true);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_winograd(const float* __restrict__ x, const float* __restrict__ transformed, const float* __restrict__ bias,
                const float* residual, float* y, const int channels, const Conv2dParams params) {
    extern __shared__ __align__(16) float shared[];
    float* const input_slices = shared;                     // [2][16][CHUNK][TILES], swizzled
    float* const filter_slices = shared + 2 * INPUT;        // [2][16][CHUNK][TILE_K]

    const int tiles_p = (params.P + 1) / 2, tiles_q = (params.Q + 1) / 2;
    const int k_tiles = (params.K + TILE_K - 1) / TILE_K, chunks = (channels + CHUNK - 1) / CHUNK;
    const int tile0 = blockIdx.x / k_tiles * TILES;
    const int k_tile = blockIdx.x % k_tiles;
    transformed += static_cast<long long>(k_tile) * ((params.C + CHUNK - 1) / CHUNK) * TRANSFORMED;

    const int lane = threadIdx.x % 32, xi = threadIdx.x / 32;
    // Z-order over 4 tiles-groups × 8 filter-groups; see conv2d_implicit_gemm.
    const int lane_n = (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4);
    const int lane_m = (lane >> 1 & 1) | (lane >> 2 & 2);

    InputTile input(x, params, tile0, tiles_p, tiles_q);
    load_transformed(filter_slices, transformed);
    copy_async_commit();
    if (input.active) {
        input.load(0);
        input.transform(input_slices);
    }

    float accumulator[8][8] = {};  // tiles 4·lane_m + {0..3, 16..19} × filters 4·lane_n + {0..3, 32..35}
    for (int chunk = 0; chunk < chunks; ++chunk) {
        copy_async_wait<0>();
        __syncthreads();
        const bool more = chunk + 1 < chunks;
        if (more) {
            load_transformed(filter_slices + (chunk + 1) % 2 * TRANSFORMED, transformed + (chunk + 1) * TRANSFORMED);
            if (input.active) input.load(chunk + 1);  // in flight while the products below run
        }
        copy_async_commit();

        const float* v = input_slices + chunk % 2 * INPUT + xi * CHUNK * TILES;
        const float* u = filter_slices + chunk % 2 * TRANSFORMED + xi * CHUNK * TILE_K;
#pragma unroll UNROLL
        for (int c = 0; c < CHUNK; ++c) {
            float a[8], b[8];
            *reinterpret_cast<float4*>(a) = *reinterpret_cast<const float4*>(v + input_place(c, 4 * lane_m));
            *reinterpret_cast<float4*>(a + 4) = *reinterpret_cast<const float4*>(v + input_place(c, 4 * lane_m + 16));
            *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(u + c * TILE_K + 4 * lane_n);
            *reinterpret_cast<float4*>(b + 4) = *reinterpret_cast<const float4*>(u + c * TILE_K + 4 * lane_n + 32);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) accumulator[i][j] = fmaf(a[i], b[j], accumulator[i][j]);
            }
        }
        if (more && input.active) input.transform(input_slices + (chunk + 1) % 2 * INPUT);
    }

    // Output transform: the 16 products of a tile lie in 16 warps. They meet in shared memory, half the filters at a
    // time, as [ξ][tile][32 filters]; then each thread computes the 2×2 outputs of two (tile, filter) pairs. All residuals
    // are under way before that, and so before the first output is stored: y may be the residual.
    const Epilogue epilogue{bias, residual, params.relu};
    const int first_k = k_tile * TILE_K + threadIdx.x % 32;
    const OutputTile outputs[2] = {OutputTile(params, tile0 + xi, tiles_p, tiles_q),
                                   OutputTile(params, tile0 + 16 + xi, tiles_p, tiles_q)};
    float biases[2] = {}, shortcuts[2][2][4] = {};  // [half][pass][output]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int k = first_k + half * 32;
        if (k >= params.K) continue;
        biases[half] = epilogue.load_bias(k);
#pragma unroll
        for (int f = 0; f < 8; ++f) {
            const OutputTile& tile = outputs[f / 4];
            const int i = f / 2 % 2, j = f % 2;
            if (tile.has(i, j)) shortcuts[half][f / 4][f % 4] = epilogue.load_residual(tile.offset(i, j) + k);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int tile = 4 * lane_m + i % 4 + i / 4 * 16;
            *reinterpret_cast<float4*>(shared + (xi * TILES + tile) * 32 + 4 * lane_n) =
                make_float4(accumulator[i][4 * half], accumulator[i][4 * half + 1], accumulator[i][4 * half + 2],
                            accumulator[i][4 * half + 3]);
        }
        __syncthreads();
        const int k = first_k + half * 32;
        if (k >= params.K) continue;
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            float m[4][4], rows[2][4];
#pragma unroll
            for (int e = 0; e < 16; ++e) m[e / 4][e % 4] = shared[(e * TILES + pass * 16 + xi) * 32 + threadIdx.x % 32];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                rows[0][j] = m[0][j] + m[1][j] + m[2][j];
                rows[1][j] = m[1][j] - m[2][j] - m[3][j];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float out[2] = {rows[i][0] + rows[i][1] + rows[i][2], rows[i][1] - rows[i][2] - rows[i][3]};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (!outputs[pass].has(i, j)) continue;
                    y[outputs[pass].offset(i, j) + k] = epilogue.finish(out[j], biases[half], shortcuts[half][pass][2 * i + j]);
                }
            }
        }
    }
}
