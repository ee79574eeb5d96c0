// conv2d_wmma: implicit GEMM on tensor cores through the WMMA API. The readable one of the tensor-core kernels.
// @solves 2-D convolution as a matrix product on tensor cores, with the WMMA API (fp16, bf16, TF32; any shape)
// @arch sm_70
// @arch_if ELEMENT=BFloat16 sm_80
// @arch_if ELEMENT=float sm_80
//
// Equation   as conv2d_direct, sums in fp32.
// GEMM view  as conv2d_implicit_gemm: gemm_m = N·P·Q pixels, gemm_n = K/groups filters, gemm_k = R·S·C/groups.
// Layouts    x NHWC, filter KRSC, residual and y NPQK, all ELEMENT; bias K in fp32.
// Grid       x: tiles of filters × tiles of pixels (filters fastest); y: groups.
//            Block 32 · (TILE_M / WARP_M) · (TILE_N / WARP_N) threads.
// Shared     160 · (TILE_M + TILE_N) + 16 · TILE_M bytes.
// Requires   VECTOR > 1: channels per group a multiple of VECTOR, filters and filters per group multiples of 8.
//            BFloat16 and float (TF32): sm_80.
// This rung  against conv2d_implicit_gemm: a warp multiplies, not a thread. Its 32 lanes hold fragments of 16 rows of both
//            operands together; one call does what took each lane up to 128 multiply-adds. Operands stay in shared
//            memory as they come, depth innermost: the API takes the left one by rows and the right one by columns, so
//            nothing is transposed on the way, and padded rows keep banks apart where a swizzle did. Which lane holds
//            which element is the API's secret, and that is its price: the epilogue, which must know its pixel and
//            filter, takes a detour through shared memory, and how fragments are loaded is the compiler's choice
//            (ldmatrix for fp16, but word by word for bf16 and TF32, as of NVRTC 13.0).
#include <mma.h>

#include "conv2d_params.cuh"
#include "element.cuh"
#include "epilogue.cuh"
#include "implicit_gemm.cuh"

#ifndef TILE_M
#define ELEMENT Half    // of input, filter, residual, output: Half, BFloat16 or float
#define TILE_M 128      // pixels per block
#define TILE_N 128      // filters per block
#define WARP_M 64       // pixels per warp
#define WARP_N 32       // filters per warp
#define VECTOR 8        // elements per global load: those of 16 bytes, or 1
#define MIN_BLOCKS 2    // blocks per multiprocessor that registers must allow
#endif

namespace wmma = nvcuda::wmma;

// What the API calls an element in fragments and in memory, the depth of one product, and how a word of shared memory is
// rounded before it.
template <typename Element>
struct Operand {
    static_assert(sizeof(Element) == 0, "tensor cores multiply BFloat16 and float (TF32) on sm_80 and newer only");
};
template <typename Type>
struct TwoByteOperand {
    using InFragment = Type;
    using InMemory = Type;
    static constexpr int DEPTH = 16;
    static __device__ __forceinline__ unsigned rounded(unsigned pair) { return pair; }
};
template <>
struct Operand<Half> : TwoByteOperand<__half> {};
#if __CUDA_ARCH__ >= 800
template <>
struct Operand<BFloat16> : TwoByteOperand<__nv_bfloat16> {};
template <>
struct Operand<float> {
    using InFragment = wmma::precision::tf32;
    using InMemory = float;
    static constexpr int DEPTH = 8;
    static __device__ __forceinline__ unsigned rounded(unsigned bits) {
        return __float_as_uint(wmma::__float_to_tf32(__uint_as_float(bits)));
    }
};
#endif

constexpr int DEPTH = Operand<ELEMENT>::DEPTH;
using InMemory = Operand<ELEMENT>::InMemory;
using PixelFragment = wmma::fragment<wmma::matrix_a, 16, 16, DEPTH, Operand<ELEMENT>::InFragment, wmma::row_major>;
using FilterFragment = wmma::fragment<wmma::matrix_b, 16, 16, DEPTH, Operand<ELEMENT>::InFragment, wmma::col_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, DEPTH, float>;

constexpr int WARPS_M = TILE_M / WARP_M, WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 16;

// A slice holds 64 bytes of depth for each pixel, then for each filter. 16 bytes of padding put neighbouring rows 20
// banks apart, so that 8 of them, which are read together, begin in different groups of 4 banks.
constexpr int TILE_K = 64 / static_cast<int>(sizeof(ELEMENT));
constexpr int PITCH = 80 / static_cast<int>(sizeof(ELEMENT));
constexpr int SLICE = (TILE_M + TILE_N) * PITCH;

