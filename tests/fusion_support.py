"""What the tests of shortcuts and of convolutions in a row share: a kernel for them, and a graph that has them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem, Device, back_to_back_choice, pieces, shortcut_choice
from cupy_resnet.conv2d.back_to_back import back_to_back_candidates, supports_back_to_back
from cupy_resnet.conv2d.configs import BackToBackConfig
from cupy_resnet.engines.shape_engine import Fusions, OpRecord
from cupy_resnet.networks import Network
from cupy_resnet.networks.layers import Conv2d
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


def _plain(pair: Conv2dPair) -> Conv2dPair:
    return Conv2dPair(pair.first, pair.K)


def _supports(pair: Conv2dPair, device: Device) -> tuple[bool, str]:
    return supports_back_to_back(_plain(pair), device)


def _candidates(pair: Conv2dPair, device: Device) -> Sequence[BackToBackConfig]:
    return back_to_back_candidates(_plain(pair), device)


def kernel_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in a row is supported if it is with a residual and nothing following, in the same configurations."""
    for module in (back_to_back_choice, workloads):
        monkeypatch.setattr(module, "supports_back_to_back", _supports)
    for module in (back_to_back_choice, entrants, pieces):
        monkeypatch.setattr(module, "back_to_back_candidates", _candidates)
    for decide in (back_to_back_choice._choose, shortcut_choice._choose):
        decide.cache_clear()


def _problem(conv: Conv2d, shape: tuple[int, ...], precision: str) -> Conv2dProblem:
    K, R, S, _ = conv.krsc_shape
    sizes = dict(zip("NHWC", shape, strict=True)) | {"K": K, "R": R, "S": S}
    sizes |= {"stride_h": conv.stride, "stride_w": conv.stride, "pad_h": conv.padding, "pad_w": conv.padding}
    return Conv2dProblem(**sizes, groups=conv.groups, precision=precision)


def _record(problem: Conv2dProblem | Conv2dPair, *epilogue: str) -> OpRecord:
    one = problem if isinstance(problem, Conv2dProblem) else None
    pair = problem if isinstance(problem, Conv2dPair) else None
    return OpRecord(
        op="conv2d" if one else "conv2d_back_to_back",
        layer=None,
        output_shape=problem.output_shape,
        flops=problem.flops,
        nbytes=problem.bytes,
        problem=one,
        pair=pair,
        epilogue=epilogue,
    )


def walk(network: Network, shape: tuple[int, ...], precision: str, fusions: Fusions) -> list[OpRecord]:
    """The convolutions of a network's blocks where as much is one kernel as `fusions` say."""
    return list(_blocks(network, (shape[0], shape[1] // 4, shape[2] // 4, 64), precision, fusions))


def _blocks(network: Network, shape: tuple[int, ...], precision: str, fusions: Fusions) -> Iterator[OpRecord]:
    begun = None
    blocks = [[*block._named().items()] for _, block in network.blocks]
    for named, after in zip(map(dict, blocks), [*map(dict, blocks[1:]), {}], strict=True):
        x, downsample = shape, named.get("downsample")
        first = begun or _problem(named["conv1"], shape, precision)
        if begun is None:
            yield _record(first, "relu")
        extra: dict[str, Any] = {}
        if downsample is not None:
            extra = {"shortcut_channels": x[3], "shortcut_stride": downsample.stride}
        middle = _problem(named["conv2"], first.output_shape, precision)
        begun = None
        if "conv3" in named:
            pair = Conv2dPair(middle, named["conv3"].out_channels, **extra)
            following = after["conv1"].out_channels if after else 0
            fused = next((p for p in (replace(pair, following=following), pair) if fusions.back_to_back(p)), None)
            if fused is not None:
                yield _record(fused, "shortcut" if extra else "residual", "relu")
                begun, shape = fused.third, pair.output_shape
                continue
            yield _record(middle, "relu")
            last = pair.second
        else:
            last = replace(middle, **extra)
        shape = last.output_shape
        if not extra:
            yield _record(last, "residual", "relu")
        elif fusions.shortcut(last):
            yield _record(last, "shortcut", "relu")
        else:
            assert downsample is not None
            yield _record(_problem(downsample, x, precision))
            yield _record(last.without_shortcut(), "residual", "relu")
