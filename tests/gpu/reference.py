"""The convolution by taps on the GPU in float64: one matrix product per filter position, none of our kernels."""

from typing import Any

from cupy_resnet.conv2d import Conv2dProblem


def conv2d_float64(problem: Conv2dProblem, x: Any, weight: Any) -> Any:
    """x NHWC, weight KRSC (CuPy) to NPQK in float64, without epilogue."""
    import cupy

    p = problem
    pads = ((0, 0), (p.pad_h, p.pad_h), (p.pad_w, p.pad_w), (0, 0))
    padded = cupy.pad(x, pads)
    y = cupy.zeros((p.groups, p.gemm_m, p.gemm_n), cupy.float64)
    for r in range(p.R):
        for s in range(p.S):
            h, w = r * p.dilation_h, s * p.dilation_w
            rows = slice(h, h + (p.P - 1) * p.stride_h + 1, p.stride_h)
            columns = slice(w, w + (p.Q - 1) * p.stride_w + 1, p.stride_w)
            tap = padded[:, rows, columns].reshape(p.gemm_m, p.groups, p.group_channels).transpose(1, 0, 2)
            filters = weight[:, r, s].reshape(p.groups, p.gemm_n, p.group_channels).transpose(0, 2, 1)
            y += cupy.matmul(tap.astype(cupy.float64), filters.astype(cupy.float64))
    return y.transpose(1, 0, 2).reshape(p.output_shape)
