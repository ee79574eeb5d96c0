// How the pooled map is cut into the work of blocks. Included by a kernel of a stem on Hopper behind its constants.
#pragma once

#include "stem_params.cuh"

// How the pooled map is cut into units.
struct Units {
    unsigned tiles, stripes, count;  // per row, per image, in all
    int stripe_rows;

    __device__ __forceinline__ Units(const StemParams& params, int stripe_rows) : stripe_rows(stripe_rows) {
        tiles = params.PQ <= POOLED ? 1 : (params.PQ - 1 + POOLED - 2) / (POOLED - 1);
        stripes = (params.PP + stripe_rows - 1) / stripe_rows;
        count = params.N * stripes * tiles;  // below 2^31: a step further does not wrap
    }
};

// What a unit computes of the convolution.
struct Unit {
    int n, column, first, last;  // image, first column of the tile, first and last row

    // The first column is even. Tiles overlap by two: the first pooled column of all but the first tile is left out.
    __device__ __forceinline__ Unit(unsigned number, const Units& units, const StemParams& params) {
        column = static_cast<int>(number % units.tiles) * (PIXELS - 2);
        const int row = static_cast<int>(number / units.tiles % units.stripes) * units.stripe_rows;
        first = max(2 * row - 1, 0);
        last = min(2 * (row + units.stripe_rows) - 1, params.P - 1);
        n = static_cast<int>(number / units.tiles / units.stripes);
    }
    __device__ __forceinline__ int pairs() const { return last - first + PAIRS_READ; }
};

// The pairs of input rows that a block brings, through all its units.
struct Pairs {
    const Units& units;
    const StemParams& params;
    unsigned number = blockIdx.x;            // the next unit
    int n = 0, column = 0, h = 0, left = 0;  // image, first column of the tile, first row; pairs left of the unit

    __device__ __forceinline__ Pairs(const Units& units, const StemParams& params) : units(units), params(params) {}

    __device__ __forceinline__ bool next() {
        h += 2;
        if (left == 0) {
            if (number >= units.count) return false;
            const Unit unit(number, units, params);
            number += gridDim.x;
            n = unit.n, column = unit.column, h = 2 * unit.first - 3, left = unit.pairs();
        }
        --left;
        return true;
    }
};
