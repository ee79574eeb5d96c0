"""What GPU tests compare with: convolution by taps in float64, and numbers in each precision's storage."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_resnet.conv2d import PRECISIONS, VARIANTS, Conv2dProblem

PAIRS = [(name, precision) for name, variant in VARIANTS.items() for precision in variant.precisions]
"""(variant, precision): each kernel in each arithmetic that it knows."""

EXACT_UP_TO = {"fp32": 2**24, "fp32-tc": 2**24, "tf32": 2**24, "fp16": 2**11, "bf16": 2**8}
"""Up to here every integer is a number of the output's type, so that not even an error of one is rounded away."""


def conv2d_float64(problem: Conv2dProblem, x: Any, weight: Any) -> Any:
    """The convolution by taps: one matrix product per filter position, none of our kernels.

    Args:
        problem: its precision does not matter.
        x, weight: NHWC and KRSC, CuPy arrays of floats.

    Returns:
        NPQK in float64, without epilogue.
    """
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


def stored(values: Any, precision: str) -> Any:
    """Floats (CuPy) rounded to nearest even as a precision's tensors hold them; NaN stays NaN.

    From float64 to bfloat16 by way of float32, as kernels do, whose sums are float32.
    """
    import cupy

    if precision != "bf16":
        return values.astype(PRECISIONS[precision].storage)
    bits = cupy.ascontiguousarray(values, dtype=cupy.float32).view(cupy.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(cupy.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return cupy.where(nan, np.uint16(0x7FFF), rounded)


def loaded(array: Any) -> Any:
    """What `stored` holds, as float32 (CuPy), exactly; uint16 is bfloat16."""
    import cupy

    if array.dtype == np.uint16:
        return (array.astype(cupy.uint32) << np.uint32(16)).view(cupy.float32)
    return array.astype(cupy.float32)


def to_tf32(values: Any) -> Any:
    """float32 (CuPy) rounded to the nearest TF32, ties away from zero, as the kernels round their operands."""
    import cupy

    bits = values.astype(cupy.float32).view(cupy.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(cupy.float32)


def poisoned(shape: tuple[int, ...], precision: str) -> Any:
    """A CuPy array in a precision's storage that holds nothing but NaN."""
    import cupy

    storage = PRECISIONS[precision].storage
    size = int(np.prod(shape, dtype=np.int64)) * storage.itemsize
    return cupy.full(size, 0xFF, cupy.uint8).view(storage).reshape(shape)


@contextlib.contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Whether torch's fp32 convolutions and products may use TF32."""
    import torch

    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def as_torch(array: Any) -> Any:
    """A CuPy array in a precision's storage as a torch tensor on the CPU; uint16 becomes bfloat16."""
    import cupy
    import torch

    if array.dtype == np.uint16:
        return torch.from_numpy(cupy.asnumpy(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(cupy.asnumpy(array))


@dataclass(frozen=True)
class IntegerCase:
    """Small integers on the GPU as float32, and the convolution without epilogue, exact as float32."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    exact: Any

    def expected(self, *, bias: bool, residual: bool, relu: bool) -> Any:
        """The result with an epilogue."""
        import cupy

        y = self.exact + self.bias if bias else self.exact
        y = y + self.residual if residual else y
        return cupy.maximum(y, 0) if relu else y


def integer_case(problem: Conv2dProblem, bound: int, seed: int = 0) -> IntegerCase:
    """Draws pixels and bias in −2 … 2 and filters in −1 … 1 such that no result exceeds `bound`.

    Pixels are made sparser until that holds: deep sums would leave the integers of a short type.
    """
    import cupy

    random = cupy.random.RandomState(seed)

    def draw(shape: tuple[int, ...], limit: int) -> Any:
        return random.randint(-limit, limit + 1, shape).astype(cupy.float32)

    x, weight = draw(problem.input_shape, 2), draw(problem.filter_shape, 1)
    bias, residual = draw((problem.K,), 2), draw(problem.output_shape, 2)
    while True:
        exact = conv2d_float64(problem, x, weight).astype(cupy.float32)
        if not exact.size or float(abs(exact).max()) + 4 <= bound:
            return IntegerCase(x, weight, bias, residual, exact)
        x *= random.randint(0, 2, problem.input_shape).astype(cupy.float32)