// Where the epilogue finds 16 rows of a warp's sums, likewise padded.
constexpr int SUMS_PITCH = WARP_N + 4;
constexpr int SUMS = 16 * SUMS_PITCH;

static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "warps must cover the tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "fragments must cover a warp's tile");
static_assert(256 % WARP_N == 0, "in the epilogue 32 lanes of 8 columns must cover whole rows");
static_assert(VECTOR == 1 || VECTOR == PER_CHUNK<ELEMENT>, "elements per load");
static_assert(WARPS_M * WARPS_N * SUMS * sizeof(float) <= 2 * SLICE * sizeof(ELEMENT), "sums must fit where slices were");

// What one load brings: a chunk or an element.
template <int ELEMENTS>
struct PacketOf {
    using Type = Chunk;
};
template <>
struct PacketOf<1> {
    using Type = ELEMENT;
};
using Packet = PacketOf<VECTOR>::Type;

// Brings slices of both operands to shared memory through registers. A thread loads one column of every ROW_STEP-th row,
// so that it tracks a single depth, however many rows.
struct SliceLoader {
    static constexpr int PACKETS = TILE_K / VECTOR;    // per row
    static constexpr int ROW_STEP = THREADS / PACKETS;
    static constexpr int PIXELS = TILE_M / ROW_STEP;   // pixels this thread loads for
    static constexpr int FILTERS = TILE_N / ROW_STEP;  // filters this thread loads
    static_assert(TILE_M % ROW_STEP == 0 && TILE_N % ROW_STEP == 0, "passes must cover pixels and filters");

    const Conv2dParams& params;
    const ELEMENT *x, *filter;
    const PixelRow* pixel_rows;
    int row, column;    // of this thread's first packet in a slice
    int filter_offset;  // of the first filter this thread loads, at its current depth
    int filters_left;   // filters of the group from that one on
    Depth position;
    Packet pixels[PIXELS], filters[FILTERS];

    // `n0`: the block's first filter in its group.
    __device__ __forceinline__ SliceLoader(const Conv2dParams& params, const ELEMENT* x, const ELEMENT* filter,
                                           const PixelRow* pixel_rows, int n0, int group)
        : params(params),
          x(x),
          filter(filter),
          pixel_rows(pixel_rows),
          row(first_row()),
          column(threadIdx.x % PACKETS * VECTOR),
          filter_offset((group * params.group_filters + n0 + row) * params.gemm_k + column),
          filters_left(params.group_filters - n0 - row),
          position(column, params) {}

    // Reads the next slice into registers; zeros outside the image, past the last filter, and past the depth.
    __device__ __forceinline__ void load() {
        const int dh = position.r * params.dilation_h, dw = position.s * params.dilation_w;
        const int to_tap = (dh * params.W + dw) * params.C + position.c;
        const bool within = position.r < params.R;  // the last slice may reach past the depth
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const PixelRow pixel = pixel_rows[row + i * ROW_STEP];
            const bool valid = within && static_cast<unsigned>(pixel.h + dh) < static_cast<unsigned>(params.H) &&
                               static_cast<unsigned>(pixel.w + dw) < static_cast<unsigned>(params.W);
            pixels[i] = read(x + pixel.offset + to_tap, valid);
        }
#pragma unroll
        for (int i = 0; i < FILTERS; ++i) {
            filters[i] = read(filter + filter_offset + i * ROW_STEP * params.gemm_k, within && i * ROW_STEP < filters_left);
        }
        filter_offset += TILE_K;
        position.advance(TILE_K, params);
    }

    // Writes what load() read.
    __device__ __forceinline__ void store(ELEMENT* slice) const {
        ELEMENT* const destination = slice + row * PITCH + column;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) write(destination + i * ROW_STEP * PITCH, pixels[i]);
