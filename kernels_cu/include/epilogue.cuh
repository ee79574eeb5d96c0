// The epilogue every convolution ends with: y = relu(accumulator + bias[k] + residual[m, k]), any part optional.
//
// It is applied in registers, between the last multiply-add and the only store, so that fused bias, shortcut and ReLU
// cost one extra read (the residual) instead of a pass over the tensor each.
#pragma once

#include "element.cuh"

// ReLU that keeps NaN: fmaxf(x, 0) and x > 0 ? x : 0 would both turn it into 0.
__device__ __forceinline__ float relu_of(float x) { return x < 0.0f ? 0.0f : x; }

// ReLU, or nothing, without a branch: least_kept(with_relu) is what `least` is to be.
__device__ __forceinline__ float least_kept(bool with_relu) { return with_relu ? 0.0f : __uint_as_float(0xff800000u); }  // −∞
__device__ __forceinline__ float relu_of(float x, float least) { return x < least ? 0.0f : x; }

// Of fp32 outputs. Loading and finishing are apart, so that whoever has several outputs can have all loads under way before
// the first store: a residual may be the output itself, and so the compiler must not move loads across stores on its own.
struct Epilogue {
    const float* bias;      // [K] or null
    const float* residual;  // the output's shape, or null
    int with_relu;

    // For a single output, all of it: the value to store for filter k at element `offset` of the output.
    __device__ __forceinline__ float operator()(float sum, int k, long long offset) const {
        return finish(sum, load_bias(k), load_residual(offset));
    }

    __device__ __forceinline__ float load_bias(int k) const { return bias ? bias[k] : 0.0f; }
    __device__ __forceinline__ float load_residual(long long offset) const { return residual ? residual[offset] : 0.0f; }

    // The value to store, of what the two above have loaded.
    __device__ __forceinline__ float finish(float sum, float bias_value, float shortcut) const {
        if (bias) sum += bias_value;
        if (residual) sum += shortcut;
        return with_relu ? relu_of(sum) : sum;
    }

    // The same for the first `columns` of 4 neighbours, zeros for the others. WHOLE: columns is 0 or 4, k and offset are
    // multiples of 4, and 16 bytes are moved at once.
    template <bool WHOLE>
    __device__ __forceinline__ void load_bias(float* values, int k, int columns) const {
        load<WHOLE>(values, bias + k, bias ? columns : 0);
    }

    template <bool WHOLE>
    __device__ __forceinline__ void load_residual(float* values, long long offset, int columns) const {
        load<WHOLE>(values, residual + offset, residual ? columns : 0);
    }

    // Stores the first `columns` of 4 outputs at element `offset` of y; WHOLE as above.
    template <bool WHOLE>
    __device__ __forceinline__ void store(float* y, long long offset, int columns, const float* sums, const float* biases,
                                          const float* shortcuts) const {
        float values[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) values[c] = finish(sums[c], biases[c], shortcuts[c]);
        if constexpr (WHOLE) {
            if (columns == 0) return;
            *reinterpret_cast<float4*>(y + offset) = make_float4(values[0], values[1], values[2], values[3]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (c < columns) y[offset + c] = values[c];
            }
        }
    }

  private:
    template <bool WHOLE>
    static __device__ __forceinline__ void load(float* values, const float* source, int columns) {
        if constexpr (WHOLE) {
            const float4 v = columns > 0 ? *reinterpret_cast<const float4*>(source) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) values[c] = c < columns ? source[c] : 0.0f;
        }
    }
};

// The same for 8 neighbouring outputs of one pixel, in the tensor's own element type. Loading the residual and storing are
// apart, so that whoever has several such outputs can have all loads under way before the first store: a residual may be
// the output itself, and so the compiler must not move loads across stores on its own.
template <typename Element>
struct Epilogue8 {
    static constexpr int CHUNKS = 8 / PER_CHUNK<Element>;

    const float* bias;        // [K] or null
    const Element* residual;  // the output's shape, or null
    int with_relu;

    // Filters k .. k + columns − 1; the others' bias is 0.
    __device__ __forceinline__ void load_bias(float (&values)[8], int k, int columns) const {
#pragma unroll
        for (int c = 0; c < 8; ++c) values[c] = bias && c < columns ? bias[k + c] : 0.0f;
    }

    // The first `columns` of 8 residuals at element `offset`, zeros for the others. WHOLE: columns is 0 or 8 and offset a
    // multiple of 8, so that chunks of 16 bytes are moved.
    template <bool WHOLE>
    __device__ __forceinline__ void load_residual(Chunk (&chunks)[CHUNKS], long long offset, int columns) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            chunks[i] = Chunk{};
            if (!residual || columns == 0) continue;
            const Element* const source = residual + offset + i * PER_CHUNK<Element>;
            if constexpr (WHOLE) {
                chunks[i] = load_chunk(source);
            } else {
                float values[PER_CHUNK<Element>];
#pragma unroll
                for (int c = 0; c < PER_CHUNK<Element>; ++c) {
                    values[c] = i * PER_CHUNK<Element> + c < columns ? to_float(source[c]) : 0.0f;
                }
                chunks[i] = pack<Element>(values);
            }
        }
    }

    // Stores the first `columns` of 8 outputs at element `offset` of y; WHOLE as above.
    template <bool WHOLE>
    __device__ __forceinline__ void store(Element* y, long long offset, int columns, const float (&sums)[8],
                                          const float (&bias)[8], const Chunk (&residuals)[CHUNKS]) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            constexpr int SIZE = PER_CHUNK<Element>;
            float values[SIZE];
            unpack<Element>(residuals[i], values);
#pragma unroll
            for (int c = 0; c < SIZE; ++c) values[c] = finish(sums[i * SIZE + c] + bias[i * SIZE + c] + values[c]);
            Element* const target = y + offset + i * SIZE;
            if constexpr (WHOLE) {
                if (columns > 0) store_chunk(target, pack<Element>(values));
            } else {
#pragma unroll
                for (int c = 0; c < SIZE; ++c) {
                    if (i * SIZE + c < columns) target[c] = from_float<Element>(values[c]);
                }
            }
        }
    }

  private:
    __device__ __forceinline__ float finish(float value) const { return with_relu ? relu_of(value) : value; }
};
