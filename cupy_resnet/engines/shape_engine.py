"""An engine that carries only shapes and records what would run: the basis of ``explain()``. Computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..conv2d.problem import Conv2dProblem
from . import checks
from .base import Pair

ITEMSIZE = 4


@dataclass(frozen=True)
class ShapeArray:
    """Stands for a float32 array.

    Args:
        shape: as of the array.
        layer: for weights, the name of the layer they belong to.
    """

    shape: tuple[int, ...]
    layer: str | None = None

    @property
    def nbytes(self) -> int:
        return _size(self.shape) * ITEMSIZE


@dataclass(frozen=True, kw_only=True)
class OpRecord:
    """One operation of a forward pass.

    Args:
        op: name in `base.Ops`.
        layer: parameter key prefix of the weights it uses, or None.
        output_shape: of its result.
        flops: floating-point operations, a multiply-add counted as two.
        nbytes: the fewest bytes to move: every input and the output once.
        problem: for a convolution, its description.
        epilogue: what is fused behind a convolution, of ``"bias"``, ``"residual"``, ``"relu"``.
    """

    op: str
    layer: str | None
    output_shape: tuple[int, ...]
    flops: int
    nbytes: int
    problem: Conv2dProblem | None = None
    epilogue: tuple[str, ...] = ()


class ShapeEngine:
    """Implements `base.Ops` on `ShapeArray`; `records` grows by one `OpRecord` per call.

    Not for several threads at once: an instance serves one walk through a graph.
    """

    name = "shapes"

    def __init__(self) -> None:
        self.records: list[OpRecord] = []

    def asarray(self, x: Any) -> ShapeArray:
        """Returns a ShapeArray of x's shape."""
        return x if isinstance(x, ShapeArray) else ShapeArray(tuple(x.shape))

    def to_numpy(self, x: ShapeArray) -> Any:
        """Raises TypeError: there are no values."""
        raise TypeError(f"ShapeEngine holds shapes, not values; this one is {x.shape}")

    def filter(self, weight: Any) -> ShapeArray:
        """Returns a ShapeArray of a (K, R, S, C/groups) filter."""
        checks.rank("filter", "weight", tuple(weight.shape), "(K, R, S, C/groups)")
        return self.asarray(weight)

    def nchw_to_nhwc(
        self, x: ShapeArray, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> ShapeArray:
        """(N, C, H, W) to (N, H, W, C)."""
        checks.rank("nchw_to_nhwc", "x", x.shape, "(N, C, H, W)")
        N, C, H, W = x.shape
        normalized = checks.normalization("nchw_to_nhwc", C, mean, std) is not None
        return self._record("nchw_to_nhwc", (N, H, W, C), x, flops_per_element=2 * normalized)

    def nhwc_to_nchw(self, x: ShapeArray) -> ShapeArray:
        """(N, H, W, C) to (N, C, H, W)."""
        checks.rank("nhwc_to_nchw", "x", x.shape, "(N, H, W, C)")
        N, H, W, C = x.shape
        return self._record("nhwc_to_nchw", (N, C, H, W), x, flops_per_element=0)

    def normalize(self, x: ShapeArray, mean: Sequence[float], std: Sequence[float]) -> ShapeArray:
        """(N, H, W, C) to the same shape."""
        checks.rank("normalize", "x", x.shape, "(N, H, W, C)")
        checks.normalization("normalize", x.shape[-1], mean, std)
        return self._record("normalize", x.shape, x, flops_per_element=2)

    def conv2d(
        self,
        x: ShapeArray,
        weight: ShapeArray,
        bias: ShapeArray | None = None,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: ShapeArray | None = None,
        relu: bool = False,
    ) -> ShapeArray:
        """(N, H, W, C), (K, R, S, C/groups) to (N, P, Q, K)."""
        problem = checks.conv2d_problem(
            x.shape,
            weight.shape,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            residual_shape=None if residual is None else residual.shape,
            bias_shape=None if bias is None else bias.shape,
        )
        fused = {"bias": bias is not None, "residual": residual is not None, "relu": relu}
        epilogue = tuple(name for name, present in fused.items() if present)
        extra = sum(array.nbytes for array in (bias, residual) if array is not None)
        self.records.append(
            OpRecord(
                op="conv2d",
                layer=weight.layer,
                output_shape=problem.output_shape,
                flops=problem.flops + len(epilogue) * _size(problem.output_shape),
                nbytes=problem.bytes + extra,
                problem=problem,
                epilogue=epilogue,
            )
        )
        return ShapeArray(problem.output_shape)

    def batch_norm2d(
        self,
        x: ShapeArray,
        weight: ShapeArray,
        bias: ShapeArray,
        running_mean: ShapeArray,
        running_var: ShapeArray,
        *,
        eps: float = 1e-5,
    ) -> ShapeArray:
        """(N, H, W, C) to the same shape."""
        checks.rank("batch_norm2d", "x", x.shape, "(N, H, W, C)")
        checks.vectors(
            "batch_norm2d",
            x.shape[-1],
            weight=weight.shape,
            bias=bias.shape,
            running_mean=running_mean.shape,
            running_var=running_var.shape,
        )
        return self._record("batch_norm2d", x.shape, x, weight, bias, running_mean, running_var, flops_per_element=3)

    def relu(self, x: ShapeArray) -> ShapeArray:
        """Any shape to itself."""
        return self._record("relu", x.shape, x)

    def add(self, x: ShapeArray, y: ShapeArray) -> ShapeArray:
        """Two equal shapes to the same."""
        checks.same_shape("add", x.shape, y.shape)
        return self._record("add", x.shape, x, y)

    def add_relu(self, x: ShapeArray, y: ShapeArray) -> ShapeArray:
        """Two equal shapes to the same."""
        checks.same_shape("add_relu", x.shape, y.shape)
        return self._record("add_relu", x.shape, x, y, flops_per_element=2)

    def max_pool2d(self, x: ShapeArray, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> ShapeArray:
        """(N, H, W, C) to (N, P, Q, C)."""
        return self._pool("max_pool2d", x, kernel_size, stride, padding)

    def avg_pool2d(
        self,
        x: ShapeArray,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        count_include_pad: bool = True,
    ) -> ShapeArray:
        """(N, H, W, C) to (N, P, Q, C)."""
        return self._pool("avg_pool2d", x, kernel_size, stride, padding)

    def global_avg_pool2d(self, x: ShapeArray) -> ShapeArray:
        """(N, H, W, C) to (N, C)."""
        checks.global_avg_pool2d(x.shape)
        N, H, W, C = x.shape
        return self._record("global_avg_pool2d", (N, C), x, flops_per_element=H * W)

    def linear(self, x: ShapeArray, weight: ShapeArray, bias: ShapeArray | None = None) -> ShapeArray:
        """(N, C), (K, C) to (N, K)."""
        N, C, K = checks.linear(x.shape, weight.shape, None if bias is None else bias.shape)
        inputs = [array for array in (x, weight, bias) if array is not None]
        return self._record("linear", (N, K), *inputs, flops_per_element=2 * C + (bias is not None))

    def softmax(self, x: ShapeArray) -> ShapeArray:
        """(N, K) to the same shape."""
        checks.rank("softmax", "x", x.shape, "(N, K)")
        return self._record("softmax", x.shape, x, flops_per_element=4)

    def pad_channels(self, x: ShapeArray, before: int, after: int, *, stride: int = 1) -> ShapeArray:
        """(N, H, W, C) to (N, ceil(H/stride), ceil(W/stride), before + C + after)."""
        shape = checks.pad_channels(x.shape, before, after, stride)
        return self._record("pad_channels", shape, x, flops_per_element=0)

    def _pool(self, op: str, x: ShapeArray, kernel_size: Pair, stride: Pair | None, padding: Pair) -> ShapeArray:
        pool = checks.pool2d(x.shape, kernel_size, stride, padding, op=op)
        shape = (x.shape[0], pool.P, pool.Q, x.shape[3])
        return self._record(op, shape, x, flops_per_element=pool.kernel[0] * pool.kernel[1])

    def _record(self, op: str, shape: tuple[int, ...], *inputs: ShapeArray, flops_per_element: int = 1) -> ShapeArray:
        output = ShapeArray(shape)
        layer = next((array.layer for array in inputs if array.layer is not None), None)
        self.records.append(
            OpRecord(
                op=op,
                layer=layer,
                output_shape=shape,
                flops=flops_per_element * _size(shape),
                nbytes=sum(array.nbytes for array in inputs) + output.nbytes,
            )
        )
        return output


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
