"""An engine that carries only shapes and records what would run: the basis of ``explain()``. Computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..conv2d.precision import PRECISIONS
from ..conv2d.problem import Conv2dPair, Conv2dProblem
from . import checks
from .base import (
    NONE_FUSED,
    Following,
    Fusions,
    Ops,
    Pair,
    Shortcut,
    back_to_back_by_parts,
    shortcut_by_parts,
    stem_by_parts,
)
from .linear_problem import linear_problem

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class ShapeArray:
    """Stands for an array.

    Args:
        shape: as of the array.
        layer: for weights, the name of the layer they belong to.
        dtype: of its elements.
        channels_first: for (N, H, W, C) pixels, whether they are a view of memory that lies NCHW.
    """

    shape: tuple[int, ...]
    layer: str | None = None
    dtype: np.dtype = FLOAT32
    channels_first: bool = False

    @property
    def nbytes(self) -> int:
        return _size(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class OpRecord:
    """One operation of a forward pass.

    Args:
        op: name in `base.Ops`.
        layer: parameter key prefix of the weights it uses, or None; all where there are several.
        output_shape: of its result.
        flops: floating-point operations, a multiply-add counted as two.
        nbytes: the fewest bytes to move: every input and the output once.
        problem: for a convolution or a fused stem, its description.
        pair: for convolutions in a row in one kernel, their description.
        epilogue: what is fused behind a convolution, of ``"bias"``, ``"residual"``, ``"shortcut"``, ``"relu"``,
            ``"max_pool2d"``, ``"following"``.
        as_conv2d: for ``linear`` on many images, the convolution that computes it on a GPU, by any kernel.
    """

    op: str
    layer: str | None
    output_shape: tuple[int, ...]
    flops: int
    nbytes: int
    problem: Conv2dProblem | None = None
    pair: Conv2dPair | None = None
    epilogue: tuple[str, ...] = ()
    as_conv2d: Conv2dProblem | None = None


class ShapeEngine:
    """Implements `base.Ops` on `ShapeArray`; `records` grows by one `OpRecord` per operation that would be launched.

    Not for several threads at once: an instance serves one walk through a graph.

    Args:
        precision: a key of `conv2d.precision.PRECISIONS`.
        fusions: which operations are recorded as the one kernel that they may be, and not as their parts.
    """

    name = "shapes"

    def __init__(self, precision: str = "fp32", *, fusions: Fusions = NONE_FUSED) -> None:
        self.precision = precision
        self.arithmetic = PRECISIONS[precision]
        self._fusions = fusions
        self.records: list[OpRecord] = []

    def fusions(self) -> Fusions:
        """As it was told."""
        return self._fusions

    def asarray(self, x: Any) -> ShapeArray:
        """Returns a ShapeArray of x's shape."""
        return x if isinstance(x, ShapeArray) else ShapeArray(tuple(x.shape))

    def upload(self, x: Any) -> ShapeArray:
        """Returns a ShapeArray of x's shape and dtype."""
        return x if isinstance(x, ShapeArray) else ShapeArray(tuple(x.shape), dtype=np.dtype(x.dtype))

    def to_numpy(self, x: ShapeArray) -> Any:
        """Raises TypeError: there are no values."""
        raise TypeError(f"ShapeEngine holds shapes, not values; this one is {x.shape}")

    def filter(self, weight: Any) -> ShapeArray:
        """Returns a ShapeArray of a (K, R, S, C/groups) filter."""
        checks.rank("filter", "weight", tuple(weight.shape), "(K, R, S, C/groups)")
        layer = weight.layer if isinstance(weight, ShapeArray) else None
        return ShapeArray(tuple(weight.shape), layer, self.arithmetic.storage)

    def pixels(
        self,
        x: ShapeArray,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: ShapeArray | None = None,
    ) -> ShapeArray:
        """(N, H, W, C) to the same shape; nothing is recorded where `x` can be used as it is."""
        checks.rank("pixels", "x", x.shape, "(N, H, W, C)")
        checks.pixel_dtype("pixels", x.dtype)
        normalized = checks.normalization("pixels", x.shape[3], mean, std) is not None
        if x.dtype == self.arithmetic.storage and not (normalized or x.channels_first):
            return x
        op = "nchw_to_nhwc" if x.channels_first else "normalize"
        return self._activation(op, x.shape, x, flops_per_element=2 * normalized + (x.dtype == np.uint8))

    def nchw_to_nhwc(
        self, x: ShapeArray, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> ShapeArray:
        """(N, C, H, W) to (N, H, W, C)."""
        checks.rank("nchw_to_nhwc", "x", x.shape, "(N, C, H, W)")
        N, C, H, W = x.shape
        normalized = checks.normalization("nchw_to_nhwc", C, mean, std) is not None
        return self._activation("nchw_to_nhwc", (N, H, W, C), x, flops_per_element=2 * normalized)

    def nhwc_to_nchw(self, x: ShapeArray) -> ShapeArray:
        """(N, H, W, C) to (N, C, H, W)."""
        checks.rank("nhwc_to_nchw", "x", x.shape, "(N, H, W, C)")
        N, H, W, C = x.shape
        return self._record("nhwc_to_nchw", (N, C, H, W), x, flops_per_element=0)

    def normalize(self, x: ShapeArray, mean: Sequence[float], std: Sequence[float]) -> ShapeArray:
        """(N, H, W, C) to the same shape."""
        checks.rank("normalize", "x", x.shape, "(N, H, W, C)")
        checks.normalization("normalize", x.shape[-1], mean, std)
        return self._activation("normalize", x.shape, x, flops_per_element=2)

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
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
    ) -> ShapeArray:
        """(N, H, W, C), (K, R, S, C/groups) to (N, P, Q, K)."""
        geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        added: dict[str, Any] = {"residual": residual, "shortcut": shortcut}
        problem = checks.conv2d(x, weight, bias, **added, precision=self.precision, **geometry)
        layer = weight.layer
        if shortcut is not None:
            if not self._fusions.shortcut(problem):
                return shortcut_by_parts(cast(Ops, self), x, weight, bias, shortcut, relu=relu, **geometry)
            layer = " + ".join(name for name in (layer, shortcut[1].layer) if name is not None) or None
        fused = {name: array is not None for name, array in {"bias": bias, **added}.items()} | {"relu": relu}
        epilogue = tuple(name for name, present in fused.items() if present)
        self.records.append(
            OpRecord(
                op="conv2d",
                layer=layer,
                output_shape=problem.output_shape,
                flops=problem.flops + len(epilogue) * _size(problem.output_shape),
                nbytes=problem.bytes + _nbytes(bias, residual),
                problem=problem,
                epilogue=epilogue,
            )
        )
        return ShapeArray(problem.output_shape, dtype=self.arithmetic.storage)

    def conv2d_back_to_back(
        self,
        x: ShapeArray,
        weights: tuple[ShapeArray, ShapeArray],
        biases: tuple[ShapeArray | None, ShapeArray | None] = (None, None),
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: ShapeArray | None = None,
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
        following: Following | None = None,
    ) -> tuple[ShapeArray, ShapeArray | None]:
        """(N, H, W, C), (K, R, S, C/groups), (K of the second, 1, 1, K) to (N, P, Q, K) of the second and third."""
        geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        added: dict[str, Any] = {"residual": residual, "shortcut": shortcut}
        asked = checks.conv2d_back_to_back(
            x, weights, biases, following=following, precision=self.precision, **added, **geometry
        )
        pair = next(filter(self._fusions.back_to_back, dict.fromkeys((asked, asked.without_following()))), None)
        if pair is None:
            added |= {"relu": relu, "overwrite_residual": overwrite_residual}
            return back_to_back_by_parts(cast(Ops, self), x, weights, biases, geometry, **added)
        given = {"bias": biases[1], **added}
        epilogue = [name for name, array in given.items() if array is not None] + ["relu"] * relu
        layers, vectors = [weight.layer for weight in weights], [*biases, residual]
        # Each convolution's bias and ReLU, and what is added: as many as of the parts.
        flops = pair.flops + (1 + (biases[0] is not None)) * _size(pair.first.output_shape)
        flops += len(epilogue) * _size(pair.output_shape)
        z = None
        if shortcut is not None:
            layers.append(shortcut[1].layer)
        if following is not None and pair.third is not None:
            layers.append(following[0].layer)
            vectors.append(following[1])
            epilogue.append("following")
            flops += (1 + (following[1] is not None)) * _size(pair.third.output_shape)
            z = ShapeArray(pair.third.output_shape, dtype=self.arithmetic.storage)
        self.records.append(
            OpRecord(
                op="conv2d_back_to_back",
                layer=" + ".join(layer for layer in layers if layer is not None) or None,
                output_shape=pair.output_shape,
                flops=flops,
                nbytes=pair.bytes + _nbytes(*vectors),
                pair=pair,
                epilogue=tuple(epilogue),
            )
        )
        return ShapeArray(pair.output_shape, dtype=self.arithmetic.storage), z

    def stem(
        self,
        x: ShapeArray,
        weight: ShapeArray,
        bias: ShapeArray,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: ShapeArray | None = None,
    ) -> ShapeArray:
        """(N, H, W, C), (K, 7, 7, C) to (N, P, Q, K)."""
        shape = checks.stem(x, weight, bias)
        if not self._fusions.stem:
            return stem_by_parts(self, x, weight, bias, mean, std, out)
        problem = checks.conv2d(x, weight, bias, stride=2, padding=3, precision=self.precision)
        y = ShapeArray(shape, dtype=self.arithmetic.storage)
        self.records.append(
            OpRecord(
                op="stem",
                layer=weight.layer,
                output_shape=shape,
                flops=problem.flops + 2 * _size(problem.output_shape) + 9 * _size(shape),
                nbytes=_nbytes(x, bias, y) + _size(weight.shape) * self.arithmetic.element_size,
                problem=problem,
                epilogue=("bias", "relu", "max_pool2d"),
            )
        )
        return y

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
        parameters = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        checks.batch_norm2d(x, **parameters)
        return self._activation("batch_norm2d", x.shape, x, *parameters.values(), flops_per_element=3)

    def relu(self, x: ShapeArray) -> ShapeArray:
        """Any shape to itself."""
        return self._activation("relu", x.shape, x)

    def add(self, x: ShapeArray, y: ShapeArray) -> ShapeArray:
        """Two equal shapes to the same."""
        checks.same_shape("add", x, y)
        return self._activation("add", x.shape, x, y)

    def add_relu(self, x: ShapeArray, y: ShapeArray) -> ShapeArray:
        """Two equal shapes to the same."""
        checks.same_shape("add_relu", x, y)
        return self._activation("add_relu", x.shape, x, y, flops_per_element=2)

    def max_pool2d(
        self,
        x: ShapeArray,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        out: ShapeArray | None = None,
    ) -> ShapeArray:
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
        N, H, W, C = checks.global_avg_pool2d(x)
        return self._record("global_avg_pool2d", (N, C), x, flops_per_element=H * W)

    def linear(self, x: ShapeArray, weight: ShapeArray, bias: ShapeArray | None = None) -> ShapeArray:
        """(N, C), (K, C) to (N, K)."""
        N, C, K = checks.linear(x, weight, bias)
        inputs = [array for array in (x, weight, bias) if array is not None]
        return self._record(
            "linear",
            (N, K),
            *inputs,
            flops_per_element=2 * C + (bias is not None),
            as_conv2d=linear_problem(N, C, K, self.precision),
        )

    def softmax(self, x: ShapeArray) -> ShapeArray:
        """(N, K) to the same shape."""
        return self._record("softmax", checks.softmax(x), x, flops_per_element=4)

    def pad_channels(self, x: ShapeArray, before: int, after: int, *, stride: int = 1) -> ShapeArray:
        """(N, H, W, C) to (N, ceil(H/stride), ceil(W/stride), before + C + after)."""
        shape = checks.pad_channels(x, before, after, stride)
        return self._activation("pad_channels", shape, x, flops_per_element=0)

    def _pool(self, op: str, x: ShapeArray, kernel_size: Pair, stride: Pair | None, padding: Pair) -> ShapeArray:
        pool = checks.pool2d(op, x.shape, kernel_size, stride, padding)
        return self._activation(op, pool.output_shape, x, flops_per_element=pool.kernel[0] * pool.kernel[1])

    def _activation(
        self, op: str, shape: tuple[int, ...], *inputs: ShapeArray, flops_per_element: int = 1
    ) -> ShapeArray:
        """Records an operation whose result is stored in the engine's precision."""
        return self._record(op, shape, *inputs, flops_per_element=flops_per_element, dtype=self.arithmetic.storage)

    def _record(
        self,
        op: str,
        shape: tuple[int, ...],
        *inputs: ShapeArray,
        flops_per_element: int,
        dtype: np.dtype = FLOAT32,
        as_conv2d: Conv2dProblem | None = None,
    ) -> ShapeArray:
        output = ShapeArray(shape, dtype=dtype)
        self.records.append(
            OpRecord(
                op=op,
                layer=next((array.layer for array in inputs if array.layer is not None), None),
                output_shape=shape,
                flops=flops_per_element * _size(shape),
                nbytes=_nbytes(*inputs, output),
                as_conv2d=as_conv2d,
            )
        )
        return output


def _nbytes(*arrays: ShapeArray | None) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
