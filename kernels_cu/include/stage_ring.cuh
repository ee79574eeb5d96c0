// A ring of stages in shared memory that one thread has filled by the tensor memory accelerator, and several read.
#pragma once

#include "tensor_memory.cuh"

// Of each stage: what was asked for has come; all readers have given it back.
template <int STAGES>
struct Ring {
    unsigned long long full[STAGES], empty[STAGES];
};

template <int STAGES>
__device__ __forceinline__ void init(Ring<STAGES>& ring, int readers) {
    for (int stage = 0; stage < STAGES; ++stage) {
        barrier_init(shared_address(&ring.full[stage]), 1);
        barrier_init(shared_address(&ring.empty[stage]), readers);
    }
}
// Waits until a stage is free and announces what will fill it; returns the barrier that this is to be reported to.
template <int STAGES>
__device__ __forceinline__ unsigned claim(Ring<STAGES>& ring, const Place& place, int bytes) {
    const unsigned full = shared_address(&ring.full[place.stage]);
    barrier_wait(shared_address(&ring.empty[place.stage]), place.parity);
    barrier_arrive_expecting(full, bytes);
    return full;
}
template <int STAGES>
__device__ __forceinline__ void wait_until_full(Ring<STAGES>& ring, const Place& place) {
    barrier_wait(shared_address(&ring.full[place.stage]), place.parity);
}
template <int STAGES>
__device__ __forceinline__ void release(Ring<STAGES>& ring, int stage) {
    barrier_arrive(shared_address(&ring.empty[stage]));
}
