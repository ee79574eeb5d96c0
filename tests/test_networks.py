"""The graphs against torchvision's own networks, and the CIFAR family against a small re-implementation."""

import numpy as np
import pytest
import torch
from helpers import CIFAR_DEPTHS, assert_close, normal, torch_checkpoints, torch_model

from cupy_resnet.binding import bind, bind_shapes
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine
from cupy_resnet.networks import describe, list_models, matching_models, random_state_dict

TORCHVISION = [name for name in list_models() if name not in CIFAR_DEPTHS]


def test_list_models_is_the_two_families() -> None:
    assert TORCHVISION == [
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50_32x4d",
        "resnext101_32x8d",
        "resnext101_64x4d",
        "wide_resnet50_2",
        "wide_resnet101_2",
    ]
    assert list_models()[len(TORCHVISION) :] == ["resnet20", "resnet32", "resnet44", "resnet56", "resnet110"]


@pytest.mark.parametrize("name", list_models())
def test_tensor_table_is_torchs_state_dict(name: str) -> None:
    with torch.device("meta"):
        state = torch_model(name).state_dict() if name in CIFAR_DEPTHS else _meta_state_dict(name)
    expected = {key: tuple(t.shape) for key, t in state.items() if not key.endswith("num_batches_tracked")}
    table = describe(name).tensor_table()
    assert table == expected
    assert list(table) == list(expected)
    assert matching_models(table) == [name]


def _meta_state_dict(name: str) -> dict[str, torch.Tensor]:
    import torchvision

    return torchvision.models.get_model(name, weights=None).state_dict()


@pytest.mark.parametrize("name", list_models())
def test_checkpoints_equal_torchs_in_float64(name: str) -> None:
    """Fused and unfused, in float64 on both sides: any slip in the graph is far above the tolerance of 1e-7."""
    state = random_state_dict(describe(name), seed=1)
    size = 40 if name in TORCHVISION else 32
    x = normal((1, 3, size, size)).astype(np.float64)
    expected = torch_checkpoints(name, torch_model(name, state).double(), torch.from_numpy(x))
    # What the whole comparison rests on: activations that neither vanish nor explode, logits that differ.
    assert all(0.05 < np.abs(value).mean() < 100 for value in expected.values())
    ops = NumpyEngine("float64")
    for fuse in (True, False):
        found: dict[str, np.ndarray] = {}
        network = bind(describe(name), state, ops, fuse=fuse)
        logits, features = network(ops, ops.nchw_to_nhwc(x), lambda key, value, found=found: found.update({key: value}))
        assert list(found) == list(expected) == list(network.checkpoint_names)
        np.testing.assert_array_equal(found["logits"], logits)
        np.testing.assert_array_equal(found["gap"], features)
        for key, value in found.items():
            assert_close(value.transpose(0, 3, 1, 2) if value.ndim == 4 else value, expected[key])


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "resnet20", "resnet110"])
def test_float32_is_as_near_to_float64_as_torchs_float32(name: str, fuse: bool) -> None:
    state = random_state_dict(describe(name), seed=2)
    x = normal((2, 3, 64, 64), 3)
    model = torch_model(name, state)
    with torch.inference_mode():
        torch32 = model(torch.from_numpy(x)).numpy()
        exact = model.double()(torch.from_numpy(x).double()).numpy()
    ops = NumpyEngine()
    logits, _ = bind(describe(name), state, ops, fuse=fuse)(ops, ops.nchw_to_nhwc(x))
    scale = np.abs(exact).max()
    assert np.abs(logits - exact).max() < max(3 * np.abs(torch32 - exact).max(), 2e-6 * scale)


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "resnet20"])
@pytest.mark.parametrize(
    ("shape", "num_classes"), [((2, 1, 75, 53), 3), ((1, 5, 33, 32), 1), ((3, 3, 1, 1), 7), ((0, 3, 64, 48), 10)]
)
def test_any_size_channels_and_classes(name: str, shape: tuple[int, ...], num_classes: int) -> None:
    network = describe(name, num_classes=num_classes, in_channels=shape[1])
    state = random_state_dict(network, seed=4)
    x = normal(shape).astype(np.float64)
    with torch.inference_mode():
        expected = torch_model(name, state).double()(torch.from_numpy(x)).numpy()
    ops = NumpyEngine("float64")
    network.check_input(shape)
    logits, features = bind(network, state, ops)(ops, ops.nchw_to_nhwc(x))
    assert features.shape == (shape[0], network.num_features)
    assert_close(logits, expected)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet20"])
