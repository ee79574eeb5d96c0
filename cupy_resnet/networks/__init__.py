"""The networks: each a graph written once against `cupy_resnet.engines.base.Ops`, with no engine and no weights."""

from collections.abc import Mapping

from .._names import unknown_name
from . import cifar_resnet, resnet
from .layers import BatchNorm2d, Conv2d, Linear, conv_bn
from .network import Network
from .random_weights import random_state_dict

__all__ = [
    "BatchNorm2d",
    "Conv2d",
    "Linear",
    "Network",
    "conv_bn",
    "describe",
    "list_models",
    "matching_models",
    "random_state_dict",
]


def list_models() -> list[str]:
    """Returns the names that `load` knows: the ImageNet family, then the CIFAR family."""
    return [*resnet.ARCHITECTURES, *cifar_resnet.BLOCKS_PER_STAGE]


def describe(name: str, *, num_classes: int | None = None, in_channels: int | None = None) -> Network:
    """Describes a network by name; no weights are made.

    Args:
        name: one of `list_models`.
        num_classes: rows of the classifier; by default 1000 (ImageNet family) or 10 (CIFAR family).
        in_channels: channels of the image, by default 3.

    Raises:
        ValueError: an unknown name (the message lists those that exist), or a count below one.
    """
    if name not in list_models():
        raise ValueError(unknown_name("model", name, list_models()))
    sizes = {"num_classes": num_classes, "in_channels": in_channels}
    given = {key: value for key, value in sizes.items() if value is not None}
    for key, value in given.items():
        if value < 1:
            raise ValueError(f"{key} must be at least 1, got {value}")
    family = resnet if name in resnet.ARCHITECTURES else cifar_resnet
    return family.build(name, **given)


def matching_models(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the models whose every tensor but the classifier's and the stem's has exactly these shapes."""
    names = []
    for name in list_models():
        network = describe(name)
        free = {f"{network.head.name}.weight", f"{network.head.name}.bias", f"{network.stem.name}.weight"}
        table = network.tensor_table()
        if table.keys() == shapes.keys() and all(shapes[key] == table[key] for key in table.keys() - free):
            names.append(name)
    return names
