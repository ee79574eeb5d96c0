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
// Grid       x: any number of blocks, which take the tiles (7 × 8 pooled pixels of an image) in turn, best as many as are
//            resident at once; y: K / 64. Block 256 threads.
// Shared     SHARED_BYTES, dynamic: the pixels below a tile, 64 filters, the outputs of 256 pixels (those of 64 filters, or
//            of 4 bytes those of 32, twice), bias, mean and std. With floats and 4 channels, and only then, the outputs
//            take the place of the pixels, to fit the 99 KB of the smaller GPUs.
// This rung  The convolution's output, 4 times the pooled map, is never stored: a block computes the 15 × 17 pixels that
//            its 7 × 8 windows touch, 14 % more than its share. Rows of the im2col matrix overlap in shared memory: two
//            neighbouring outputs start 2 · CHANNELS elements apart, which is no multiple of 16 bytes, so fragments are
//            read word by word instead of by ldmatrix; the words of a fragment still lie in different banks.
//            Pixels come in any type and layout, so they pass through registers: a block asks for those of its next tile
//            before it pools the present one, and converts and stores them after, when they have arrived. Filters are
//            fetched once per block. ReLU is left to the pooled quarter: rounding and maximum do not mind which comes
//            first. The zero padding comes after normalisation, as it must.
#include "element.cuh"
#include "normalize.cuh"
#include "stem_params.cuh"
#include "tensor_core.cuh"

#ifndef CHANNELS
#define ELEMENT Half   // of filter and output, and what tensor cores multiply: Half, BFloat16 or float
#define PRODUCTS 1     // TF32 products per fp32 product: 1, or 3 (ELEMENT float only), as in conv2d_mma
#define INPUT float    // of x: unsigned char, float, Half or BFloat16
#define CHANNELS 3     // 1 to 4
#endif

constexpr int R = 7, S = 7, THREADS = 256, TILE_FILTERS = 64;
constexpr int POOLED_ROWS = 7, POOLED_COLUMNS = 8;                                      // of a tile
constexpr int ROWS = 2 * POOLED_ROWS + 1, PIXEL_COLUMNS = 2 * POOLED_COLUMNS + 1;       // of the convolution
constexpr int PIXELS = ROWS * PIXEL_COLUMNS;                                            // 255: one less than 16 · 16
constexpr int ELEMENT_SIZE = static_cast<int>(sizeof(ELEMENT));
constexpr int UNITS = (S * CHANNELS + 7) / 8;                                           // of 8 elements, per filter row
constexpr int DEPTH_UNITS = R * UNITS;
constexpr int UNITS_PER_STEP = 4 / ELEMENT_SIZE;                                        // an mma is 32 bytes deep
constexpr int STEPS = (DEPTH_UNITS + UNITS_PER_STEP - 1) / UNITS_PER_STEP;
constexpr bool AS_TF32 = ELEMENT_SIZE == 4 && PRODUCTS == 1;                            // rounded in shared memory
constexpr int WORDS_PER_UNIT = 8 * ELEMENT_SIZE / 4;
constexpr int PARTS = WORDS_PER_UNIT / 4;                                               // words of a unit that a lane holds
constexpr int MIN_BLOCKS = PRODUCTS == 3 ? 1 : 2;                                       // per multiprocessor
constexpr int UNROLLED_STEPS = ELEMENT_SIZE == 2 ? STEPS : PRODUCTS == 3 ? 2 : 1;       // as many as registers allow
static_assert(PIXELS <= 16 * 16 && THREADS == 8 * 32, "each warp computes two blocks of 16 pixels");

