// What two blocks of a cluster tell each other beside `cluster.cuh`: copies from shared memory to shared memory, and arrivals
// at each other's barriers (PTX ISA, cp.async.bulk and mbarrier.arrive).
#pragma once

#include "cluster.cuh"

// Begins to copy what written_for_storing() has made visible; both addresses and `bytes` are multiples of 16. The other block's
// barrier is told when all is there, and so does not tell this one: until the other says so, `source` may still be read.
__device__ __forceinline__ void copy_to_block(unsigned destination, unsigned source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination), "r"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Of one thread: that it has read what it has waited for. The order that an arrival has by default is enough for that; with
// `.release.cluster` it would first wait until all that was written has reached the whole GPU.
__device__ __forceinline__ void arrive_in_block(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
