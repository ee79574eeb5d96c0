"""The CIFAR family of He et al. (CVPR 2016), section 4.2: depth 6n + 2, three stages of 16, 32 and 64 channels.

Shortcuts are option A: where the size halves, every second pixel is taken and the new channels are zeros, half of
them before and half after, so that a shortcut has no parameters. The classifier's key is ``linear``, as in the
checkpoints of this family in circulation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layers import BatchNorm2d, Conv2d, Linear, conv_bn
from .network import Block, Network

if TYPE_CHECKING:
    from ..engines.base import Array, Ops

BLOCKS_PER_STAGE = {"resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9, "resnet110": 18}


@dataclass(frozen=True, kw_only=True, eq=False)
class OptionABlock(Block):
    """Two 3×3 convolutions around a shortcut without parameters."""

    conv1: Conv2d
    conv2: Conv2d

    def __call__(self, ops: "Ops", x: "Array", *, overwrite: bool = False) -> "Array":
        identity = x
        new_channels = self.conv1.out_channels - self.conv1.in_channels
        if self.conv1.stride != 1 or new_channels:
            before = new_channels // 2
            identity = ops.pad_channels(x, before, new_channels - before, stride=self.conv1.stride)
        y = conv_bn(ops, x, self.conv1, relu=True)
        overwrite = overwrite or identity is not x
        return conv_bn(ops, y, self.conv2, residual=identity, relu=True, overwrite_residual=overwrite)


def build(name: str, *, num_classes: int = 10, in_channels: int = 3) -> Network:
    """Describes one network of `BLOCKS_PER_STAGE`; no weights are made."""
    channels = 16
    blocks = []
    for stage, planes in enumerate((16, 32, 64), start=1):
        for index in range(BLOCKS_PER_STAGE[name]):
            prefix = f"layer{stage}.{index}"
            stride = 2 if stage > 1 and index == 0 else 1
            block = OptionABlock(
                conv1=_conv3x3(f"{prefix}.conv1", f"{prefix}.bn1", channels, planes, stride),
                conv2=_conv3x3(f"{prefix}.conv2", f"{prefix}.bn2", planes, planes),
            )
            blocks.append((prefix, block))
            channels = planes
    return Network(
        name=name,
        stem=_conv3x3("conv1", "bn1", in_channels, 16),
        stem_max_pool=False,
        blocks=tuple(blocks),
        head=Linear(name="linear", in_features=64, out_features=num_classes),
        default_size=32,
    )


def _conv3x3(name: str, bn: str, in_channels: int, out_channels: int, stride: int = 1) -> Conv2d:
    return Conv2d(
        name=name,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel_size=3,
        stride=stride,
        padding=1,
        batch_norm=BatchNorm2d(name=bn, num_features=out_channels),
    )