// The patch: pixels and, with CHANNELS channels each, what lies around them up to the reach of the filter. A thread brings
// a pair of neighbouring elements of every ROWS_AT_ONCE-th row, so that columns are the same for all its loads.
constexpr int PATCH_ROWS = 2 * (ROWS - 1) + R;
constexpr int PATCH_COLUMNS = 2 * (PIXEL_COLUMNS - 1) + S;
constexpr int PATCH_PITCH = (2 * (PIXEL_COLUMNS - 1) * CHANNELS + 8 * UNITS + 1) / 2 * 2;  // the last unit may overhang
constexpr int PATCH_PAIRS = PATCH_PITCH / 2;
constexpr int ROWS_AT_ONCE = THREADS / PATCH_PAIRS;
constexpr int LOADS = (PATCH_ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int PATCH_BYTES = (LOADS * ROWS_AT_ONCE * PATCH_PITCH * ELEMENT_SIZE + 15) / 16 * 16;
static_assert(PATCH_PITCH >= PATCH_COLUMNS * CHANNELS, "a patch row must fit");

constexpr int FILTER_CHUNKS = STEPS * 2;                // of 16 bytes, per filter, the last step padded
constexpr int FILTER_PITCH = (FILTER_CHUNKS | 1) * 16;  // odd: the 8 rows of an ldmatrix lie in different banks
constexpr int FILTER_BYTES = TILE_FILTERS * FILTER_PITCH;
constexpr int STORED_CHUNKS = DEPTH_UNITS * 8 * ELEMENT_SIZE / 16;
constexpr int FILTER_LOADS = TILE_FILTERS * FILTER_CHUNKS / THREADS + (TILE_FILTERS * FILTER_CHUNKS % THREADS != 0);

constexpr int TILE_CHUNKS = 8;                                // of 16 bytes, per output
constexpr int TILE_PITCH = (TILE_CHUNKS + 1) * 16;
constexpr int TILE_BYTES = 16 * 16 * TILE_PITCH;
constexpr int PASS_FILTERS = TILE_CHUNKS * PER_CHUNK<ELEMENT>;  // that go through shared memory at a time
constexpr int PASSES = TILE_FILTERS / PASS_FILTERS;
constexpr int VECTORS = TILE_FILTERS + 2 * CHANNELS;  // floats of the bias, of mean and std
static_assert(POOLED_ROWS * POOLED_COLUMNS / 2 * TILE_CHUNKS <= THREADS, "a thread pools two windows");

constexpr bool TILE_OVER_PATCH = ELEMENT_SIZE * CHANNELS == 16;
constexpr int FILTER_OFFSET = TILE_OVER_PATCH ? TILE_BYTES : PATCH_BYTES;
constexpr int TILE_OFFSET = TILE_OVER_PATCH ? 0 : FILTER_OFFSET + FILTER_BYTES;
constexpr int VECTORS_OFFSET = TILE_OVER_PATCH ? FILTER_OFFSET + FILTER_BYTES : TILE_OFFSET + TILE_BYTES;
constexpr int SHARED_BYTES = VECTORS_OFFSET + VECTORS * static_cast<int>(sizeof(float));
static_assert(!TILE_OVER_PATCH || PATCH_BYTES <= TILE_BYTES, "the patch must fit in the outputs' place");
static_assert(SHARED_BYTES <= 99 * 1024, "every GPU with tensor cores must have room");

// The pooled pixels from row p0 and column q0 of image n.
struct Tile {
    int n, p0, q0;

    __device__ __forceinline__ Tile(unsigned number, const StemParams& params) {
        const unsigned columns = (params.PQ + POOLED_COLUMNS - 1) / POOLED_COLUMNS;
        const unsigned rows = (params.PP + POOLED_ROWS - 1) / POOLED_ROWS;
        q0 = static_cast<int>(number % columns) * POOLED_COLUMNS;
        p0 = static_cast<int>(number / columns % rows) * POOLED_ROWS;
        n = static_cast<int>(number / columns / rows);
    }
};

// What this thread brings of a tile's patch: where its first row and its two columns lie in the image.
struct Share {
    int h, w[2], c[2];
    unsigned bottoms[2];  // the row where each column ends, 0 if it lies outside

    __device__ __forceinline__ Share(const Tile& tile, const StemParams& params) {
        int thread = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(thread));  // computed anew for each tile: sums leave no registers for it
        const int top = 2 * (2 * tile.p0 - 1) - 3, left = 2 * (2 * tile.q0 - 1) - 3;  // by both strides and paddings
        h = top + thread / PATCH_PAIRS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int e = thread % PATCH_PAIRS * 2 + i;
            w[i] = left + e / CHANNELS;
            c[i] = e % CHANNELS;
            const bool brought = thread < ROWS_AT_ONCE * PATCH_PAIRS && w[i] >= 0 && w[i] < params.W;
            bottoms[i] = brought ? min(top + PATCH_ROWS, params.H) : 0;
        }
    }
    __device__ __forceinline__ bool in_image(int load, int i) const {
        return static_cast<unsigned>(h + load * ROWS_AT_ONCE) < bottoms[i];  // as unsigned, negative rows are large
    }
};

