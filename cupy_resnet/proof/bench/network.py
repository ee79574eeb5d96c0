"""The networks once more, as torch has them: the rivals, and the float64 reference that results are held against.

torch is imported on first use. The ImageNet family is torchvision's own, unchanged; the CIFAR family, which
torchvision lacks, is written here the way its networks are, so that torch's tools (`torch.fx`, `torch.compile`) do
with it what they do with the others.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...networks import Network, describe, random_state_dict
from ...networks.cifar_resnet import BLOCKS_PER_STAGE
from ...weights_store import resolve, split_name


def make_weights(model: str, seed: int = 0) -> tuple[Network, dict[str, np.ndarray]]:
    """Returns a network and a state dict for it: the embedded weights its name asks for, else random ones.

    Random weights are `cupy_resnet.networks.random_state_dict`'s, with which activations stay of order one.

    Args:
        model: one of `cupy_resnet.list_models`, or of `cupy_resnet.weights_store.embedded`.
        seed: of random weights.

    Raises:
        ValueError: an unknown model.
    """
    name, embedded = split_name(model)
    if embedded is None:
        network = describe(name)
        return network, random_state_dict(network, seed)
    return describe(name), dict(resolve(model).state)


def torch_network(network: Network, state: Mapping[str, np.ndarray]) -> Any:
    """Returns torch's network with these weights: a ``torch.nn.Module`` in eval mode, float32, on the CPU.

    Args:
        network: a description with three input channels.
        state: key to array, filters as OIHW; ``num_batches_tracked`` may be absent.

    Raises:
        ImportError: torch or torchvision is not installed; the message says how to get them.
        ValueError: another number of input channels, or tensors that do not fit.
    """
    torch = import_torch()
    if network.in_channels != 3:
        raise ValueError(f"torch's {network.name} has 3 input channels, not {network.in_channels}")
    # Initialising would take seconds on the large networks and is overwritten at once.
    with torch.device("meta"):
        if network.name in BLOCKS_PER_STAGE:
            module = _cifar_resnet(BLOCKS_PER_STAGE[network.name], network.num_classes)
        else:
            from torchvision.models import get_model

            module = get_model(network.name, weights=None, num_classes=network.num_classes)
    module = module.to_empty(device="cpu")
    outcome = module.load_state_dict(
        {key: torch.from_numpy(value.copy()) for key, value in state.items()}, strict=False
    )
    missing = [key for key in outcome.missing_keys if not key.endswith("num_batches_tracked")]
    if missing or outcome.unexpected_keys:
        raise ValueError(f"{network.name}: torch's network lacks {missing} and has no {outcome.unexpected_keys}")
    return module.eval().requires_grad_(False)


def import_torch() -> Any:
    """Returns torch, after making sure that torchvision is there too.

    Raises:
        ImportError: one is not installed; the message says how to get both.
    """
    try:
        import torch
        import torchvision  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"comparing with PyTorch needs torch and torchvision ({error}): pip install 'cupy-resnet[torch]'"
        ) from error
    return torch


def _cifar_resnet(blocks: int, num_classes: int) -> Any:
    """He et al. (2016), section 4.2, with parameter keys as in `cupy_resnet.networks.cifar_resnet`."""
    nn: Any = import_torch().nn
    functional = nn.functional

    class Block(nn.Module):
        def __init__(self, channels: int, planes: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(planes)
            self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(planes)
            self.relu = nn.ReLU(inplace=True)
            self.stride = stride
            before = (planes - channels) // 2
            self.padding = (0, 0, 0, 0, before, planes - channels - before)
            self.same = stride == 1 and planes == channels

        def forward(self, x: Any) -> Any:
            identity = x
            if not self.same:  # option A: every stride-th pixel, zeros for the new channels
                identity = functional.pad(x[:, :, :: self.stride, :: self.stride], self.padding)
            y = self.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(y))
            return self.relu(y + identity)

    class CifarResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(16)
            self.relu = nn.ReLU(inplace=True)
            channels = 16
            for stage, planes in enumerate((16, 32, 64), start=1):
                layers = []
                for index in range(blocks):
                    layers.append(Block(channels, planes, 2 if stage > 1 and index == 0 else 1))
                    channels = planes
                setattr(self, f"layer{stage}", nn.Sequential(*layers))
            self.avgpool = nn.AdaptiveAvgPool2d(1)
            self.linear = nn.Linear(64, num_classes)

        def forward(self, x: Any) -> Any:
            x = self.relu(self.bn1(self.conv1(x)))
            x = self.layer3(self.layer2(self.layer1(x)))
            return self.linear(self.avgpool(x).flatten(1))

    return CifarResNet()
