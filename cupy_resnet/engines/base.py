"""What an engine offers: the operations a network is written against.

Both engines (`numpy_engine`, `cuda_engine`) implement exactly this; so does the shape-only engine behind
``explain()``. Activations are NHWC, filters KRSC, both float32 unless an engine says otherwise. Every operation
returns a new array and leaves its inputs alone, accepts N = 0, and propagates NaN as torch does.
"""

from collections.abc import Sequence
from typing import Any, Protocol

Array = Any
"""An array of the engine's own kind."""

Pair = int | tuple[int, int]
"""A size for height and width: one int for both, or (height, width)."""


def pair(value: Pair) -> tuple[int, int]:
    """Returns (height, width) of an int or a pair."""
    if isinstance(value, int):
        return value, value
    h, w = value
    return int(h), int(w)


class Ops(Protocol):
    """The operations of a forward graph."""

    name: str
    """``"numpy"``, ``"cuda"``, or ``"shapes"``."""

    def asarray(self, x: Array) -> Array:
        """Brings a NumPy array (or an array of the engine's kind) to the engine as float32, C-contiguous."""

    def to_numpy(self, x: Array) -> Any:
        """Brings an engine's array back as a NumPy array."""

    def filter(self, weight: Array) -> Any:
        """Prepares a KRSC filter (K, R, S, C/groups) for `conv2d`: the engine may keep packed forms beside it."""

    def nchw_to_nhwc(
        self, x: Array, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Array:
        """(N, C, H, W) float32 or uint8 to (N, H, W, C) float32.

        uint8 is scaled by 1/255 first. With `mean` and `std` (C values each) the result is ``(x − mean) / std`` in
        float32, rounded after each step as torchvision's ``Normalize`` does.
        """

    def nhwc_to_nchw(self, x: Array) -> Array:
        """(N, H, W, C) to (N, C, H, W), float32."""

    def normalize(self, x: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
        """(N, H, W, C) uint8 or float32 to float32 NHWC, arithmetic as in `nchw_to_nhwc`."""

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
        relu: bool = False,
    ) -> Array:
        """Forward convolution with its epilogue: ``relu(conv(x, weight) + bias + residual)``.

        Args:
            x: (N, H, W, C).
            weight: what `filter` returned for a (K, R, S, C/groups) array, or such an array itself.
            bias: (K,) or None.
            residual: (N, P, Q, K) or None, added before the ReLU.
            stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``; padding is symmetric.
            relu: whether to end with ReLU.

        Returns:
            (N, P, Q, K).
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

    def max_pool2d(self, x: Array, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Array:
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
        """(N, H, W, C) to (N, C): the mean over H and W."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """(N, C) times (K, C) transposed, plus (K,): (N, K)."""

    def softmax(self, x: Array) -> Array:
        """Softmax over the last axis of (N, K), shifted by the row's maximum."""

    def pad_channels(self, x: Array, before: int, after: int, *, stride: int = 1) -> Array:
        """Takes every `stride`-th row and column and pads channels with zeros: He et al.'s option-A shortcut.

        (N, H, W, C) to (N, ceil(H/stride), ceil(W/stride), before + C + after).
        """