// Asks for the pixels of a patch; nothing waits for them before store_patch.
__device__ __forceinline__ void fetch_patch(INPUT (&pixels)[LOADS][2], const INPUT* x, const StemParams& params,
                                            const Tile& tile) {
    const Share share(tile, params);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const INPUT* pixel = x + tile.n * params.stride_n + share.h * params.stride_h + share.w[i] * params.stride_w +
                             share.c[i] * params.stride_c;
        asm("" : "+l"(pixel));  // an address from here on: as an index it would be turned into one for each load
        __builtin_assume(__isGlobal(pixel));
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            pixels[load][i] = {};
            if (share.in_image(load, i)) pixels[load][i] = *pixel;
            pixel += ROWS_AT_ONCE * params.stride_h;
        }
    }
}

// Normalises and stores what fetch_patch has brought; zeros outside the image.
__device__ __forceinline__ void store_patch(unsigned char* patch, const INPUT (&pixels)[LOADS][2], const StemParams& params,
                                            const Tile& tile, const float* normalization) {
    if (threadIdx.x >= ROWS_AT_ONCE * PATCH_PAIRS) return;
    const Share share(tile, params);
    float means[2], stds[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        means[i] = normalization ? normalization[share.c[i]] : 0.0f;
        stds[i] = normalization ? normalization[CHANNELS + share.c[i]] : 1.0f;
    }
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const INPUT pixel = pixels[load][i];
            const float value = normalization ? normalized(pixel, means + i, stds + i, 0) : scaled(pixel);
            values[i] = share.in_image(load, i) ? value : 0.0f;
            if constexpr (AS_TF32) values[i] = __uint_as_float(round_to_tf32(__float_as_uint(values[i])));
        }
        const int pair = load * ROWS_AT_ONCE * PATCH_PAIRS + static_cast<int>(threadIdx.x);
        store_pair<ELEMENT>(patch + pair * 2 * ELEMENT_SIZE, values[0], values[1]);
    }
}

__device__ __forceinline__ void load_filter(unsigned char* shared, const ELEMENT* filter) {
    Chunk chunks[FILTER_LOADS];
#pragma unroll
    for (int load = 0; load < FILTER_LOADS; ++load) {
        const int i = load * THREADS + static_cast<int>(threadIdx.x), k = i / FILTER_CHUNKS, chunk = i % FILTER_CHUNKS;
        chunks[load] = Chunk{};
        if (k < TILE_FILTERS && chunk < STORED_CHUNKS) {
            chunks[load] = load_chunk(reinterpret_cast<const Chunk*>(filter) + k * STORED_CHUNKS + chunk);
        }
    }
#pragma unroll
    for (int load = 0; load < FILTER_LOADS; ++load) {
        const int i = load * THREADS + static_cast<int>(threadIdx.x), k = i / FILTER_CHUNKS, chunk = i % FILTER_CHUNKS;
        if constexpr (AS_TF32) round_to_tf32(chunks[load].words);
        if (k < TILE_FILTERS) store_chunk(shared + k * FILTER_PITCH + chunk * 16, chunks[load]);
    }
}

// One of the PARTS words that a lane holds of a unit of an im2col row: elements 2t, 2t + 1, or of 4 bytes 4 · part + t.
// What lies past the 7 · CHANNELS values of a filter row belongs to other pixels, whose NaN must not get in: `mask`.
__device__ __forceinline__ unsigned unit_word(const unsigned* row, int unit, int part, int t, unsigned mask) {
    if (unit >= DEPTH_UNITS) return 0;
    const int in_row = unit % UNITS;
    const unsigned word = row[unit / UNITS * PATCH_PITCH * WORDS_PER_UNIT / 8 + in_row * WORDS_PER_UNIT + part * 4 + t];
    return in_row < UNITS - 1 ? word : word & mask;
}

