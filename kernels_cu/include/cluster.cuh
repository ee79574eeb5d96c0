// Clusters (sm_90 and newer): blocks that run at the same time, close to each other, and that reach each other's shared
// memory (PTX ISA, barrier.cluster and mapa).
//
// The barrier is one of all threads of a cluster, in two halves: each thread arrives, does something else, and waits until
// all have arrived. Whole warps call these together, as __syncthreads.
#pragma once

// With nothing to make visible: to know that all blocks have begun, before which theirs may not be written to.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where the block of this rank has what is at `address` of one's own shared memory.
__device__ __forceinline__ unsigned address_in_block(unsigned address, int rank) {
    unsigned result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
    return result;
}

// Writes 8 bytes, and tells a barrier (tensor_memory.cuh) of the block that has the address, which may expect them.
__device__ __forceinline__ void store_in_cluster(unsigned address, float first, float second, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "f"(first), "f"(second), "r"(barrier) : "memory");
}
