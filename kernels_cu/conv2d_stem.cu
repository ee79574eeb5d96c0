// conv2d_stem: the ImageNet stem as one kernel, from pixels to the pooled map, on tensor cores.
// @solves 7×7 convolution of stride 2 on few channels, with normalisation, bias, ReLU and 3×3 max-pool of stride 2
// @arch sm_80
//
// Equation   y = max_pool2d(relu(conv2d(normalised(x), filter, stride 2, padding 3) + bias), 3, stride 2, padding 1),
//            normalised(x) = (x [/ 255 if uint8] − mean) / std in fp32; sums in fp32.
// GEMM view  gemm_m = pixels of a tile, gemm_n = 64 filters, gemm_k = 7 · 8 · UNITS: a filter row's 7 · CHANNELS values,
//            which are neighbours in NHWC, padded to UNITS units of 8 by zeros.
// Layouts    x of any strides (in elements), INPUT; filter K × gemm_k (K a multiple of 64), ELEMENT, zero-padded; bias K,
//            fp32; y N × PP × PQ × K, ELEMENT, where PP × PQ is the pooled size.
// Grid       x: tiles of 7 × 8 pooled pixels × images; y: K / 64. Block 256 threads.
// Shared     max(PATCH_BYTES + 64 · FILTER_PITCH, 255 · TILE_PITCH), dynamic: first pixels and filter, then the outputs.
// This rung  The convolution's output, 4 times the pooled map, is never stored: a block computes the 15 × 17 pixels that
//            its 7 × 8 windows touch, 14 % more than its share. Rows of the im2col matrix overlap in shared memory: two
//            neighbouring outputs start 2 · CHANNELS elements apart, which is no multiple of 16 bytes, so fragments are
//            read word by word instead of by ldmatrix; the words of a fragment still lie in different banks.
//            The zero padding comes after normalisation, as it must.
#include "element.cuh"
#include "epilogue.cuh"
#include "normalize.cuh"
#include "tensor_core.cuh"

#ifndef CHANNELS
#define ELEMENT Half   // of filter and output, and what tensor cores multiply: Half, BFloat16 or float
#define PRODUCTS 1     // TF32 products per fp32 product: 1, or 3 (ELEMENT float only), as in conv2d_mma
#define INPUT float    // of x: unsigned char, float, Half or BFloat16
#define CHANNELS 3     // 1 to 4
#endif

struct StemParams {
    int N, H, W, K;                                          // input (NHWC with CHANNELS) and output channels
    int P, Q, PP, PQ;                                        // size of the convolution's and of the pooled map
    long long stride_n, stride_h, stride_w, stride_c;        // of x, in elements
};

constexpr int R = 7, S = 7, THREADS = 256, TILE_FILTERS = 64;
constexpr int POOLED_ROWS = 7, POOLED_COLUMNS = 8;                                      // of a tile
constexpr int ROWS = 2 * POOLED_ROWS + 1, PIXEL_COLUMNS = 2 * POOLED_COLUMNS + 1;       // of the convolution
constexpr int PIXELS = ROWS * PIXEL_COLUMNS;                                            // 255: one less than 16 · 16
constexpr int UNITS = (S * CHANNELS + 7) / 8;                                           // of 8 elements, per filter row
constexpr int DEPTH_UNITS = R * UNITS;
constexpr int UNITS_PER_STEP = 4 / static_cast<int>(sizeof(ELEMENT));                   // an mma is 32 bytes deep
constexpr int STEPS = (DEPTH_UNITS + UNITS_PER_STEP - 1) / UNITS_PER_STEP;
constexpr int PATCH_ROWS = 2 * (ROWS - 1) + R;
constexpr int PATCH_COLUMNS = 2 * (PIXEL_COLUMNS - 1) + S;
constexpr int PATCH_PITCH = (2 * (PIXEL_COLUMNS - 1) * CHANNELS + 8 * UNITS + 1) / 2 * 2;  // the last unit may overhang
constexpr int PATCH_BYTES = (PATCH_ROWS * PATCH_PITCH * static_cast<int>(sizeof(ELEMENT)) + 15) / 16 * 16;
constexpr int FILTER_CHUNKS = STEPS * 2;                      // of 16 bytes, per filter, the last step padded
constexpr int FILTER_PITCH = (FILTER_CHUNKS | 1) * 16;        // odd: the 8 rows of an ldmatrix lie in different banks
constexpr int STORED_CHUNKS = DEPTH_UNITS * 8 * static_cast<int>(sizeof(ELEMENT)) / 16;
constexpr int TILE_PITCH = TILE_FILTERS * static_cast<int>(sizeof(ELEMENT)) + 16;
constexpr int WORDS_PER_UNIT = 8 * static_cast<int>(sizeof(ELEMENT)) / 4;
static_assert(PIXELS <= 16 * 16 && THREADS == 8 * 32, "each warp computes two blocks of 16 pixels");
static_assert(PATCH_PITCH >= PATCH_COLUMNS * CHANNELS, "a patch row must fit");

