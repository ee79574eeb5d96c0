"""Whole networks in every precision: as accurate as torch's own in it, and torch's answers on real photographs."""

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import normal, photographs, torch_model

import cupy_resnet
from cupy_resnet import networks
from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.prediction import NotFiniteError
from gpu.reference import tf32

pytestmark = pytest.mark.gpu

NETWORKS = {"resnet20": (16, 32), "resnet18": (8, 224), "resnet50": (8, 224), "resnext50_32x4d": (8, 224)}
"""Name → images and their size."""

TIMES_TORCHS_ERROR = {"fp32": 4.0, "fp32-tc": 1.1, "tf32": 2.0, "fp16": 2.0, "bf16": 2.0}
"""How far our logits may be from float64, in multiples of what torch's eager network in the same precision is: cuDNN in
fp32 with TF32 off for fp32-tc. In fp32 some layers are Winograd's, whose transforms cost accuracy."""


@lru_cache(maxsize=1)  # tests come network by network
def reference(name: str) -> tuple[dict[str, np.ndarray], Any, Any, np.ndarray]:
    """Weights, torch's network with them on the GPU, images, and its logits in float64."""
    import torch

    state = networks.random_state_dict(networks.describe(name), seed=4)
    network = torch_model(name, state).cuda()
    N, size = NETWORKS[name]
    x = torch.from_numpy(normal((N, 3, size, size), seed=5)).cuda()
    with torch.inference_mode():
        exact = copy.deepcopy(network).double()(x.double()).cpu().numpy()
    return state, network, x, exact


def relative_error(logits: Any, exact: np.ndarray) -> float:
    """‖y − y64‖ / ‖y64‖."""
    return float(np.linalg.norm(np.asarray(logits, np.float64) - exact) / np.linalg.norm(exact))


def eager_error(name: str, precision: str) -> float:
    """Of torch's network in the same precision."""
    import torch

    _, network, x, exact = reference(name)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    with torch.inference_mode(), tf32(allowed=precision == "tf32"):
        return relative_error(copy.deepcopy(network).to(dtype)(x.to(dtype)).double().cpu().numpy(), exact)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_as_accurate_as_torch_in_the_same_precision(name: str, precision: str) -> None:
    state, _, x, exact = reference(name)
    allowed = TIMES_TORCHS_ERROR[precision] * eager_error(name, precision)
    errors = {}
    for fuse in (True, False):
        with cupy_resnet.load(name, weights=state, engine="cuda", precision=precision, fuse=fuse) as model:
            errors[fuse] = relative_error(model(x).cpu().numpy(), exact)
    assert errors[True] <= allowed, f"{errors[True]:.2e}, at most {allowed:.2e} is allowed"
    # Without fusion BatchNorm and sums are rounded as often as in torch, but not by the same kernels.
    assert errors[False] <= 2 * allowed, f"unfused {errors[False]:.2e}, at most {2 * allowed:.2e} is allowed"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_images_logits_do_not_depend_on_its_place(precision: str) -> None:
    """Bit for bit, among other images; and twice the same."""
    for name, size in (("resnet20", 32), ("resnet50", 64), ("resnext50_32x4d", 64)):
        state = networks.random_state_dict(networks.describe(name), seed=6)
        x = normal((7, 3, size, size), seed=7)
        x[3] = x[6] = x[0]
        with cupy_resnet.load(name, weights=state, engine="cuda", precision=precision) as model:
            first = model(x)
            np.testing.assert_array_equal(first[3], first[0], err_msg=name)
            np.testing.assert_array_equal(first[6], first[0], err_msg=name)
            for _ in range(3):
                np.testing.assert_array_equal(model(x), first, err_msg=name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_batches_odd_sizes_and_other_channels(precision: str) -> None:
    for channels, size in ((3, (33, 47)), (1, (70, 64)), (5, (32, 45))):  # the stem's own kernel, and its parts
        state = networks.random_state_dict(networks.describe("resnet18", num_classes=7, in_channels=channels), seed=3)
        x = normal((3, channels, *size))
        expected = cupy_resnet.load("resnet18", weights=state, engine="numpy")(x)
        with cupy_resnet.load("resnet18", weights=state, engine="cuda", precision=precision) as model:
            logits, features = model.logits_and_features(x)
            empty = model.logits_and_features(x[:0])
        assert [a.shape for a in (logits, features, *empty)] == [(3, 7), (3, 512), (0, 7), (0, 512)]
        assert logits.dtype == features.dtype == np.float32
        bound = {"fp32": 1e-5, "fp32-tc": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}[precision]
        assert relative_error(logits, expected) < bound


AGREEMENT = {"fp32": 200, "fp32-tc": 200, "tf32": 199, "fp16": 199, "bf16": 190}
"""Of 200 photographs: how many must have torch's top-1 in fp32."""


@lru_cache(maxsize=1)
def all_photographs(data_folder: Path) -> np.ndarray:
    return photographs(data_folder, range(200))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchs_top_1_on_200_photographs(name: str, precision: str, data_folder: Path) -> None:
    expected = np.load(data_folder / "imagenet" / f"{name}_torch_logits.npy")
    weights = data_folder / "imagenet" / f"{name}_state_dict.npz"
    images = all_photographs(data_folder)
    with cupy_resnet.load(name, weights=weights, engine="cuda", precision=precision) as model:
        logits = np.concatenate([model(images[i : i + 50]) for i in range(0, 200, 50)])
    same = int((logits.argmax(1) == expected.argmax(1)).sum())
    error = np.abs(logits - expected).max()
    assert same >= AGREEMENT[precision], f"{same} of 200 agree, largest difference of a logit {error:.2e}"
    print(f"{name} in {precision}: {same} of 200 agree, largest difference of a logit {error:.2e}")
    if precision in ("fp32", "fp32-tc"):
        assert error < 1e-3


def test_auto_is_fp16_and_a_kernel_of_another_precision_decides() -> None:
    state = networks.random_state_dict(networks.describe("resnet20"), seed=0)

    def precision_of(**options: Any) -> str:
        with cupy_resnet.load("resnet20", weights=state, engine="cuda", **options) as model:
            return model.precision

    assert precision_of() == precision_of(precision="auto") == "fp16"
    assert precision_of(kernel="conv2d_mma") == "fp16"
    assert precision_of(kernel="conv2d_implicit_gemm") == "fp32"
    for precision in PRECISIONS:
        assert precision_of(precision=precision) == precision


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_value_beyond_the_type_is_named_by_its_layer(precision: str) -> None:
    """Folded weights are fine, but activations of layer2.0 leave the range of the type."""
    scale = {"fp16": 3e3, "bf16": 1e25}[precision]
    state = networks.random_state_dict(networks.describe("resnet20"), seed=6)
    for key in ("layer2.0.bn1.weight", "layer2.0.bn2.weight"):
        state[key] = np.full_like(state[key], scale)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    model = cupy_resnet.load("resnet20", weights=state, engine="cuda", precision=precision, resize=32, crop=32)
    with pytest.raises(NotFiniteError, match=r"image 0: .* in the output of layer2\.0"):
        model.predict(pixels)
