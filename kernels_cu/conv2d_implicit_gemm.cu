// conv2d_implicit_gemm: register tiles over an im2col matrix that is never stored. The production kernel in fp32.
// @solves 2-D convolution as a matrix product whose im2col matrix is never stored (fp32 FMA, any shape)
// @arch sm_70
//
// Equation   as conv2d_direct.
// GEMM view  gemm_m = N·P·Q pixels, gemm_n = K/groups filters, gemm_k = R·S·C/groups. Row m, depth (r,s,c) of the left
//            operand is fetched from its place in x when the mainloop needs it, or zero outside the image.
// Layouts    x NHWC, filter KRSC, bias K, residual and y NPQK; all fp32.
// Grid       x: tiles of filters × tiles of pixels (filters fastest, so that blocks running together share input in
//            L2); y: groups. Block 32·WARPS_M·WARPS_N threads.
// Shared     2·(TILE_M + TILE_N)·TILE_K·4 bytes.
// Requires   VECTOR = 4: channels per group a multiple of 4 (16-byte loads stay within one tap) and, for the output's
//            16-byte accesses, filters per group a multiple of 4. VECTOR = 1: nothing.
// This rung  against im2col + sgemm: the R·S-fold columns stay out of memory; shared memory is double-buffered, the next
//            slice travelling in registers while this one is multiplied, so that one barrier per slice is enough; the
//            transposing stores are swizzled, free of bank conflicts; lanes lie in Z-order. Where the depth is large it is
//            summed in parts: the error of a sum grows with the square root of its length. What limits it now is the
//            register file: every multiply-add reads three operands, and some wait for their bank.
#include "conv2d_params.cuh"
#include "epilogue.cuh"

#ifndef TILE_M
#define TILE_M 128     // pixels per block
#define TILE_N 128     // filters per block
#define THREAD_M 8     // pixels per thread
#define THREAD_N 8     // filters per thread
#define VECTOR 4       // elements per global load
#define MIN_BLOCKS 1   // blocks per multiprocessor the register budget must allow
#define SUM_SLICES 0   // slices summed apart before they are added to the total, or 0: all in one sum
#endif

constexpr int TILE_K = 16;               // depth per slice
constexpr int SUM_PERIOD = SUM_SLICES > 0 ? SUM_SLICES : 1;
constexpr int LANES_M = 8, LANES_N = 4;  // how a warp's lanes cover its tile
constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = LANES_N * THREAD_N;
constexpr int WARPS_M = TILE_M / WARP_M, WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int MOST_UNDER_WAY = SUM_SLICES > 0 ? 32 : 64;  // residuals of a thread at once, so that registers hold them
constexpr int UNDER_WAY = THREAD_M * THREAD_N < MOST_UNDER_WAY ? THREAD_M * THREAD_N : MOST_UNDER_WAY;
static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "warps must cover the tile");
static_assert(THREAD_M * THREAD_N % UNDER_WAY == 0, "residuals come in equal numbers");
static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0, "a thread's pixels and filters come in groups of 4");
static_assert(TILE_M % 32 == 0 && TILE_N % 32 == 0, "the swizzle permutes 32 neighbours");
static_assert(VECTOR == 1 || VECTOR == 4, "elements per load");

// A slice lies in shared memory as [depth][row], so that a thread reads 4 neighbouring rows of one depth at once. Rows
// of depth k are permuted by an XOR: the stores of a warp, which holds 4 depths apart by 4 for each of 8 rows, then fall
// into 32 different banks, and groups of 4 rows stay together.
__device__ __forceinline__ constexpr int swizzle(int k) { return (k / 4 % 4 * 8) ^ (k % 2 * 4); }

// Position along the depth: tap (r, s) and channel c of this thread's next load.
struct Depth {
    int r, s, c;

    __device__ __forceinline__ Depth(int depth, const Conv2dParams& params) {
        c = depth % params.group_channels;
        s = depth / params.group_channels % params.S;
        r = depth / params.group_channels / params.S;
    }

    __device__ __forceinline__ void advance(int step, const Conv2dParams& params) {
        c += step;
        while (c >= params.group_channels) {
            c -= params.group_channels;
            if (++s == params.S) s = 0, ++r;
        }
    }
};

