// The tensor memory accelerator: one thread asks for whole boxes of a tensor, the hardware computes addresses, swizzles,
// fills zeros outside of the tensor, and tells a barrier in shared memory how many bytes have come (PTX ISA,
// cp.async.bulk.tensor and mbarrier).
//
// A tensor map describes a tensor and its boxes; the host encodes it (cupy_resnet/conv2d/tensor_maps.py) and passes it as a
// __grid_constant__ parameter.
#pragma once

#include "shared_address.cuh"

struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// A barrier completes a phase when `count` arrivals and all expected bytes have come; phases alternate in parity.
__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes the initialised barriers known to the accelerator.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and has the phase wait for `bytes` more.
__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity is complete. It must be the present one or the one before.
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
    asm volatile(
        "{ .reg .pred complete;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@!complete bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// A place in a ring of stages, and the parity of the phase of its barriers that is next.
struct Place {
    int stage, parity;

    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void advance(int count, int stages) {
        stage += count;
        while (stage >= stages) stage -= stages, parity ^= 1;
    }
};

// Brings a map to where the accelerator will look for it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Fetches a column of output pixels' inputs at one tap: the pixels whose windows begin at (n, h, w) and after, in the order
// of the output, each displaced by (r, s), and their channels from c on.
__device__ __forceinline__ void fetch_im2col(unsigned destination, const TensorMap& map, unsigned barrier, int c, int w, int h,
                                             int n, int s, int r) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2], "
        "{%7, %8};" ::"r"(destination), "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n),
        "h"(static_cast<unsigned short>(s)), "h"(static_cast<unsigned short>(r)) : "memory");
}
// Fetches a box of a matrix.
__device__ __forceinline__ void fetch_box(unsigned destination, const TensorMap& map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            destination), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// Fetches a box of an NHWC tensor; what lies outside of the tensor comes as zeros.
__device__ __forceinline__ void fetch_box(unsigned destination, const TensorMap& map, unsigned barrier, int c, int w, int h, int n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            destination), "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n) : "memory");
}
// Fetches bytes that lie one after the other, no tensor: addresses and count are multiples of 16.
__device__ __forceinline__ void fetch_bytes(unsigned destination, const void* source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier) : "memory");
}
// Brings a box of a matrix to L2.
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row) : "memory");
}
// The same for an NHWC tensor.
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int c, int w, int h, int n) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c), "r"(w), "r"(h),
                 "r"(n) : "memory");
}
// Begins to store a box of a matrix; what lies outside is left out. `written_for_storing` must have been called by whoever
// wrote the source.
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(source),
                 "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int c, int w, int h, int n) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(source),
                 "r"(c), "r"(w), "r"(h), "r"(n) : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all that this thread has begun to store, but for the PENDING newest groups, is read, so that its source may be
// overwritten.
template <int PENDING = 0>
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Makes this thread's ordinary writes to shared memory visible to the accelerator.
__device__ __forceinline__ void written_for_storing() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where threads find elements k, k + 1 of a row of a matrix in its boxes, which lie one after the other, BOX_BYTES each, or in a
// single box. Rows of a box are 128 bytes, and so is the swizzle: chunk c, of 16 bytes, of row r lies at place c ^ (r % 8).
template <typename Element, int BOX_BYTES = 0>
__device__ __forceinline__ void* staged_pair(unsigned char* boxes, int row, int k) {
    constexpr int SIZE = sizeof(Element), PER_CHUNK = 16 / SIZE, PER_ROW = 128 / SIZE;
    const int chunk = (BOX_BYTES > 0 ? k % PER_ROW : k) / PER_CHUNK ^ row % 8;
    return boxes + k / PER_ROW * BOX_BYTES + row * 128 + chunk * 16 + k % PER_CHUNK * SIZE;
}
