// The loop shared by kernels that treat every element alike, in 64-bit indices.
#pragma once

__device__ __forceinline__ long long first_index() {
    return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ long long index_step() { return static_cast<long long>(gridDim.x) * blockDim.x; }

// Four elements at a time where a kernel is bound by memory: 16-byte accesses.
__device__ __forceinline__ float4 load4(const float* source) { return *reinterpret_cast<const float4*>(source); }
__device__ __forceinline__ void store4(float* destination, float4 v) { *reinterpret_cast<float4*>(destination) = v; }
