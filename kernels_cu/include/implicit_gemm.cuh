// Fetches slices of an im2col matrix that is never stored, and of the filter, in chunks of 16 bytes.
//
// A slice has ROW_BYTES of depth per row. Thread t fetches column t % 8 of rows t / 8, t / 8 + BLOCK_THREADS / 8, …, so that
// 8 threads read 128 neighbouring bytes and a thread tracks a single depth, however many rows. What depends on the row
// lies in shared memory (PixelRow), where it costs no registers.
#pragma once

#include "async_copy.cuh"
#include "conv2d_params.cuh"
#include "element.cuh"

constexpr int ROW_BYTES = 128;
constexpr int COLUMNS = ROW_BYTES / 16;

// Byte offset of a 16-byte column of a row. The XOR spreads the 8 rows that ldmatrix reads together, and the 8 columns
// that a store writes together, over all 32 banks.
__device__ __forceinline__ int swizzled(int row, int column) { return row * ROW_BYTES + ((column ^ row % 8) * 16); }

// Where the filter's first tap meets the input for one row of the matrix product; may lie outside the image.
struct alignas(16) PixelRow {
    long long offset;  // in elements, of the group's first channel
    int h, w;          // far outside for rows past the end

    PixelRow() = default;
    __device__ __forceinline__ PixelRow(const Conv2dParams& params, int m, int group) {
        const bool valid = m < params.gemm_m;
        const OutputPixel pixel = output_pixel(params, valid ? m : 0);
        h = pixel.p * params.stride_h - params.pad_h;
        w = pixel.q * params.stride_w - params.pad_w;
        offset = static_cast<long long>(pixel.n) * params.H * params.W * params.C + (h * params.W + w) * params.C +
                 group * params.group_channels;
        if (!valid) h = -(1 << 30);
    }
};

// Position along the depth: tap (r, s) and channel c.
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

// PER_LOAD: elements per global load; PER_CHUNK (cp.async) where chunks stay within a tap, else 1 (through registers).
template <typename Element, int PER_LOAD, int BLOCK_THREADS>
struct ChunkLoader {
    static constexpr int ROW_STEP = BLOCK_THREADS / COLUMNS;
    static_assert(PER_LOAD == 1 || PER_LOAD == PER_CHUNK<Element>, "elements per load");
    static_assert(ROW_STEP % 8 == 0, "all rows of a thread have the same swizzle");

    const Conv2dParams& params;
    int depth;
    Depth position;

    __device__ __forceinline__ ChunkLoader(const Conv2dParams& params, int first_depth)
        : params(params), depth(first_depth + threadIdx.x % COLUMNS * PER_CHUNK<Element>), position(depth, params) {}

    __device__ __forceinline__ void advance() {
        depth += COLUMNS * PER_CHUNK<Element>;
        position.advance(COLUMNS * PER_CHUNK<Element>, params);
    }

    // Where a slice of pixels comes from: a source for each of a thread's rows, and whether it is read or zeros come instead.
    template <int ROWS>
    struct PixelSources {
        const Element* sources[ROWS / ROW_STEP];
        bool valid[ROWS / ROW_STEP];
    };

    // PER_LOAD > 1: load_pixels in two parts, of which the first reads nothing of x.
    template <int ROWS>
    __device__ __forceinline__ PixelSources<ROWS> pixel_sources(const Element* x, const PixelRow* rows) const {
        PixelSources<ROWS> found;
        const int row0 = threadIdx.x / COLUMNS;
        const int dh = position.r * params.dilation_h, dw = position.s * params.dilation_w;
        const int to_tap = (dh * params.W + dw) * params.C + position.c;
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            const PixelRow row = rows[row0 + i * ROW_STEP];
            found.valid[i] = depth < params.gemm_k && inside(row.h + dh, row.w + dw);
            found.sources[i] = x + row.offset + to_tap;
        }
        return found;
    }

    template <int ROWS>
    static __device__ __forceinline__ void copy_pixels(unsigned char* stage, const PixelSources<ROWS>& from) {
        unsigned char* const destination = stage + swizzled(threadIdx.x / COLUMNS, threadIdx.x % COLUMNS);
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            copy_async<16>(destination + i * ROW_STEP * ROW_BYTES, from.sources[i], from.valid[i]);
        }
    }

    template <int ROWS>
    __device__ __forceinline__ void load_pixels(unsigned char* stage, const Element* x, const PixelRow* rows) const {
        static_assert(ROWS % ROW_STEP == 0, "passes must cover the rows");
        const int row0 = threadIdx.x / COLUMNS;
        unsigned char* const destination = stage + swizzled(row0, threadIdx.x % COLUMNS);
        const int dh = position.r * params.dilation_h, dw = position.s * params.dilation_w;
        const int to_tap = (dh * params.W + dw) * params.C + position.c;
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            const PixelRow row = rows[row0 + i * ROW_STEP];
            unsigned char* const target = destination + i * ROW_STEP * ROW_BYTES;
            if constexpr (PER_LOAD > 1) {
                const bool valid = depth < params.gemm_k && inside(row.h + dh, row.w + dw);
                copy_async<16>(target, x + row.offset + to_tap, valid);
            } else {
                Depth at = position;
                store_gathered(target, [&](int element) {
                    const int h = row.h + at.r * params.dilation_h, w = row.w + at.s * params.dilation_w;
                    const bool valid = depth + element < params.gemm_k && inside(h, w);
                    const int to_element = (at.r * params.dilation_h * params.W + at.s * params.dilation_w) * params.C + at.c;
                    const float value = valid ? to_float(x[row.offset + to_element]) : 0.0f;
                    at.advance(1, params);
                    return value;
                });
            }
        }
    }

    // `left`: rows from the first one on. Those past them repeat the last: what they give is not stored.
    template <int ROWS>
    __device__ __forceinline__ void load_filters(unsigned char* stage, const Element* filter, int left) const {
        static_assert(ROWS % ROW_STEP == 0, "passes must cover the rows");
        const int row0 = threadIdx.x / COLUMNS;
        unsigned char* const destination = stage + swizzled(row0, threadIdx.x % COLUMNS);
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            const int row = min(row0 + i * ROW_STEP, left - 1);
            const Element* const source = filter + row * params.gemm_k + depth;
            unsigned char* const target = destination + i * ROW_STEP * ROW_BYTES;
            if constexpr (PER_LOAD > 1) {
                copy_async<16>(target, source, depth < params.gemm_k);
            } else {
                store_gathered(target, [&](int element) {
                    return depth + element < params.gemm_k ? to_float(source[element]) : 0.0f;
                });
            }
        }
    }

  private:
    __device__ __forceinline__ bool inside(int h, int w) const {
        return static_cast<unsigned>(h) < static_cast<unsigned>(params.H) &&
               static_cast<unsigned>(w) < static_cast<unsigned>(params.W);
    }

    template <typename Value>
    static __device__ __forceinline__ void store_gathered(unsigned char* target, Value value) {
        float values[PER_CHUNK<Element>];
#pragma unroll
        for (int element = 0; element < PER_CHUNK<Element>; ++element) values[element] = value(element);
        store_chunk(target, pack<Element>(values));
    }
};
