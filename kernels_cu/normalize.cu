// normalize: pixels that already lie NHWC, as image decoders leave them; with neither mean nor std, a conversion.
// @solves normalisation and conversion of NHWC pixels
// @arch sm_70
//
// Equation   y[..., c] = (scale(x[..., c]) − mean[c]) / std[c];  scale(u) = u / 255 for uint8, u for floats.
//            Rounded to fp32 after each step, then to ELEMENT. mean and std may be null.
// Layouts    x INPUT, y ELEMENT: NHWC, `size` elements; mean, std: C, fp32.
// Grid       grid-stride over elements.
// Bound      memory.
#include "elementwise.cuh"
#include "normalize.cuh"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef INPUT
#define INPUT float  // or unsigned char, Half, BFloat16
#endif

extern "C" __global__ void __launch_bounds__(256)
normalize(const INPUT* __restrict__ x, ELEMENT* __restrict__ y, const float* __restrict__ mean,
          const float* __restrict__ std, long long size, int C) {
    for (long long i = first_index(); i < size; i += index_step()) {
        y[i] = from_float<ELEMENT>(normalized(x[i], mean, std, static_cast<int>(i % C)));
    }
}
