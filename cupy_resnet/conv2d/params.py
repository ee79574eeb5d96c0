"""The struct that carries a convolution's description to the kernels, mirrored from `kernels_cu/include`."""

from functools import lru_cache

import numpy as np

from .problem import Conv2dProblem

PARAMS_FIELDS = (
    "N", "H", "W", "C", "K", "R", "S", "P", "Q",
    "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
    "groups", "group_channels", "group_filters", "gemm_m", "gemm_k", "relu",
    "shortcut_channels", "shortcut_stride", "backwards",
)  # fmt: skip
"""Fields of ``Conv2dParams`` in kernels_cu/include/conv2d_params.cuh, in order; all are 32-bit ints."""

PARAMS_DTYPE = np.dtype([(name, np.int32) for name in PARAMS_FIELDS])


def conv2d_params(problem: Conv2dProblem, relu: bool, backwards: bool = False) -> np.ndarray:
    """Returns the problem as a one-element structured array, which CuPy passes to a kernel by value.

    Args:
        problem: the convolution.
        relu: whether the kernel ends with ReLU.
        backwards: whether a kernel whose blocks take tiles in turn begins with the last; others take no notice.
    """
    return _params(problem, relu, backwards)


@lru_cache(maxsize=4096)
def _params(problem: Conv2dProblem, relu: bool, backwards: bool) -> np.ndarray:
    others = {"relu": relu, "backwards": backwards, "group_filters": problem.gemm_n}
    params = np.zeros(1, PARAMS_DTYPE)
    for name in PARAMS_FIELDS:
        params[name] = others[name] if name in others else getattr(problem, name)
    return params