// Pixels and, with CHANNELS channels each, what lies around them up to the reach of the filter; zeros outside the image.
__device__ __forceinline__ void load_patch(ELEMENT* patch, const INPUT* x, const StemParams& params, int n, int p0, int q0,
                                           const float* mean, const float* std) {
    const INPUT* const image = x + n * params.stride_n;
    const int h0 = 2 * p0 - 3, w0 = 2 * q0 - 3;
#pragma unroll 4
    for (int i = threadIdx.x; i < PATCH_ROWS * PATCH_PITCH; i += THREADS) {
        const int row = i / PATCH_PITCH, e = i % PATCH_PITCH;
        const int h = h0 + row, w = w0 + e / CHANNELS, c = e % CHANNELS;
        const bool valid = h >= 0 && h < params.H && w >= 0 && w < params.W;
        float value = 0.0f;
        if (valid) value = normalized(image[h * params.stride_h + w * params.stride_w + c * params.stride_c], mean, std, c);
        patch[i] = from_float<ELEMENT>(value);
    }
}

__device__ __forceinline__ void load_filter(unsigned char* shared, const ELEMENT* filter) {
    for (int i = threadIdx.x; i < TILE_FILTERS * FILTER_CHUNKS; i += THREADS) {
        const int k = i / FILTER_CHUNKS, chunk = i % FILTER_CHUNKS;
        Chunk value = {};
        if (chunk < STORED_CHUNKS) value = load_chunk(reinterpret_cast<const Chunk*>(filter) + k * STORED_CHUNKS + chunk);
        store_chunk(shared + k * FILTER_PITCH + chunk * 16, value);
    }
}

// One of the two words that a lane holds of a unit of an im2col row: elements 2t, 2t + 1 (or, of 4 bytes, word `part`).
// What lies past the 7 · CHANNELS values of a filter row belongs to other pixels, whose NaN must not get in.
__device__ __forceinline__ unsigned unit_word(const unsigned* row, int unit, int part, int t) {
    if (unit >= DEPTH_UNITS) return 0;
    const int in_row = unit % UNITS;
    const unsigned word = row[unit / UNITS * PATCH_PITCH * WORDS_PER_UNIT / 8 + in_row * WORDS_PER_UNIT + part * 4 + t];
    if (in_row < UNITS - 1) return word;
    const int left = S * CHANNELS - 8 * in_row;  // valid elements of the unit
    if constexpr (sizeof(ELEMENT) == 4) return part * 4 + t < left ? word : 0;
    return 2 * t + 1 < left ? word : 2 * t < left ? word & 0xffffu : 0;
}

