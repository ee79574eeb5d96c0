"""What tests of both engines share: cases, references in torch, and one way of comparing."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from cupy_resnet.conv2d.problem import Conv2dProblem

CIFAR_DEPTHS = {"resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9, "resnet110": 18}
CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def assert_close(actual: Any, expected: Any, **tolerances: float) -> None:
    """torch.testing.assert_close with its default tolerances for the dtype, NaN equal to NaN."""
    torch.testing.assert_close(
        torch.as_tensor(np.ascontiguousarray(actual)),
        torch.as_tensor(np.ascontiguousarray(expected)),
        equal_nan=True,
        **tolerances,
    )


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """float32 normal deviates."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(scale)


def integers(shape: tuple[int, ...], seed: int = 0, low: int = -2, high: int = 2) -> np.ndarray:
    """Small integers as float32: sums of their products are exact in any order."""
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(np.float32)


@dataclass(frozen=True)
class ConvCase:
    """A convolution with its epilogue, for one comparison."""

    problem: Conv2dProblem
    bias: bool = False
    residual: bool = False
    relu: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``Ops.conv2d`` that are not arrays."""
        p = self.problem
        return {
            "stride": (p.stride_h, p.stride_w),
            "padding": (p.pad_h, p.pad_w),
            "dilation": (p.dilation_h, p.dilation_w),
            "groups": p.groups,
            "relu": self.relu,
        }

    def arrays(self, *, exact: bool, seed: int = 0) -> dict[str, np.ndarray | None]:
        """x, weight, bias, residual: small integers if `exact`, else normal with outputs of order one."""
        p = self.problem
        draw = integers if exact else normal
        weight = draw(p.filter_shape, seed + 1)
        return {
            "x": draw(p.input_shape, seed),
            "weight": weight if exact else weight / np.float32(np.sqrt(p.gemm_k)),
            "bias": draw((p.K,), seed + 2) if self.bias else None,
            "residual": draw(p.output_shape, seed + 3) if self.residual else None,
        }


def torch_conv2d(arrays: Mapping[str, np.ndarray | None], arguments: Mapping[str, Any]) -> np.ndarray:
    """``Ops.conv2d`` in torch, computed in float64, rounded to float32: NHWC and KRSC in, NPQK out."""
    tensors = {name: None if array is None else torch.from_numpy(array).double() for name, array in arrays.items()}
    options = {name: value for name, value in arguments.items() if name != "relu"}
    x, weight, bias, residual = (tensors[name] for name in ("x", "weight", "bias", "residual"))
    assert x is not None
    assert weight is not None
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), bias, **options).permute(0, 2, 3, 1)
    if residual is not None:
        y = y + residual
    if arguments["relu"]:
        y = F.relu(y)
    return y.float().contiguous().numpy()


@st.composite
def conv_cases(draw: st.DrawFn) -> ConvCase:
    """Any small convolution: odd sizes, empty batches, groups, dilation, padding beyond the filter."""
    pairs = st.tuples
    R, S = draw(pairs(st.integers(1, 5), st.integers(1, 5)))
    pad_h, pad_w = draw(pairs(st.integers(0, 6), st.integers(0, 6)))
    dilation_h, dilation_w = draw(pairs(st.integers(1, 3), st.integers(1, 3)))
    stride_h, stride_w = draw(pairs(st.integers(1, 3), st.integers(1, 3)))
    groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    problem = Conv2dProblem(
        N=draw(st.integers(0, 3)),
        H=max(1, dilation_h * (R - 1) + 1 - 2 * pad_h) + draw(st.integers(0, 9)),
        W=max(1, dilation_w * (S - 1) + 1 - 2 * pad_w) + draw(st.integers(0, 9)),
        C=groups * draw(st.integers(1, 9)),
        K=groups * draw(st.integers(1, 9)),
        R=R,
        S=S,
        stride_h=stride_h,
        stride_w=stride_w,
        pad_h=pad_h,
        pad_w=pad_w,
        dilation_h=dilation_h,
        dilation_w=dilation_w,
        groups=groups,
    )
    bias, residual, relu = draw(pairs(st.booleans(), st.booleans(), st.booleans()))
    return ConvCase(problem, bias, residual, relu)


def conv_shapes(data_folder: Path, batch: int | None = None) -> dict[str, Conv2dProblem]:
    """The rows of conv_shapes.csv by name, with their own batch size or `batch`."""
    problems = {}
    with (data_folder / "conv_shapes.csv").open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            sizes = {key.upper(): int(row[key]) for key in ("n", "h", "w", "c", "k", "r", "s")}
            fields = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups")
            sizes["N"] = sizes["N"] if batch is None else batch
            problems[f"{number}:{row['name']}"] = Conv2dProblem(**sizes, **{field: int(row[field]) for field in fields})
    return problems


class CifarBlock(nn.Module):
    """The residual block of He et al. section 4.2, with option-A shortcut."""

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.new_channels = planes - channels
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        half = self.new_channels // 2
        return F.relu(y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half)))


class CifarResNet(nn.Module):
    """The networks of He et al. section 4.2, re-implemented for comparison."""

    def __init__(self, blocks: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stem = nn.ReLU()
        for stage, (channels, planes) in enumerate([(16, 16), (16, 32), (32, 64)], start=1):
            first = CifarBlock(channels, planes, 1 if stage == 1 else 2)
            rest = [CifarBlock(planes, planes, 1) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(first, *rest))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(self.avgpool(x), 1))


def torch_model(name: str, state: Mapping[str, np.ndarray] | None = None) -> nn.Module:
    """torch's own network in eval mode, sizes taken from `state`, which must fit exactly."""
    sizes = {}
    if state is not None:
        head = state["linear.weight" if name in CIFAR_DEPTHS else "fc.weight"]
        sizes = {"num_classes": head.shape[0], "in_channels": state["conv1.weight"].shape[1]}
    if name in CIFAR_DEPTHS:
        model: nn.Module = CifarResNet(CIFAR_DEPTHS[name], **sizes)
    else:
        in_channels = sizes.pop("in_channels", 3)
        # Its own initialisation is overwritten at once and takes seconds on the large networks.
        with torch.device("meta"):
            model = torchvision.models.get_model(name, weights=None, **sizes)
        model.to_empty(device="cpu")
        if in_channels != 3:
            model.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
    if state is not None:
        outcome = model.load_state_dict({key: torch.from_numpy(array) for key, array in state.items()}, strict=False)
        assert not outcome.unexpected_keys
        assert all(key.endswith("num_batches_tracked") for key in outcome.missing_keys)
    return model.eval()


