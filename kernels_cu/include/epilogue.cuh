// The epilogue every convolution ends with: y = relu(accumulator + bias[k] + residual[m, k]), any part optional.
//
// It is applied in registers, between the last multiply-add and the only store, so that fused bias, shortcut and ReLU
// cost one extra read (the residual) instead of a pass over the tensor each.
#pragma once

// ReLU that keeps NaN: fmaxf(x, 0) and x > 0 ? x : 0 would both turn it into 0.
__device__ __forceinline__ float relu_of(float x) { return x < 0.0f ? 0.0f : x; }

struct Epilogue {
    const float* bias;      // [K] or null
    const float* residual;  // the output's shape, or null
    int with_relu;

    // The value to store for filter k at element `offset` of the output.
    __device__ __forceinline__ float operator()(float accumulator, int k, long long offset) const {
        if (bias) accumulator += bias[k];
        if (residual) accumulator += residual[offset];
        return with_relu ? relu_of(accumulator) : accumulator;
    }

    // The same for filters k .. k+3; k and offset are multiples of 4.
    __device__ __forceinline__ float4 operator()(float4 accumulator, int k, long long offset) const {
        if (bias) accumulator = add(accumulator, *reinterpret_cast<const float4*>(bias + k));
        if (residual) accumulator = add(accumulator, *reinterpret_cast<const float4*>(residual + offset));
        if (with_relu) {
            accumulator.x = relu_of(accumulator.x);
            accumulator.y = relu_of(accumulator.y);
            accumulator.z = relu_of(accumulator.z);
            accumulator.w = relu_of(accumulator.w);
        }
        return accumulator;
    }

  private:
    static __device__ __forceinline__ float4 add(float4 a, float4 b) {
        return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
};
