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
// Shared     NUM_STAGES·(TILE_M + TILE_N)·TILE_K·4 bytes, dynamic.
// Requires   VECTOR = 4: channels per group a multiple of 4 (16-byte loads stay within one tap) and, for the output's
//            16-byte accesses, filters per group a multiple of 4. VECTOR = 1: nothing.
// This rung  against im2col + sgemm: the R·S-fold columns stay out of memory; loads are 16 bytes and asynchronous,
//            NUM_STAGES slices deep, so that they overlap the arithmetic and one barrier per slice is enough; shared
//            memory keeps the loaded order, depth innermost, swizzled instead of transposed.
#include "async_copy.cuh"
#include "conv2d_params.cuh"
#include "epilogue.cuh"

#ifndef TILE_M
#define TILE_M 128     // pixels per block
#define TILE_N 128     // filters per block
#define THREAD_M 8     // pixels per thread
#define THREAD_N 8     // filters per thread
#define NUM_STAGES 3   // slices of depth in flight
#define VECTOR 4       // elements per global load
#define MIN_BLOCKS 2   // blocks per multiprocessor the register budget must allow
#define UNROLL 1       // 16-byte chunks of a slice multiplied per loop iteration; more only where registers allow
#endif

constexpr int TILE_K = 16;                // depth per slice
constexpr int CHUNKS = TILE_K / 4;        // 16-byte chunks per row of a slice
constexpr int LANES_M = 8, LANES_N = 4;   // how a warp's lanes cover its tile
constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = LANES_N * THREAD_N;
constexpr int WARPS_M = TILE_M / WARP_M, WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "warps must cover the tile");
static_assert(THREAD_N % 4 == 0, "a thread's filters come in groups of 4");
static_assert(WARP_M % 32 == 0 && WARP_N % 16 == 0, "the swizzle repeats every 32 rows");
static_assert(VECTOR == 1 || VECTOR == 4, "elements per load");

// Where chunk `chunk` of row `row` lies in a slice, in floats. A row is 64 bytes, so two rows fill the 32 banks; the
// XOR spreads both access patterns of the mainloop (8 consecutive rows, and 4 rows at a distance of 4) over all banks.
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * TILE_K + ((chunk ^ (row >> 1) ^ (row >> 3)) & (CHUNKS - 1)) * 4;
}

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

// Loads slices of both operands into shared memory. VECTOR = 4 assigns each thread one 16-byte column of a slice and
// every (THREADS/CHUNKS)-th row; VECTOR = 1 one 4-byte column. So a thread tracks a single depth, however many rows,
// and one offset from a row's first tap to the current one serves all its rows.
struct SliceLoader {
    static constexpr int COLUMNS = TILE_K / VECTOR;
    static constexpr int ROW_STEP = THREADS / COLUMNS;
    static constexpr int PIXELS = (TILE_M + ROW_STEP - 1) / ROW_STEP;   // pixels this thread loads for
    static constexpr int FILTERS = (TILE_N + ROW_STEP - 1) / ROW_STEP;  // filters this thread loads
    static_assert(ROW_STEP % 8 == 0, "rows of a thread differ by multiples of 8");
    static_assert(TILE_M % ROW_STEP == 0 && TILE_N % ROW_STEP == 0, "passes must cover pixels and filters");

    const Conv2dParams& params;
    const float* x;
    const float* filter;
    const float* first_tap[PIXELS];  // the input under the filter's first tap; may lie outside the image
    int h0[PIXELS], w0[PIXELS];      // its position; h0 far outside for rows past the end
    int filter_offset;               // of the first filter this thread loads, at its current depth
    int filters_left;                // filters of the group from that one on
    int depth;
    Depth position;
    int place;                       // of the thread's first row in a slice

    __device__ __forceinline__ SliceLoader(const float* x, const float* filter, const Conv2dParams& params, int m0, int k0,
                                           int group)
        : params(params), x(x), filter(filter), position(threadIdx.x % COLUMNS * VECTOR, params) {
        const int row0 = threadIdx.x / COLUMNS;
        depth = threadIdx.x % COLUMNS * VECTOR;
        place = swizzled(row0, depth / 4) + depth % 4;
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

    __device__ __forceinline__ void load(float* pixel_slice, float* filter_slice) {
        const int dh = position.r * params.dilation_h;
        const int dw = position.s * params.dilation_w;
        const int tap = (dh * params.W + dw) * params.C + position.c;
        const bool within = depth < params.gemm_k;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const bool valid = within && static_cast<unsigned>(h0[i] + dh) < static_cast<unsigned>(params.H) &&
                               static_cast<unsigned>(w0[i] + dw) < static_cast<unsigned>(params.W);
            copy_async<4 * VECTOR>(pixel_slice + place_of(i), valid ? first_tap[i] + tap : x, valid);
        }
#pragma unroll
        for (int i = 0; i < FILTERS; ++i) {
            const bool valid = within && i * ROW_STEP < filters_left;
            const float* source = filter + (valid ? filter_offset + i * ROW_STEP * params.gemm_k : 0);
            copy_async<4 * VECTOR>(filter_slice + place_of(i), source, valid);
        }
        depth += TILE_K;
        filter_offset += TILE_K;
        position.advance(TILE_K, params);
    }