// Brings slices of both operands to shared memory through registers. VECTOR = 4 assigns each thread one 16-byte column
// of a slice and every ROW_STEP-th row; VECTOR = 1 one 4-byte column. So a thread tracks a single depth, however many
// rows, and one offset from a row's first tap to the current one serves all its rows.
struct SliceLoader {
    static constexpr int COLUMNS = TILE_K / VECTOR;
    static constexpr int ROW_STEP = THREADS / COLUMNS;
    static constexpr int PIXELS = TILE_M / ROW_STEP;   // pixels this thread loads for
    static constexpr int FILTERS = TILE_N / ROW_STEP;  // filters this thread loads
    static_assert(TILE_M % ROW_STEP == 0 && TILE_N % ROW_STEP == 0, "passes must cover pixels and filters");

    const Conv2dParams& params;
    const float* filter;
    const float* first_tap[PIXELS];  // the input under the filter's first tap; may lie outside the image
    int h0[PIXELS], w0[PIXELS];      // its position; h0 far outside for rows past the end
    int filter_offset;               // of the first filter this thread loads, at its current depth
    int filters_left;                // filters of the group from that one on
    int depth;
    Depth position;
    float pixel_values[PIXELS][VECTOR], filter_values[FILTERS][VECTOR];

    __device__ __forceinline__ SliceLoader(const float* x, const float* filter, const Conv2dParams& params, int m0, int k0,
                                           int group)
        : params(params), filter(filter), position(threadIdx.x % COLUMNS * VECTOR, params) {
        const int row0 = threadIdx.x / COLUMNS;
        depth = threadIdx.x % COLUMNS * VECTOR;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int m = m0 + row0 + i * ROW_STEP;
            const bool valid = m < params.gemm_m;
            const OutputPixel pixel = output_pixel(params, valid ? m : 0);
            h0[i] = pixel.p * params.stride_h - params.pad_h;
            w0[i] = pixel.q * params.stride_w - params.pad_w;
            first_tap[i] = x + static_cast<long long>(pixel.n) * params.H * params.W * params.C +
                           (h0[i] * params.W + w0[i]) * params.C + group * params.group_channels;
            if (!valid) h0[i] = -(1 << 30);
        }
        filters_left = params.group_filters - k0 - row0;
        filter_offset = (group * params.group_filters + k0 + row0) * params.gemm_k + depth;
    }

    // Reads the next slice into registers; zeros outside the image, past the last filter, and past the depth.
    __device__ __forceinline__ void load() {
        const int dh = position.r * params.dilation_h;
        const int dw = position.s * params.dilation_w;
        const int tap = (dh * params.W + dw) * params.C + position.c;
        const bool within = depth < params.gemm_k;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const bool valid = within && static_cast<unsigned>(h0[i] + dh) < static_cast<unsigned>(params.H) &&
                               static_cast<unsigned>(w0[i] + dw) < static_cast<unsigned>(params.W);
            read(pixel_values[i], first_tap[i] + tap, valid);
        }
#pragma unroll
        for (int i = 0; i < FILTERS; ++i) {
            read(filter_values[i], filter + filter_offset + i * ROW_STEP * params.gemm_k,
                 within && i * ROW_STEP < filters_left);
        }
        depth += TILE_K;
        filter_offset += TILE_K;
        position.advance(TILE_K, params);
    }

    // Writes what load() read.
    __device__ __forceinline__ void store(float* pixel_slice, float* filter_slice) const {
        const int row0 = threadIdx.x / COLUMNS, k0 = threadIdx.x % COLUMNS * VECTOR;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const int k = k0 + v;
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                pixel_slice[k * TILE_M + ((row0 + i * ROW_STEP) ^ swizzle(k))] = pixel_values[i][v];
            }