constexpr int MIN_BLOCKS = sizeof(ELEMENT) == 4 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_stem(const INPUT* __restrict__ x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias,
                const float* __restrict__ mean, const float* __restrict__ std, ELEMENT* __restrict__ y,
                const StemParams params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int tiles_q = (params.PQ + POOLED_COLUMNS - 1) / POOLED_COLUMNS;
    const int tiles_p = (params.PP + POOLED_ROWS - 1) / POOLED_ROWS;
    const int pooled_q0 = blockIdx.x % tiles_q * POOLED_COLUMNS;
    const int pooled_p0 = blockIdx.x / tiles_q % tiles_p * POOLED_ROWS;
    const int n = blockIdx.x / tiles_q / tiles_p, k0 = blockIdx.y * TILE_FILTERS;
    const int p0 = 2 * pooled_p0 - 1, q0 = 2 * pooled_q0 - 1;  // first pixel of the convolution; may lie outside

    load_patch(reinterpret_cast<ELEMENT*>(shared), x, params, n, p0, q0, mean, std);
    load_filter(shared + PATCH_BYTES, filter + static_cast<long long>(k0) * DEPTH_UNITS * 8);
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int rows[2][2];  // of two blocks of 16 pixels: at which word of the patch the im2col rows g and g + 8 begin
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int pixel = min(warp * 32 + i * 8 + g, PIXELS - 1);
        rows[i / 2][i % 2] =
            (pixel / PIXEL_COLUMNS * 2 * PATCH_PITCH + pixel % PIXEL_COLUMNS * 2 * CHANNELS) * WORDS_PER_UNIT / 8;
    }
    const unsigned* const patch = reinterpret_cast<const unsigned*>(shared);
    const unsigned filter_row =
        shared_address(shared) + PATCH_BYTES + (lane % 8 + lane / 16 * 8) * FILTER_PITCH + lane / 8 % 2 * 16;
    float sums[2][8][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned filters[8][2], pixels[2][4], pixels_low[2][4];
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            unsigned words[4];
            load_matrices(words, filter_row + j * 8 * FILTER_PITCH + step * 32);
            filters[j][0] = words[0], filters[j][1] = words[1];
            filters[j + 1][0] = words[2], filters[j + 1][1] = words[3];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int unit = step * UNITS_PER_STEP + (UNITS_PER_STEP == 2 ? v / 2 : 0);
                pixels[i][v] = unit_word(patch + rows[i][v % 2], unit, UNITS_PER_STEP == 2 ? 0 : v / 2, t);
            }
            if constexpr (PRODUCTS == 3) split_tf32(pixels[i], pixels_low[i]);
            if constexpr (PRODUCTS == 1 && sizeof(ELEMENT) == 4) round_to_tf32(pixels[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            unsigned filters_low[2];
            if constexpr (PRODUCTS == 3) split_tf32(filters[j], filters_low);
            if constexpr (PRODUCTS == 1 && sizeof(ELEMENT) == 4) round_to_tf32(filters[j]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (PRODUCTS == 1) {
                    mma<ELEMENT>(sums[i][j], pixels[i], filters[j]);
                } else {
                    float product[4] = {};
                    mma<ELEMENT>(product, pixels_low[i], filters[j]);
                    mma<ELEMENT>(product, pixels[i], filters_low);
                    mma<ELEMENT>(product, pixels[i], filters[j]);
#pragma unroll
                    for (int v = 0; v < 4; ++v) sums[i][j][v] += product[v];
                }
            }
        }
    }

    // Bias and ReLU on the way to shared memory, where the pixels lie as rows of 64 filters.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float bias0 = bias[k0 + j * 8 + 2 * t], bias1 = bias[k0 + j * 8 + 2 * t + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pixel = warp * 32 + i * 8 + g;
            if (pixel >= PIXELS) continue;
            const float low = relu_of(sums[i / 2][j][i % 2 * 2] + bias0), high = relu_of(sums[i / 2][j][i % 2 * 2 + 1] + bias1);
            store_pair<ELEMENT>(shared + pixel * TILE_PITCH + (j * 8 + 2 * t) * sizeof(ELEMENT), low, high);
        }
    }
    __syncthreads();

    constexpr int CHUNKS = TILE_FILTERS / PER_CHUNK<ELEMENT>;
    for (int i = threadIdx.x; i < POOLED_ROWS * POOLED_COLUMNS * CHUNKS; i += THREADS) {
        const int chunk = i % CHUNKS, row = i / CHUNKS / POOLED_COLUMNS, column = i / CHUNKS % POOLED_COLUMNS;
        const int pooled_p = pooled_p0 + row, pooled_q = pooled_q0 + column;
        if (pooled_p >= params.PP || pooled_q >= params.PQ) continue;
        const auto pixel = [&](int r, int s) {
            return load_chunk(shared + ((2 * row + r) * PIXEL_COLUMNS + 2 * column + s) * TILE_PITCH + chunk * 16);
        };
        Chunk largest = pixel(1, 1);  // the centre of the window always lies inside
#pragma unroll
        for (int r = 0; r < 3; ++r) {
#pragma unroll
            for (int s = 0; s < 3; ++s) {
                const int p = p0 + 2 * row + r, q = q0 + 2 * column + s;
                if (p >= 0 && p < params.P && q >= 0 && q < params.Q) largest = larger<ELEMENT>(largest, pixel(r, s));
            }
        }
        const long long pooled = (static_cast<long long>(n) * params.PP + pooled_p) * params.PQ + pooled_q;
        store_chunk(y + pooled * params.K + k0 + chunk * PER_CHUNK<ELEMENT>, largest);
    }
}