def test_what_runs_fused_and_unfused(name: str, fuse: bool) -> None:
    """Fused, every convolution is one call; unfused, each BatchNorm, add and ReLU is a call of its own."""
    network, ops = describe(name), ShapeEngine()
    bind_shapes(network, fuse=fuse)(ops, ShapeArray((1, 64, 64, 3)))
    counts: dict[str, int] = {}
    for record in ops.records:
        counts[record.op] = counts.get(record.op, 0) + 1
    convolutions = sum(1 for _ in network.layers()) - 1
    blocks = len(network.blocks)
    per_block = 3 if name == "resnet50" else 2
    assert counts["conv2d"] == convolutions
    unfused = {"batch_norm2d": convolutions, "add": blocks, "relu": 1 + blocks * per_block}
    for op, count in unfused.items():
        assert counts.get(op, 0) == (0 if fuse else count)
    epilogues = [record.epilogue for record in ops.records if record.op == "conv2d"]
    assert epilogues.count(("bias", "residual", "relu")) == (blocks if fuse else 0)
    downsamples = {"resnet18": 3, "resnet50": 4, "resnet20": 0}[name]  # whose bias is in that of what they are added to
    assert epilogues.count(()) == (downsamples if fuse else convolutions)
    assert [r.layer for r in ops.records if r.op == "conv2d"].count("layer1.0.conv1") == 1


def test_flops_are_the_published_ones() -> None:
    """torchvision publishes 1.814, 4.089 and 11.514 billion multiply-adds at 224×224."""
    for name, published in {"resnet18": 1.814e9, "resnet50": 4.089e9, "resnet152": 11.514e9}.items():
        ops = ShapeEngine()
        bind_shapes(describe(name))(ops, ShapeArray((1, 224, 224, 3)))
        convolutions = sum(record.problem.flops for record in ops.records if record.problem) / 2
        linear = 2048 * 1000 if name != "resnet18" else 512 * 1000
        assert convolutions + linear == pytest.approx(published, rel=5e-4)


def test_describing_is_cheap_and_weights_are_reproducible() -> None:
    network = describe("resnet20")
    assert all(layer.weight is None for layer in network.layers())
    first, again, other = (random_state_dict(network, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert not np.array_equal(first["conv1.weight"], other["conv1.weight"])
    assert {key: array.shape for key, array in first.items()} == network.tensor_table()
    assert all(array.dtype == np.float32 for array in first.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: describe("resnet-51"), r"unknown model 'resnet-51'\. Did you mean .*'resnet50'.*\? Valid: resnet18, "),
        (lambda: describe("ResNet-50"), r"Did you mean 'resnet50'\?"),
        (lambda: describe("vgg"), r"unknown model 'vgg'\. Valid: resnet18"),
        (lambda: describe("resnet18", num_classes=0), "num_classes must be at least 1, got 0"),
        (lambda: describe("resnet18").check_input((1, 3, 0, 5)), "smallest image is 1×1"),
        (lambda: describe("resnet18").check_input((3, 5, 5)), r"pass x\[None\]"),
        (lambda: describe("resnet18").check_input((1, 5, 5, 3)), r"looks like \(N, H, W, C\)"),
        (lambda: describe("resnet18").check_input((1, 4, 5, 5)), r"\(1, 4, 5, 5\), expected \(N, 3, H, W\)$"),
        (lambda: describe("resnet18").check_input((4,)), r"\(4,\), expected \(N, 3, H, W\)"),
    ],
)
def test_errors_say_what_would_be_right(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
