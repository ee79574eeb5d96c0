// Whose turn a tile is: how the blocks of a persistent kernel share the tiles of a convolution.
#pragma once

// The tiles, of `count` in all, that a block takes in turn: every gridDim.x-th, from the first one on, or backwards from the last.
// Kernels that follow each other begin at opposite ends: what one has stored last is in L2 still when the next reads it first.
struct Turns {
    int count, first, step;

    __device__ __forceinline__ Turns(int count, bool backwards)
        : count(count),
          first(backwards ? count - 1 - static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x)),
          step(backwards ? -static_cast<int>(gridDim.x) : static_cast<int>(gridDim.x)) {}
    __device__ __forceinline__ bool have(int tile) const { return static_cast<unsigned>(tile) < static_cast<unsigned>(count); }
};
