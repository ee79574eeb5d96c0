"""What an engine offers: the operations a network is written against.

Both engines (`numpy_engine`, `cuda_engine`) implement exactly this; so does the shape-only engine behind
``explain()``. Activations are NHWC, filters KRSC. An engine's *precision* says what activations and filters are stored
as (`conv2d.precision`: float32, float16, or bfloat16 bits in a uint16) and how they are multiplied; vectors of
parameters, pooled features, logits and probabilities are float32 in all of them. Every operation computes in float32
and rounds once, at its end; it returns a new array and leaves its inputs alone, accepts N = 0, and propagates NaN as
torch does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..conv2d.problem import Conv2dPair, Conv2dProblem

Array = Any
"""An array of the engine's own kind."""

Pair = int | tuple[int, int]
"""A size for height and width: one int for both, or (height, width)."""

Shortcut = tuple[Array, Any, int]
"""What `Ops.conv2d` adds as a second convolution: input, 1×1 filter, stride."""

Following = tuple[Any, Array | None]
"""Filter and bias of the convolution that comes after those of `Ops.conv2d_back_to_back`."""


def pair(value: Pair) -> tuple[int, int]:
    """Returns (height, width) of an int or a pair."""
    if isinstance(value, int):
        return value, value
    h, w = value
    return int(h), int(w)


@dataclass(frozen=True)
class Fusions:
    """Which operations are one kernel on an engine, of those that are several elsewhere.

    Args:
        stem: whether `Ops.stem` is.
        back_to_back: whether all convolutions of a `Conv2dPair` are.
        shortcut: whether a convolution and its shortcut are.
    """

    stem: bool = False
    back_to_back: "Callable[[Conv2dPair], bool]" = lambda pair: False
    shortcut: "Callable[[Conv2dProblem], bool]" = lambda problem: False


NONE_FUSED = Fusions()


