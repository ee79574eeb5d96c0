"""What the tests of shortcuts and of convolutions in a row share: some of a network, and a kernel for all of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cupy_resnet.conv2d import H100, Conv2dPair, Conv2dProblem, Device, back_to_back_choice, pieces, shortcut_choice
from cupy_resnet.conv2d.back_to_back import back_to_back_candidates, supports_back_to_back
from cupy_resnet.conv2d.configs import BackToBackConfig
from cupy_resnet.tuning import entrants, workloads

INPUT = {"N": 32, "H": 56, "W": 56, "C": 128, "precision": "fp16"}
FIRST = Conv2dProblem(**INPUT, K=128, R=3, S=3, stride_h=2, stride_w=2, pad_h=1, pad_w=1)  # type: ignore[arg-type]
RESIDUAL = Conv2dPair(replace(FIRST, H=28, W=28, stride_h=1, stride_w=1), 512)
"""What ends the bottlenecks of ResNet-50's second stage, and below the first of them; as both go on."""
SHORTCUT = Conv2dPair(FIRST, 512, shortcut_channels=256, shortcut_stride=2)
RESIDUAL_ON, SHORTCUT_ON = replace(RESIDUAL, following=128), replace(SHORTCUT, following=128)
PAIRS = (RESIDUAL, SHORTCUT, RESIDUAL_ON, SHORTCUT_ON)
BASIC = replace(RESIDUAL.first, shortcut_channels=64, shortcut_stride=2)
"""What ends the first block of ResNet-18's second stage."""


def _instead(pair: Conv2dPair, device: Device) -> Conv2dPair:
    """What the kernel computes of a pair, as far as it can: with a residual; with what follows, or without."""
    pair = replace(pair, shortcut_channels=0, shortcut_stride=1)
    return pair if supports_back_to_back(pair, device)[0] else pair.without_following()


def supports(pair: Conv2dPair, device: Device) -> tuple[bool, str]:
    return supports_back_to_back(_instead(pair, device), device)


def configurations_for(pair: Conv2dPair, device: Device = H100) -> Sequence[BackToBackConfig]:
    """What `kernel_for_all` makes the candidates."""
    return back_to_back_candidates(_instead(pair, device), device)


def kernel_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in a row is supported if it is with a residual, in the same configurations; whatever follows is."""
    for module in (back_to_back_choice, workloads):
        monkeypatch.setattr(module, "supports_back_to_back", supports)
    for module in (back_to_back_choice, entrants, pieces):
        monkeypatch.setattr(module, "back_to_back_candidates", configurations_for)
    for decide in (back_to_back_choice._choose, shortcut_choice._choose):
        decide.cache_clear()