#pragma unroll
            for (int i = 0; i < FILTERS; ++i) {
                filter_slice[k * TILE_N + ((row0 + i * ROW_STEP) ^ swizzle(k))] = filter_values[i][v];
            }
        }
    }

  private:
    static __device__ __forceinline__ void read(float (&values)[VECTOR], const float* source, bool valid) {
        if constexpr (VECTOR == 4) {
            const float4 v = valid ? *reinterpret_cast<const float4*>(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
        } else {
            values[0] = valid ? *source : 0.0f;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
conv2d_implicit_gemm(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ bias,
                     const float* residual, float* y, const Conv2dParams params) {
    __shared__ __align__(16) float pixel_slices[2][TILE_K * TILE_M];
    __shared__ __align__(16) float filter_slices[2][TILE_K * TILE_N];

    const int filter_tiles = (params.group_filters + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / filter_tiles * TILE_M;
    const int k0 = blockIdx.x % filter_tiles * TILE_N;
    const int group = blockIdx.y;

    // Lanes in Z-order over the warp's 8×4 threads: every aligned group of 4 lanes shares operands pairwise both ways,
    // which lets the hardware serve a 16-byte read of the whole warp in half the passes of a row-major order.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_m = (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4);
    const int lane_n = (lane >> 1 & 1) | (lane >> 2 & 2);
    // The thread's pixels: thread_m + 32·(i/4) + i%4; its filters: thread_n + 16·(j/4) + j%4: groups of 4, for 16-byte
    // reads here and 16-byte stores at the end.
    const int thread_m = warp / WARPS_N * WARP_M + 4 * lane_m;
    const int thread_n = warp % WARPS_N * WARP_N + 4 * lane_n;

    SliceLoader loader(x, filter, params, m0, k0, group);
    loader.load();
    loader.store(pixel_slices[0], filter_slices[0]);
    __syncthreads();

    float accumulator[THREAD_M][THREAD_N] = {};
    float totals[THREAD_M][THREAD_N] = {};  // SUM_SLICES > 0: of the slices before those in the accumulator
    const int slices = (params.gemm_k + TILE_K - 1) / TILE_K;
    for (int slice = 0; slice < slices; ++slice) {
        const bool more = slice + 1 < slices;
        if (more) loader.load();  // arrives while this slice is multiplied

        const float* pixel_slice = pixel_slices[slice % 2];
        const float* filter_slice = filter_slices[slice % 2];
#pragma unroll
        for (int k = 0; k < TILE_K; ++k) {
            float a[THREAD_M], b[THREAD_N];
#pragma unroll
            for (int i = 0; i < THREAD_M; i += 4) {
                *reinterpret_cast<float4*>(a + i) =
                    *reinterpret_cast<const float4*>(pixel_slice + (thread_m ^ swizzle(k)) + k * TILE_M + i * 8);
            }
#pragma unroll
            for (int j = 0; j < THREAD_N; j += 4) {
                const int row = thread_n + j / 4 % 2 * 16;  // 16 is a bit of the swizzle, 32 is not
                *reinterpret_cast<float4*>(b + j) =
                    *reinterpret_cast<const float4*>(filter_slice + (row ^ swizzle(k)) + k * TILE_N + j / 8 * 32);
            }
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) accumulator[i][j] = fmaf(a[i], b[j], accumulator[i][j]);
            }
        }
        if (more) loader.store(pixel_slices[(slice + 1) % 2], filter_slices[(slice + 1) % 2]);
        __syncthreads();
        if (SUM_SLICES > 0 && more && (slice + 1) % SUM_PERIOD == 0) {
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) totals[i][j] += accumulator[i][j], accumulator[i][j] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < THREAD_M && SUM_SLICES > 0; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) accumulator[i][j] += totals[i][j];
    }

    const Epilogue epilogue{bias, residual, params.relu};
    const int first_k = group * params.group_filters + k0 + thread_n, filters_left = params.group_filters - k0 - thread_n;
    const auto columns_of = [&](int j) { return min(max(filters_left - j * 4, 0), 4); };
    float biases[THREAD_N];
#pragma unroll
    for (int j = 0; j < THREAD_N; j += 4) epilogue.load_bias<VECTOR == 4>(biases + j, first_k + j * 4, columns_of(j));

    // Many residuals are under way before the first of these outputs is stored: y may be the residual.
#pragma unroll
    for (int first = 0; first < THREAD_M * THREAD_N; first += UNDER_WAY) {
        float shortcuts[UNDER_WAY];
#pragma unroll
        for (int f = 0; f < UNDER_WAY; f += 4) {
            const int i = (first + f) / THREAD_N, j = (first + f) % THREAD_N;
            const int m = m0 + thread_m + i / 4 * 32 + i % 4, k = first_k + j * 4;
            const int columns = m < params.gemm_m ? columns_of(j) : 0;
            epilogue.load_residual<VECTOR == 4>(shortcuts + f, static_cast<long long>(m) * params.K + k, columns);
        }
#pragma unroll
        for (int f = 0; f < UNDER_WAY; f += 4) {
            const int i = (first + f) / THREAD_N, j = (first + f) % THREAD_N;
            const int m = m0 + thread_m + i / 4 * 32 + i % 4, k = first_k + j * 4;
            const int columns = m < params.gemm_m ? columns_of(j) : 0;
            epilogue.store<VECTOR == 4>(y, static_cast<long long>(m) * params.K + k, columns, &accumulator[i][j], biases + j,
                                        shortcuts + f);
        }
    }
}
