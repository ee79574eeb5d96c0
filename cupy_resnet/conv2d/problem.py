"""The description of one convolution, apart from how it is computed. Imports no CuPy: usable anywhere."""

from dataclasses import dataclass, replace

from .precision import PRECISIONS, Precision

INT32_MAX = 2**31 - 1
MAX_GROUPS = 65535  # gridDim.y


@dataclass(frozen=True, kw_only=True)
class Conv2dProblem:
    """A forward convolution: NHWC input, KRSC filter, NPQK output.

    It may have a *shortcut*: a 1×1 convolution of a second input, whose output is of the same shape and is added to
    that of the first, as at the end of a ResNet block with a downsample. The sums of both are one, rounded once.

    Args:
        N, H, W, C: input batch, height, width, channels.
        K, R, S: output channels, filter height and width.
        stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups: as in ``torch.nn.functional.conv2d``.
        shortcut_channels: of the shortcut's input, or 0: there is no shortcut.
        shortcut_stride: of the shortcut, in both directions.
        precision: name of the arithmetic, a key of `precision.PRECISIONS`; it decides the dtype of the tensors.

    Raises:
        ValueError: a size that no convolution can have; the message names the argument.
    """

    N: int
    H: int
    W: int
    C: int
    K: int
    R: int
    S: int
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int = 0
    pad_w: int = 0
    dilation_h: int = 1
    dilation_w: int = 1
    groups: int = 1
    precision: str = "fp32"
    shortcut_channels: int = 0
    shortcut_stride: int = 1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"conv2d: precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        at_least_1 = ("C", "K", "R", "S", "H", "W", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups")
        for name in (*at_least_1, "shortcut_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"conv2d: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("N", "pad_h", "pad_w", "shortcut_channels"):
            if getattr(self, name) < 0:
                raise ValueError(f"conv2d: {name} must not be negative, got {getattr(self, name)}")
        if self.shortcut_stride > 1 and not self.shortcut_channels:
            raise ValueError(f"conv2d: there is no shortcut to have a stride of {self.shortcut_stride}")
        if self.C % self.groups or self.K % self.groups:
            raise ValueError(
                f"conv2d: input channels C={self.C} and output channels K={self.K} must both be multiples of "
                f"groups={self.groups}"
            )
        if self.P < 1 or self.Q < 1:
            raise ValueError(
                f"conv2d: the filter ({self.R}×{self.S}, dilation {self.dilation_h}×{self.dilation_w}) is larger than "
                f"the padded input ({self.H + 2 * self.pad_h}×{self.W + 2 * self.pad_w})"
            )

    @property
    def arithmetic(self) -> Precision:
        """What `precision` names."""
        return PRECISIONS[self.precision]

    @property
    def P(self) -> int:  # noqa: N802
        """Output height."""
        return (self.H + 2 * self.pad_h - self.dilation_h * (self.R - 1) - 1) // self.stride_h + 1

    @property
    def Q(self) -> int:  # noqa: N802
        """Output width."""
        return (self.W + 2 * self.pad_w - self.dilation_w * (self.S - 1) - 1) // self.stride_w + 1

    @property
    def group_channels(self) -> int:
        """Input channels of one group."""
        return self.C // self.groups

    @property
    def gemm_m(self) -> int:
        """Rows of the equivalent matrix product: N·P·Q."""
        return self.N * self.P * self.Q

    @property
    def gemm_n(self) -> int:
        """Columns of the product, per group: K/groups."""
        return self.K // self.groups

    @property
    def gemm_k(self) -> int:
        """Depth of the product, per group, without the shortcut: R·S·C/groups."""
        return self.R * self.S * self.group_channels

    @property
    def depth(self) -> int:
        """Depth of the product, per group, with the shortcut: [im2col(x) | x0] times [filter; its filter]."""
        return self.gemm_k + self.shortcut_channels

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.H, self.W, self.C

    @property
    def filter_shape(self) -> tuple[int, int, int, int]:
        return self.K, self.R, self.S, self.group_channels

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.N, self.P, self.Q, self.K

    @property
    def shortcut_shape(self) -> tuple[int, int, int, int]:
        """The shape of the largest input of the shortcut; see `has_shortcut_of`."""
        return self.N, self.P * self.shortcut_stride, self.Q * self.shortcut_stride, self.shortcut_channels

    @property
    def shortcut_filter_shape(self) -> tuple[int, int, int, int]:
        return self.K, 1, 1, self.shortcut_channels

    def has_shortcut_of(self, shape: tuple[int, ...]) -> bool:
        """Whether the shortcut's input may have a shape: its every `shortcut_stride`-th rows and columns are as many as
        the output's. Rows and columns behind the last of them make no difference, and are no part of the problem.
        """
        if len(shape) != 4 or min(shape[1:3]) < 1:
            return False
        N, H, W, C = shape
        rows, columns = (H - 1) // self.shortcut_stride + 1, (W - 1) // self.shortcut_stride + 1
        return (N, rows, columns, C) == (self.N, self.P, self.Q, self.shortcut_channels) and C > 0

    def without_shortcut(self) -> "Conv2dProblem":
        """The same convolution alone."""
        return replace(self, shortcut_channels=0, shortcut_stride=1)

    def shortcut_alone(self, shape: tuple[int, ...] | None = None) -> "Conv2dProblem":
        """The shortcut as a convolution of its own.

        Args:
            shape: of its input, by default `shortcut_shape`.
        """
        N, H, W, C = self.shortcut_shape if shape is None else shape
        stride = self.shortcut_stride
        sizes = {"N": N, "H": H, "W": W, "C": C, "K": self.K, "R": 1, "S": 1, "stride_h": stride, "stride_w": stride}
        return Conv2dProblem(**sizes, precision=self.precision)

    @property
    def flops(self) -> int:
        """Floating-point operations of the direct convolution, a multiply-add counted as two."""
        return 2 * self.gemm_m * self.depth * self.K

    @property
    def bytes(self) -> int:
        """The fewest bytes the problem must move: inputs, filters and output once each, of the shortcut's input the
        pixels that it reads.
        """
        inputs = self.N * self.H * self.W * self.C + self.gemm_m * self.shortcut_channels
        elements = inputs + self.K * self.depth + self.gemm_m * self.K
        return self.arithmetic.element_size * elements

    @property
    def is_pointwise(self) -> bool:
        """Whether the input tensor itself is the im2col matrix: 1×1, stride 1, no padding."""
        return (self.R, self.S, self.stride_h, self.stride_w) == (1, 1, 1, 1) and self.pad_h == self.pad_w == 0

    def limit_exceeded(self) -> str | None:
        """Names the size that the kernels cannot index, or None.

        Whole tensors may have 2³¹ elements and more; a single padded image, the filter, and the number of output
        pixels may not, because kernels form those offsets in 32 bits. The filter's bound leaves room for one tile of
        rows past the last.
        """
        _, shortcut_h, shortcut_w, shortcut_channels = self.shortcut_shape
        sizes = {
            "output pixels N·P·Q": self.gemm_m + 1024,
            "elements of one padded image (H+2·pad)·(W+2·pad)·C": (
                (self.H + 2 * self.pad_h) * (self.W + 2 * self.pad_w) * self.C
            ),
            "elements of one output image P·Q·K": self.P * self.Q * self.K,
            "filter elements K·R·S·C/groups": (self.K + 256) * self.gemm_k,
            "elements of one image of the shortcut's input": shortcut_h * shortcut_w * shortcut_channels,
            "elements of the shortcut's filter": (self.K + 256) * shortcut_channels,
        }
        for name, size in sizes.items():
            if size > INT32_MAX:
                return f"{name} = {size} exceeds 2^31 − 1"
        if self.groups > MAX_GROUPS:
            return f"groups = {self.groups} exceeds {MAX_GROUPS}"
        return None

    def __str__(self) -> str:
        text = f"{self.N}×{self.H}×{self.W}×{self.C} → {self.K}, {self.R}×{self.S}"
        if (self.stride_h, self.stride_w) != (1, 1):
            text += f", stride {self.stride_h}×{self.stride_w}"
        if (self.pad_h, self.pad_w) != (0, 0):
            text += f", pad {self.pad_h}×{self.pad_w}"
        if (self.dilation_h, self.dilation_w) != (1, 1):
            text += f", dilation {self.dilation_h}×{self.dilation_w}"
        if self.groups != 1:
            text += f", groups {self.groups}"
        if self.shortcut_channels:
            text += f", plus 1×1 of {self.shortcut_channels} channels"
            if self.shortcut_stride != 1:
                text += f", stride {self.shortcut_stride}"
        if self.precision != "fp32":
            text += f", {self.precision}"
        return text


@dataclass(frozen=True)
class Conv2dPair:
    """Two convolutions in a row, as at the end of a ResNet's bottleneck, and perhaps the one that comes after them.

    The first is any one with a ReLU behind it, the second a 1×1 on what that gives, with a residual or a shortcut and a
    ReLU. The one that *follows* is a 1×1 on the second's output, with a ReLU: the beginning of the next block.

    Args:
        first: the convolution that reads the input.
        K: output channels of the second.
        shortcut_channels, shortcut_stride: of the second's shortcut, as of a `Conv2dProblem`; without one it has a
            residual.
        following: output channels of the one that follows, or 0: there is none.

    Raises:
        ValueError: sizes that no convolution can have.
    """

    first: Conv2dProblem
    K: int
    shortcut_channels: int = 0
    shortcut_stride: int = 1
    following: int = 0

    def __post_init__(self) -> None:
        _ = self.second  # checks the sizes
        if self.following < 0:
            raise ValueError(f"conv2d_back_to_back: following must not be negative, got {self.following}")

    @property
    def second(self) -> Conv2dProblem:
        """The 1×1 convolution behind the first."""
        first = self.first
        return Conv2dProblem(
            N=first.N,
            H=first.P,
            W=first.Q,
            C=first.K,
            K=self.K,
            R=1,
            S=1,
            precision=first.precision,
            shortcut_channels=self.shortcut_channels,
            shortcut_stride=self.shortcut_stride,
        )

    @property
    def third(self) -> Conv2dProblem | None:
        """The 1×1 convolution that follows, if any."""
        if not self.following:
            return None
        N, P, Q, K = self.output_shape
        return Conv2dProblem(N=N, H=P, W=Q, C=K, K=self.following, R=1, S=1, precision=self.precision)

    @property
    def parts(self) -> tuple[Conv2dProblem, ...]:
        """All convolutions, in order."""
        third = self.third
        return (self.first, self.second) if third is None else (self.first, self.second, third)

    def without_following(self) -> "Conv2dPair":
        """The first two alone."""
        return replace(self, following=0)

    @property
    def N(self) -> int:  # noqa: N802
        return self.first.N

    @property
    def precision(self) -> str:
        return self.first.precision

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Of the second."""
        return self.second.output_shape

    @property
    def flops(self) -> int:
        """Floating-point operations of all."""
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> int:
        """The fewest bytes to move, where what is between the first two is never stored, and what the second gives is
        not read again. A residual is not counted.
        """
        first, second = self.first, self.second
        again = [2 * first.gemm_m * first.K, second.gemm_m * second.K if self.following else 0]
        return sum(part.bytes for part in self.parts) - first.arithmetic.element_size * sum(again)

    def __str__(self) -> str:
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        text = f"{str(self.first).removesuffix(precision)}; → {self.K}, 1×1"
        if self.shortcut_channels:
            text += f", plus 1×1 of {self.shortcut_channels} channels"
            if self.shortcut_stride != 1:
                text += f", stride {self.shortcut_stride}"
        if self.following:
            text += f"; → {self.following}, 1×1"
        return text + precision


Problem = Conv2dProblem | Conv2dPair
"""What a table of measured choices knows an answer to."""