  private:
    // swizzled() of the thread's i-th row: whole multiples of 8 rows only flip bits of the chunk.
    __device__ __forceinline__ int place_of(int i) const {
        return (place ^ (i * ROW_STEP / 8 & 3) * 4) + i * ROW_STEP * TILE_K;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
conv2d_implicit_gemm(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ bias,
                     const float* __restrict__ residual, float* __restrict__ y, const Conv2dParams params) {
    extern __shared__ __align__(16) float shared[];
    constexpr int PIXEL_SLICE = TILE_M * TILE_K, FILTER_SLICE = TILE_N * TILE_K, STAGE = PIXEL_SLICE + FILTER_SLICE;

    const int filter_tiles = (params.group_filters + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / filter_tiles * TILE_M;
    const int k0 = blockIdx.x % filter_tiles * TILE_N;
    const int group = blockIdx.y;

    // Lanes in Z-order over the warp's 8×4 threads: every aligned group of 4 lanes shares operands pairwise both ways,
    // which lets the hardware serve a 16-byte read of the whole warp in half the passes of a row-major order.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_m = (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4);
    const int lane_n = (lane >> 1 & 1) | (lane >> 2 & 2);
    const int warp_m = warp / WARPS_N * WARP_M, warp_n = warp % WARPS_N * WARP_N;
    // Thread's pixels: warp_m + lane_m + 8·i. Its filters: warp_n + 4·lane_n + 16·(j/4) + j%4, so that stores are
    // 16 bytes wide and 4 lanes fill 64 contiguous bytes.
    const int thread_m = warp_m + lane_m, thread_n = warp_n + 4 * lane_n;
    // Where the thread's first rows lie. Its other rows lie at a constant distance with a constant XOR of the chunk
    // (swizzled() with the thread's multiples of 8 and 16 taken out), so 4 addresses per operand serve all reads; left
    // to itself the compiler keeps one register per read.
    const int place_m = swizzled(thread_m, 0), place_n = swizzled(thread_n, 0);

    SliceLoader loader(x, filter, params, m0, k0, group);
    const int slices = (params.gemm_k + TILE_K - 1) / TILE_K;
#pragma unroll
    for (int stage = 0; stage < NUM_STAGES - 1; ++stage) {
        if (stage < slices) loader.load(shared + stage * STAGE, shared + stage * STAGE + PIXEL_SLICE);
        copy_async_commit();
    }

    float accumulator[THREAD_M][THREAD_N] = {};
    int read_stage = 0, write_stage = NUM_STAGES - 1;
    for (int slice = 0; slice < slices; ++slice) {
        copy_async_wait<NUM_STAGES - 2>();
        __syncthreads();  // the slice has arrived for all threads, and all are done with the one about to be overwritten
        if (slice + NUM_STAGES - 1 < slices) {
            loader.load(shared + write_stage * STAGE, shared + write_stage * STAGE + PIXEL_SLICE);
        }
        copy_async_commit();

        const float* pixel_slice = shared + read_stage * STAGE;
        const float* filter_slice = pixel_slice + PIXEL_SLICE;
#pragma unroll UNROLL
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int chunk_m = place_m ^ chunk * 4, chunk_n = place_n ^ chunk * 4;
            float4 a[THREAD_M];
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) {
                a[i] = *reinterpret_cast<const float4*>(pixel_slice + (chunk_m ^ i % 4 * 4) + 8 * i * TILE_K);
            }
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) {
                const int row = j / 4 * 16 + j % 4, flip = (j % 4 / 2 ^ j / 4 % 2 * 2) * 4;
                const float4 b = *reinterpret_cast<const float4*>(filter_slice + (chunk_n ^ flip) + row * TILE_K);
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i) accumulator[i][j] = fmaf(a[i].x, b.x, accumulator[i][j]);
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i) accumulator[i][j] = fmaf(a[i].y, b.y, accumulator[i][j]);
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i) accumulator[i][j] = fmaf(a[i].z, b.z, accumulator[i][j]);
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i) accumulator[i][j] = fmaf(a[i].w, b.w, accumulator[i][j]);
            }
        }
        read_stage = read_stage + 1 == NUM_STAGES ? 0 : read_stage + 1;
        write_stage = write_stage + 1 == NUM_STAGES ? 0 : write_stage + 1;
    }

    const Epilogue epilogue{bias, residual, params.relu};
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
        const int m = m0 + thread_m + 8 * i;
        if (m >= params.gemm_m) break;
        const long long row = static_cast<long long>(m) * params.K;
#pragma unroll
        for (int j = 0; j < THREAD_N; j += 4) {
            const int group_k = k0 + thread_n + j * 4;
            const int k = group * params.group_filters + group_k;
            if constexpr (VECTOR == 4) {
                if (group_k >= params.group_filters) continue;
                const float4 v =
                    make_float4(accumulator[i][j], accumulator[i][j + 1], accumulator[i][j + 2], accumulator[i][j + 3]);
                *reinterpret_cast<float4*>(y + row + k) = epilogue(v, k, row + k);
            } else {
#pragma unroll
                for (int jj = 0; jj < 4; ++jj) {
                    if (group_k + jj < params.group_filters) {
                        y[row + k + jj] = epilogue(accumulator[i][j + jj], k + jj, row + k + jj);
                    }
                }
            }
        }
    }
}