class Ops(Protocol):
    """The operations of a forward graph."""

    name: str
    """``"numpy"``, ``"cuda"``, or ``"shapes"``."""

    precision: str
    """In which arithmetic convolutions run: a key of `conv2d.precision.PRECISIONS`."""

    def fusions(self) -> Fusions:
        """Returns what is one kernel, of the operations that need not be: the others are done by parts."""

    def asarray(self, x: Array) -> Array:
        """Brings a NumPy array (or an array of the engine's kind) to the engine as float32, C-contiguous."""

    def upload(self, x: Any) -> Array:
        """Brings a NumPy array to the engine as it is: what `pixels` and `stem` take, of any strides."""

    def to_numpy(self, x: Array) -> Any:
        """Brings an engine's array back as a float32 NumPy array."""

    def filter(self, weight: Any) -> Any:
        """Prepares a NumPy KRSC filter (K, R, S, C/groups) for `conv2d`: rounds it from float32 or float64 to what
        activations are stored as, or, where an engine multiplies TF32, to that. It may keep packed forms beside it.
        """

    def pixels(
        self,
        x: Array,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Turns pixels of any kind into activations: C-contiguous, in what the precision stores.

        Args:
            x: (N, H, W, C) of any strides: uint8, which is scaled by 1/255 first, float16, float32, or bfloat16 as
                uint16 or int16.
            mean, std: C values each, or None: the result is ``(x − mean) / std`` in float32, rounded after each step
                as torchvision's ``Normalize`` does, then to what is stored.
            out: where to put the result, C-contiguous; by default a new array, or `x` itself where it is the result.
        """

    def nchw_to_nhwc(
        self, x: Array, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Array:
        """(N, C, H, W) pixels to (N, H, W, C) activations, arithmetic as in `pixels`."""

    def nhwc_to_nchw(self, x: Array) -> Array:
        """(N, H, W, C) activations to (N, C, H, W), float32."""

    def normalize(self, x: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
        """(N, H, W, C) pixels to NHWC activations, arithmetic as in `pixels`."""

    def conv2d(
        self,
        x: Array,
        weight: Any,
        bias: Array | None = None,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: Array | None = None,
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
    ) -> Array:
        """Forward convolution with its epilogue: ``relu(conv(x, weight) + bias + residual)``.

        Or with a second, 1×1 convolution in the residual's place, as at the end of a block with a downsample:
        ``relu(conv(x, weight) + conv(x0, weight0, stride=stride0) + bias)``.

        Args:
            x: (N, H, W, C) activations.
            weight: what `filter` returned for a (K, R, S, C/groups) array, or such an array of the engine itself.
            bias: (K,) float32 or None.
            residual: (N, P, Q, K) activations or None, added before the ReLU.
            shortcut: None, or (x0, weight0, stride0), not together with a residual: (N, H0, W0, C0) activations, of
                whose H0 rows and W0 columns every stride0-th make P and Q, and a filter (K, 1, 1, C0), like `weight`.
                `bias` is the sum of both convolutions' biases. Where one kernel computes both, the sum of all is
                rounded once.
            stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``; padding is symmetric.
            relu: whether to end with ReLU.
            overwrite_residual: whether the result may take the memory of `residual`, which nobody needs any more.

        Returns:
            (N, P, Q, K) activations.
        """

    def conv2d_back_to_back(
        self,
        x: Array,
        weights: tuple[Any, Any],
        biases: tuple[Array | None, Array | None] = (None, None),
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        residual: Array | None = None,
        shortcut: Shortcut | None = None,
        relu: bool = False,
        overwrite_residual: bool = False,
        following: Following | None = None,
    ) -> tuple[Array, Array | None]:
        """Two convolutions in a row, the second 1×1: ``y = relu(conv1x1(relu(conv(x) + bias)) + bias + residual)``.

        And where that costs next to nothing, a third on the result: ``relu(conv1x1(y) + bias)``. What is between the
        first two is rounded to what activations are stored as, whether it is ever stored or not.

        Args:
            x: (N, H, W, C) activations.
            weights: of both, as for `conv2d`: (K, R, S, C/groups), and (K of the second, 1, 1, K).
            biases: of both, float32 or None.
            stride, padding, dilation, groups: of the first, which always ends with ReLU.
            residual, shortcut, relu, overwrite_residual: as for `conv2d`, of the second, which has one of the former.
            following: filter (K of the third, 1, 1, K of the second) and bias (or None) of a convolution that comes
                next, or None. It ends with ReLU.

        Returns:
            (N, P, Q, K of the second) activations, and (N, P, Q, K of the third) or None: nothing follows, or it is
            better done by itself.
        """

    def stem(
        self,
        x: Array,
        weight: Any,
        bias: Array,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """The stem of the ImageNet family in one operation, from pixels to the pooled map.

        `pixels`, 7×7 convolution of stride 2 and padding 3, bias, ReLU, 3×3 max-pool of stride 2 and padding 1.

        Args:
            x, mean, std: as for `pixels`.
            weight: (K, 7, 7, C), as for `conv2d`.
            bias: (K,) float32.
            out: where to put the result, C-contiguous; a new array by default.

        Returns:
            (N, P, Q, K) activations; P and Q are a quarter of H and W, rounded up.
        """

    def batch_norm2d(
        self, x: Array, weight: Array, bias: Array, running_mean: Array, running_var: Array, *, eps: float = 1e-5
    ) -> Array:
        """Inference BatchNorm over the last axis: ``(x − mean) / sqrt(var + eps) · weight + bias``."""

    def relu(self, x: Array) -> Array:
        """``max(x, 0)``, NaN stays NaN."""

    def add(self, x: Array, y: Array) -> Array:
        """``x + y`` for equal shapes."""

    def add_relu(self, x: Array, y: Array) -> Array:
        """``relu(x + y)`` for equal shapes, in one pass."""

    def max_pool2d(
        self,
        x: Array,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        out: Array | None = None,
    ) -> Array:
        """Max pooling as ``torch.nn.functional.max_pool2d`` (floor mode): a window with a NaN gives NaN."""

    def avg_pool2d(
        self,
        x: Array,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        *,
        count_include_pad: bool = True,
    ) -> Array:
        """Average pooling as ``torch.nn.functional.avg_pool2d`` (floor mode)."""

    def global_avg_pool2d(self, x: Array) -> Array:
        """(N, H, W, C) activations to (N, C) float32: the mean over H and W."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """(N, C) times (K, C) transposed, plus (K,): (N, K); all float32."""

    def softmax(self, x: Array) -> Array:
        """Softmax over the last axis of (N, K) float32, shifted by the row's maximum."""

    def pad_channels(self, x: Array, before: int, after: int, *, stride: int = 1) -> Array:
        """Takes every `stride`-th row and column and pads channels with zeros: He et al.'s option-A shortcut.

        (N, H, W, C) to (N, ceil(H/stride), ceil(W/stride), before + C + after).
        """


def shortcut_by_parts(ops: Ops, x: Array, weight: Any, bias: Array | None, shortcut: Shortcut, **options: Any) -> Array:
    """`Ops.conv2d` with a shortcut as two convolutions, the second of which takes the first as its residual.

    Args:
        ops: the engine.
        x, weight, bias, shortcut: as for `Ops.conv2d`.
        options: its geometry and `relu`.
    """
    x0, weight0, stride0 = shortcut
    residual = ops.conv2d(x0, weight0, stride=stride0)
    return ops.conv2d(x, weight, bias, residual=residual, overwrite_residual=True, **options)


def stem_by_parts(
    ops: Ops,
    x: Array,
    weight: Any,
    bias: Array,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    out: Array | None,
) -> Array:
    """`Ops.stem` as the operations that it consists of."""
    y = ops.conv2d(ops.pixels(x, mean, std), weight, bias, stride=2, padding=3, relu=True)
    return ops.max_pool2d(y, 3, stride=2, padding=1, out=out)


def back_to_back_by_parts(
    ops: Ops,
    x: Array,
    weights: tuple[Any, Any],
    biases: tuple[Array | None, Array | None],
    geometry: dict[str, Any],
    **of_second: Any,
) -> tuple[Array, None]:
    """`Ops.conv2d_back_to_back` as the two convolutions that it consists of.

    Args:
        ops, x, weights, biases: as there.
        geometry: stride and such of the first.
        of_second: what it has besides.
    """
    y = ops.conv2d(x, weights[0], biases[0], relu=True, **geometry)
    return ops.conv2d(y, weights[1], biases[1], **of_second), None
