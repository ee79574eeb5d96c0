// From a pixel to the network's input, rounded after each step as torchvision's ToTensor and Normalize do: no fused
// multiply-add, a true division.
#pragma once

#include "element.cuh"

template <typename Input>
__device__ __forceinline__ float scaled(Input v) {
    return to_float(v);
}
__device__ __forceinline__ float scaled(unsigned char v) { return __fdiv_rn(static_cast<float>(v), 255.0f); }

template <typename Input>
__device__ __forceinline__ float normalized(Input v, const float* mean, const float* std, int c) {
    const float value = scaled(v);
    return mean ? __fdiv_rn(__fsub_rn(value, mean[c]), std[c]) : value;
}