#pragma unroll
        for (int i = 0; i < FILTERS; ++i) write(destination + (TILE_M + i * ROW_STEP) * PITCH, filters[i]);
    }

  private:
    // Chunks are stored by 8 threads, thus to 2 rows, at a time: rows 4 apart fill all banks, neighbours would share some.
    static __device__ __forceinline__ int first_row() {
        const int row = threadIdx.x / PACKETS;
        return VECTOR == 1 ? row : row / 8 * 8 + row % 2 * 4 + row / 2 % 4;
    }

    static __device__ __forceinline__ Packet read(const ELEMENT* source, bool valid) {
        return valid ? *reinterpret_cast<const Packet*>(source) : Packet{};
    }

    // Rounds here: load() would have to wait for its values, and after load_matrix_sync, where the API's manual does it,
    // every warp that reads a value would round it again.
    static __device__ __forceinline__ void write(ELEMENT* destination, Packet packet) {
        unsigned* const words = reinterpret_cast<unsigned*>(&packet);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Packet) / 4); ++i) words[i] = Operand<ELEMENT>::rounded(words[i]);
        *reinterpret_cast<Packet*>(destination) = packet;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_wmma(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias,
                const ELEMENT* residual, ELEMENT* y, const Conv2dParams params) {
    __shared__ __align__(128) ELEMENT slices[2][SLICE];
    __shared__ PixelRow pixel_rows[TILE_M];

    const int filter_tiles = (params.group_filters + TILE_N - 1) / TILE_N;
    const int m0 = blockIdx.x / filter_tiles * TILE_M;
    const int n0 = blockIdx.x % filter_tiles * TILE_N;
    const int group = blockIdx.y;
    for (int i = threadIdx.x; i < TILE_M; i += THREADS) pixel_rows[i] = PixelRow(params, m0 + i, group);
    __syncthreads();

    SliceLoader loader(params, x, filter, pixel_rows, n0, group);
    loader.load();
    loader.store(slices[0]);
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp / WARPS_N * WARP_M, warp_n = warp % WARPS_N * WARP_N;
    Accumulator sums[FRAGMENTS_M][FRAGMENTS_N];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) wmma::fill_fragment(sums[i][j], 0.0f);
    }

    const int slice_count = (params.gemm_k + TILE_K - 1) / TILE_K;
    for (int slice = 0; slice < slice_count; ++slice) {
        const bool more = slice + 1 < slice_count;
        if (more) loader.load();  // arrives while this slice is multiplied

        const InMemory* const operands = reinterpret_cast<const InMemory*>(slices[slice % 2]);
#pragma unroll
        for (int k = 0; k < TILE_K; k += DEPTH) {
            FilterFragment filters[FRAGMENTS_N];
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j) {
                wmma::load_matrix_sync(filters[j], operands + (TILE_M + warp_n + j * 16) * PITCH + k, PITCH);
            }
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                PixelFragment pixels;
                wmma::load_matrix_sync(pixels, operands + (warp_m + i * 16) * PITCH + k, PITCH);
#pragma unroll
                for (int j = 0; j < FRAGMENTS_N; ++j) wmma::mma_sync(sums[i][j], pixels, filters[j], sums[i][j]);
            }
        }
        if (more) loader.store(slices[(slice + 1) % 2]);
        __syncthreads();
    }

    // Each warp passes its sums, 16 rows at a time, through a place of its own; a lane takes 8 neighbouring filters.
    constexpr int LANES_PER_ROW = WARP_N / 8, ROWS_PER_PASS = 32 / LANES_PER_ROW;
    float* const warp_sums = reinterpret_cast<float*>(slices[0]) + warp * SUMS;
    const int column = lane % LANES_PER_ROW * 8;
    const int group_k = n0 + warp_n + column;
    const int k = group * params.group_filters + group_k;
    const int columns = min(max(params.group_filters - group_k, 0), 8);
    const Epilogue8<ELEMENT> epilogue{bias, residual, params.relu};
    float bias_values[8];
    epilogue.load_bias(bias_values, k, columns);
    constexpr bool WHOLE = VECTOR > 1;
    constexpr int PASSES = 16 / ROWS_PER_PASS;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
        const int first_row = m0 + warp_m + i * 16 + lane / LANES_PER_ROW;
        Chunk residuals[PASSES][Epilogue8<ELEMENT>::CHUNKS];  // all under way before the first store
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int m = min(first_row + pass * ROWS_PER_PASS, params.gemm_m - 1);
            epilogue.load_residual<WHOLE>(residuals[pass], static_cast<long long>(m) * params.K + k, columns);
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) {
            wmma::store_matrix_sync(warp_sums + j * 16, sums[i][j], SUMS_PITCH, wmma::mem_row_major);
        }
        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int row = pass * ROWS_PER_PASS + lane / LANES_PER_ROW, m = first_row + pass * ROWS_PER_PASS;
            if (m >= params.gemm_m) continue;
            float values[8];
#pragma unroll
            for (int v = 0; v < 8; ++v) values[v] = warp_sums[row * SUMS_PITCH + column + v];
            epilogue.store<WHOLE>(y, static_cast<long long>(m) * params.K + k, columns, values, bias_values, residuals[pass]);
        }
        __syncwarp();  // before the next 16 rows take the place
    }
}