// The bits of such a word of a filter row's last unit that are its own.
__device__ __forceinline__ unsigned tail_mask(int part, int t) {
    constexpr int LEFT = S * CHANNELS - 8 * (UNITS - 1);  // valid elements of the unit
    if constexpr (ELEMENT_SIZE == 4) return part * 4 + t < LEFT ? ~0u : 0;
    return 2 * t + 1 < LEFT ? ~0u : 2 * t < LEFT ? 0xffffu : 0;
}

// Adds the products of a warp's two blocks of 16 pixels with all filters.
__device__ __forceinline__ void multiply(float (&sums)[2][8][4], const unsigned char* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const unsigned* const patch = reinterpret_cast<const unsigned*>(shared);
    const unsigned filter_row =
        shared_address(shared) + FILTER_OFFSET + (lane % 8 + lane / 16 * 8) * FILTER_PITCH + lane / 8 % 2 * 16;
    int rows[2][2];  // of both blocks: at which word of the patch the im2col rows g and g + 8 begin
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int pixel = min(warp * 32 + i * 8 + g, PIXELS - 1);
        rows[i / 2][i % 2] =
            (pixel / PIXEL_COLUMNS * 2 * PATCH_PITCH + pixel % PIXEL_COLUMNS * 2 * CHANNELS) * WORDS_PER_UNIT / 8;
    }
    unsigned masks[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) masks[part] = tail_mask(part, t);
#pragma unroll(UNROLLED_STEPS)
    for (int step = 0; step < STEPS; ++step) {
        unsigned pixels[2][4], pixels_low[2][4], words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int unit = step * UNITS_PER_STEP + (UNITS_PER_STEP == 2 ? v / 2 : 0);
                const int part = UNITS_PER_STEP == 2 ? 0 : v / 2;
                pixels[i][v] = unit_word(patch + rows[i][v % 2], unit, part, t, masks[part]);
            }
            if constexpr (PRODUCTS == 3) split_tf32(pixels[i], pixels_low[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j % 2 == 0) load_matrices(words, filter_row + j * 8 * FILTER_PITCH + step * 32);
            unsigned filters[2] = {words[j % 2 * 2], words[j % 2 * 2 + 1]}, filters_low[2];
            if constexpr (PRODUCTS == 3) {
                split_tf32(filters, filters_low);
                make_up_for_truncation(filters, filters_low);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (PRODUCTS == 1) {
                    mma<ELEMENT>(sums[i][j], pixels[i], filters);
                } else {
                    float product[4] = {};
                    mma<ELEMENT>(product, pixels_low[i], filters);
                    mma<ELEMENT>(product, pixels[i], filters_low);
                    mma<ELEMENT>(product, pixels[i], filters);
#pragma unroll
                    for (int v = 0; v < 4; ++v) sums[i][j][v] += product[v];
                }
            }
        }
    }
}

// Adds the bias on the way to shared memory, where the pixels lie as rows of the filters of a pass.
__device__ __forceinline__ void store_sums(unsigned char* tile, const float (&sums)[2][8][4], const float* bias, int pass) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < PASS_FILTERS / 8; ++j) {
        const int k = j * 8 + 2 * t;
        const float2 biases = *reinterpret_cast<const float2*>(bias + pass * PASS_FILTERS + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pixel = warp * 32 + i * 8 + g;
            const float* const pair = sums[i / 2][pass * PASS_FILTERS / 8 + j] + i % 2 * 2;
            store_pair<ELEMENT>(tile + pixel * TILE_PITCH + k * ELEMENT_SIZE, pair[0] + biases.x, pair[1] + biases.y);
        }
    }
}

