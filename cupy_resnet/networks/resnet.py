"""The ImageNet family: ResNet, Wide ResNet and ResNeXt, with torchvision's structure and parameter keys.

He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), Zagoruyko and Komodakis, "Wide Residual
Networks" (BMVC 2016), Xie et al., "Aggregated Residual Transformations for Deep Neural Networks" (CVPR 2017).
Bottlenecks are v1.5: a stage's stride sits on its first 3×3 convolution, not on the 1×1 before it as in the paper.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from .layers import BatchNorm2d, Conv2d, Linear, conv_bn, end_of_block, end_of_bottleneck
from .network import BiasJoin, Block, Network

if TYPE_CHECKING:
    from ..engines.base import Array, Ops


@dataclass(frozen=True, kw_only=True, eq=False)
class BasicBlock(Block):
    """Two 3×3 convolutions around an identity or 1×1 shortcut."""

    conv1: Conv2d
    conv2: Conv2d
    downsample: Conv2d | None = None

    def __call__(self, ops: "Ops", x: "Array", *, overwrite: bool = False) -> "Array":
        y = conv_bn(ops, x, self.conv1, relu=True)
        return end_of_block(ops, y, self.conv2, x, self.downsample, overwrite=overwrite)

    def with_joint_bias(self, join: BiasJoin) -> Self:
        if self.downsample is None:
            return self
        conv2, downsample = join(self.conv2, self.downsample)
        return replace(self, conv2=conv2, downsample=downsample)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bottleneck(Block):
    """1×1, 3×3 (stride and groups here), 1×1 around an identity or 1×1 shortcut."""

    conv1: Conv2d
    conv2: Conv2d
    conv3: Conv2d
    downsample: Conv2d | None = None

    def __call__(self, ops: "Ops", x: "Array", *, overwrite: bool = False) -> "Array":
        return self.forward(ops, x, overwrite=overwrite)[0]

    def forward(
        self,
        ops: "Ops",
        x: "Array",
        *,
        overwrite: bool = False,
        begun: "Array | None" = None,
        following: Block | None = None,
    ) -> tuple["Array", "Array | None"]:
        y = conv_bn(ops, x, self.conv1, relu=True) if begun is None else begun
        ahead = following.conv1 if isinstance(following, Bottleneck) else None
        return end_of_bottleneck(
            ops, y, self.conv2, self.conv3, x, self.downsample, overwrite=overwrite, following=ahead
        )

    def with_joint_bias(self, join: BiasJoin) -> Self:
        if self.downsample is None:
            return self
        conv3, downsample = join(self.conv3, self.downsample)
        return replace(self, conv3=conv3, downsample=downsample)


@dataclass(frozen=True)
class Architecture:
    """What tells one network of the family from another.

    Args:
        bottleneck: Bottleneck blocks (expansion 4) or BasicBlocks.
        depths: blocks per stage.
        groups: of the 3×3 in a Bottleneck.
        width_per_group: channels per group in the first stage's 3×3, for a stage of 64 planes.
    """

    bottleneck: bool
    depths: tuple[int, int, int, int]
    groups: int = 1
    width_per_group: int = 64


ARCHITECTURES = {
    "resnet18": Architecture(False, (2, 2, 2, 2)),
    "resnet34": Architecture(False, (3, 4, 6, 3)),
    "resnet50": Architecture(True, (3, 4, 6, 3)),
    "resnet101": Architecture(True, (3, 4, 23, 3)),
    "resnet152": Architecture(True, (3, 8, 36, 3)),
    "resnext50_32x4d": Architecture(True, (3, 4, 6, 3), groups=32, width_per_group=4),
    "resnext101_32x8d": Architecture(True, (3, 4, 23, 3), groups=32, width_per_group=8),
    "resnext101_64x4d": Architecture(True, (3, 4, 23, 3), groups=64, width_per_group=4),
    "wide_resnet50_2": Architecture(True, (3, 4, 6, 3), width_per_group=128),
    "wide_resnet101_2": Architecture(True, (3, 4, 23, 3), width_per_group=128),
}


def build(name: str, *, num_classes: int = 1000, in_channels: int = 3) -> Network:
    """Describes one network of `ARCHITECTURES`; no weights are made."""
    architecture = ARCHITECTURES[name]
    expansion = 4 if architecture.bottleneck else 1
    channels = 64
    blocks: list[tuple[str, Block]] = []
    for stage, depth in enumerate(architecture.depths, start=1):
        planes = 64 * 2 ** (stage - 1)
        for index in range(depth):
            prefix = f"layer{stage}.{index}"
            stride = 2 if stage > 1 and index == 0 else 1
            blocks.append((prefix, _block(prefix, architecture, channels, planes, stride)))
            channels = planes * expansion
    return Network(
        name=name,
        stem=_conv("conv1", "bn1", in_channels, 64, 7, stride=2),
        stem_max_pool=True,
        blocks=tuple(blocks),
        head=Linear(name="fc", in_features=channels, out_features=num_classes),
        default_size=224,
    )


def _block(prefix: str, architecture: Architecture, channels: int, planes: int, stride: int) -> Block:
    out_channels = planes * (4 if architecture.bottleneck else 1)
    downsample = None
    if stride != 1 or channels != out_channels:
        downsample = _conv(f"{prefix}.downsample.0", f"{prefix}.downsample.1", channels, out_channels, 1, stride=stride)
    if not architecture.bottleneck:
        return BasicBlock(
            conv1=_conv(f"{prefix}.conv1", f"{prefix}.bn1", channels, planes, 3, stride=stride),
            conv2=_conv(f"{prefix}.conv2", f"{prefix}.bn2", planes, planes, 3),
            downsample=downsample,
        )
    groups = architecture.groups
    width = planes * architecture.width_per_group // 64 * groups
    return Bottleneck(
        conv1=_conv(f"{prefix}.conv1", f"{prefix}.bn1", channels, width, 1),
        conv2=_conv(f"{prefix}.conv2", f"{prefix}.bn2", width, width, 3, stride=stride, groups=groups),
        conv3=_conv(f"{prefix}.conv3", f"{prefix}.bn3", width, out_channels, 1),
        downsample=downsample,
    )


def _conv(
    name: str, bn: str, in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, groups: int = 1
) -> Conv2d:
    return Conv2d(
        name=name,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel_size=kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        groups=groups,
        batch_norm=BatchNorm2d(name=bn, num_features=out_channels),
    )