def torch_checkpoints(name: str, model: nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    """Runs a model of `torch_model` and records, by forward hooks, what ``Model.checkpoints`` names."""
    found: dict[str, np.ndarray] = {}

    def record(key: str) -> Any:
        return lambda _module, _inputs, output: found.update({key: output.flatten(1) if key == "gap" else output})

    modules = dict(model.named_modules())
    points = {"stem": "stem" if name in CIFAR_DEPTHS else "maxpool"}
    points |= {key: key for key in modules if key.startswith("layer") and key.count(".") == 1}
    points |= {"gap": "avgpool", "logits": "linear" if name in CIFAR_DEPTHS else "fc"}
    handles = [modules[module].register_forward_hook(record(key)) for key, module in points.items()]
    with torch.inference_mode():
        model(x)
    for handle in handles:
        handle.remove()
    return {key: tensor.numpy() for key, tensor in found.items()}


def cifar_images(data_folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The 200 lossless CIFAR-10 test images, normalised, (200, 3, 32, 32) float32, and their labels."""
    with np.load(data_folder / "cifar10" / "test200_lossless.npz", allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    scaled = images.astype(np.float32) / np.float32(255)
    normalized = (scaled - np.asarray(CIFAR_MEAN, np.float32)) / np.asarray(CIFAR_STD, np.float32)
    return np.ascontiguousarray(normalized.transpose(0, 3, 1, 2)), labels


def photographs(data_folder: Path, indices: range | list[int]) -> np.ndarray:
    """Some of the 200 photographs, preprocessed by torchvision's IMAGENET1K_V1 transforms: (n, 3, 224, 224)."""
    from PIL import Image

    transform = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    with (data_folder / "imagenet" / "labels.csv").open(newline="") as file:
        names = [row["file"] for row in csv.DictReader(file)]
    images = []
    for index in indices:
        with Image.open(data_folder / "imagenet" / "photos" / names[index]) as image:
            images.append(transform(image.convert("RGB")).numpy())
    return np.stack(images)