// Two neighbouring windows of one chunk of filters per thread. Where a window reaches out of the map, its centre's row or
// column, which never does, is read again instead.
__device__ __forceinline__ void pool(ELEMENT* y, const unsigned char* outputs, const StemParams& params, const Tile& tile,
                                     int k0) {
    const int chunk = threadIdx.x % TILE_CHUNKS, pair = threadIdx.x / TILE_CHUNKS;
    const int row = pair / (POOLED_COLUMNS / 2), column = pair % (POOLED_COLUMNS / 2) * 2;
    const int p = tile.p0 + row, q = tile.q0 + column;
    if (row >= POOLED_ROWS || p >= params.PP || q >= params.PQ) return;
    const int rows[3] = {p > 0 ? 0 : 1, 1, 2 * p + 1 < params.P ? 2 : 1};
    const int columns[5] = {q > 0 ? 0 : 1, 1, 2 * q + 1 < params.Q ? 2 : 1, 3, 2 * q + 3 < params.Q ? 4 : 3};
    const unsigned char* const corner = outputs + (2 * row * PIXEL_COLUMNS + 2 * column) * TILE_PITCH + chunk * 16;
    Chunk largest[5];  // of each column
#pragma unroll
    for (int s = 0; s < 5; ++s) {
        const auto output = [&](int r) { return load_chunk(corner + (rows[r] * PIXEL_COLUMNS + columns[s]) * TILE_PITCH); };
        largest[s] = larger<ELEMENT>(larger<ELEMENT>(output(0), output(1)), output(2));
    }
    const Chunk left = larger<ELEMENT>(larger<ELEMENT>(largest[0], largest[1]), largest[2]);
    const Chunk right = larger<ELEMENT>(larger<ELEMENT>(largest[2], largest[3]), largest[4]);
    ELEMENT* const target = y + ((static_cast<long long>(tile.n) * params.PP + p) * params.PQ + q) * params.K + k0 +
                            chunk * PER_CHUNK<ELEMENT>;
    store_chunk(target, larger<ELEMENT>(left, Chunk{}));
    if (q + 1 < params.PQ) store_chunk(target + params.K, larger<ELEMENT>(right, Chunk{}));
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_stem(const INPUT* __restrict__ x, const ELEMENT* __restrict__ filter, const float* __restrict__ bias,
                const float* __restrict__ mean, const float* __restrict__ std, ELEMENT* __restrict__ y,
                const StemParams params) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* const outputs = shared + TILE_OFFSET;
    float* const vectors = reinterpret_cast<float*>(shared + VECTORS_OFFSET);
    const float* const normalization = mean ? vectors + TILE_FILTERS : nullptr;
    const unsigned tiles_p = (params.PP + POOLED_ROWS - 1) / POOLED_ROWS;
    const unsigned tiles_q = (params.PQ + POOLED_COLUMNS - 1) / POOLED_COLUMNS;
    const unsigned tiles = params.N * tiles_p * tiles_q;  // below 2^31: a step further does not wrap
    const int k0 = static_cast<int>(blockIdx.y) * TILE_FILTERS;

    unsigned number = blockIdx.x;
    if (number >= tiles) return;
    Tile tile(number, params);
    INPUT pixels[LOADS][2];
    fetch_patch(pixels, x, params, tile);
    load_filter(shared + FILTER_OFFSET, filter + static_cast<long long>(k0) * DEPTH_UNITS * 8);
    if (threadIdx.x < TILE_FILTERS) vectors[threadIdx.x] = bias[k0 + threadIdx.x];
    if (mean && threadIdx.x < CHANNELS) {
        vectors[TILE_FILTERS + threadIdx.x] = mean[threadIdx.x];
        vectors[TILE_FILTERS + CHANNELS + threadIdx.x] = std[threadIdx.x];
    }
    __syncthreads();
    store_patch(shared, pixels, params, tile, normalization);
    __syncthreads();

    while (true) {
        float sums[2][8][4] = {};
        multiply(sums, shared);
#pragma unroll
        for (int pass = 0; pass < PASSES - 1; ++pass) {
            if (pass > 0 || TILE_OVER_PATCH) __syncthreads();
            store_sums(outputs, sums, vectors, pass);
            __syncthreads();
            pool(y, outputs, params, tile, k0 + pass * PASS_FILTERS);
        }
        if (PASSES > 1 || TILE_OVER_PATCH) __syncthreads();
        store_sums(outputs, sums, vectors, PASSES - 1);
        __syncthreads();
        number += gridDim.x;
        const Tile next(number, params);
        if (number < tiles) fetch_patch(pixels, x, params, next);
        pool(y, outputs, params, tile, k0 + (PASSES - 1) * PASS_FILTERS);
        if (number >= tiles) break;
        if (TILE_OVER_PATCH) __syncthreads();
        store_patch(shared, pixels, params, next, normalization);
        __syncthreads();
        tile = next;
    }
}
