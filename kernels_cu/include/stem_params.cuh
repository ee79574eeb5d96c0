// The struct that describes an ImageNet stem; cupy_resnet/conv2d/stem.py mirrors it.
#pragma once

struct StemParams {
    int N, H, W, K;                                          // input (NHWC with CHANNELS) and output channels
    int P, Q, PP, PQ;                                        // size of the convolution's and of the pooled map
    long long stride_n, stride_h, stride_w, stride_c;        // of x, in elements
};
