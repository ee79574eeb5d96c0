"""Whole networks on the CUDA engine: torch's answers on real photographs, and the NumPy engine's on everything."""

import gc
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, cifar_images, normal

import cupy_resnet
from cupy_resnet import networks
from cupy_resnet.checkpoints import read_state_dict
from gpu.half import (
    KERNELS,
    TIMES_TORCHS_ERROR,
    all_photographs,
    assert_half,
    eager_error,
    error_on_photographs,
    relative_error,
)

pytestmark = pytest.mark.gpu

CIFAR = [
    name for name in cupy_resnet.list_models() if name in ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
]
IMAGENET = [name for name in cupy_resnet.list_models() if name not in CIFAR]


def random_weights(name: str, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """A state dict of plausible random weights."""
    return networks.random_state_dict(networks.describe(name, **sizes), seed)


@pytest.mark.parametrize(("kernel", "precision"), KERNELS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchs_answers_on_200_photographs(name: str, kernel: str, precision: str, data_folder: Path) -> None:
    expected = np.load(data_folder / "imagenet" / f"{name}_torch_logits.npy")
    weights = data_folder / "imagenet" / f"{name}_state_dict.npz"
    images = all_photographs(data_folder)
    with cupy_resnet.load(name, weights=weights, engine="cuda", kernel=kernel, precision=precision) as model:
        logits = np.concatenate([model(images[i : i + 50]) for i in range(0, 200, 50)])
    if precision == "fp16":
        assert_half(logits, expected, error_on_photographs(name, data_folder))
    else:
        assert np.abs(logits - expected).max() < 1e-3
        assert (logits.argmax(1) == expected.argmax(1)).sum() == 200


@lru_cache(maxsize=1)
def cifar(data_folder: Path) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray, float]:
    """resnet20's weights, the lossless images and their labels, the NumPy engine's logits, torch's error in fp16."""
    images, labels = cifar_images(data_folder)
    weights = data_folder / "cifar10" / "resnet20_state_dict.npz"
    expected = cupy_resnet.load("resnet20", weights=weights, engine="numpy")(images)
    torchs_error = eager_error("resnet20", read_state_dict(weights), images, expected)
    return weights, images, labels, expected, torchs_error


@pytest.mark.parametrize(("kernel", "precision"), KERNELS)
def test_cifar_resnet20_on_the_lossless_images(kernel: str, precision: str, data_folder: Path) -> None:
    weights, images, labels, expected, torchs_error = cifar(data_folder)
    model = cupy_resnet.load("resnet20", weights=weights, engine="cuda", kernel=kernel, precision=precision)
    logits = model(images)
    if precision == "fp16":
        assert_half(logits, expected, torchs_error)
    else:
        assert_close(logits, expected, rtol=1e-4, atol=1e-4)  # logits up to 20 after 20 layers
        assert (logits.argmax(1) == expected.argmax(1)).all()
    assert (logits.argmax(1) == labels).mean() > 0.88


@lru_cache(maxsize=1)  # tests come network by network
def on_the_numpy_engine(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, float]:
    """Random weights, images, their logits, torch's error in fp16."""
    state = random_weights(name, seed=1)
    # So many images that the error of fp16 is not that of a few logits.
    x = normal((32, 3, 32, 32) if name in CIFAR else (2, 3, 64, 64))
    expected = cupy_resnet.load(name, weights=state, engine="numpy")(x)
    return state, x, expected, eager_error(name, state, x, expected)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", [*CIFAR, *IMAGENET])
def test_every_network_agrees_with_the_numpy_engine(name: str, fuse: bool, precision: str) -> None:
    state, x, expected, torchs_error = on_the_numpy_engine(name)
    with cupy_resnet.load(name, weights=state, engine="cuda", fuse=fuse, precision=precision) as model:
        error = relative_error(model(x), expected)
    # Without fusion fp16 rounds as often as torch does, but not in the same kernels.
    bound = 1e-5 if precision == "fp32" else TIMES_TORCHS_ERROR * torchs_error * (1 if fuse else 2)
    assert error < bound, f"relative error {error:.2e}, torch's in fp16 is {torchs_error:.2e}"


def test_checkpoints_agree_between_engines() -> None:
    state = random_weights("resnet18", seed=2)
    x = normal((2, 3, 64, 64))
    on_cpu = cupy_resnet.load("resnet18", weights=state, engine="numpy").checkpoints(x)
    on_gpu = cupy_resnet.load("resnet18", weights=state, engine="cuda", precision="fp32").checkpoints(x)
    assert list(on_cpu) == list(on_gpu)
    for name, expected in on_cpu.items():
        error = np.linalg.norm(on_gpu[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, f"{name}: relative error {error}"


@pytest.mark.parametrize("size", [(33, 47), (96, 64), (225, 223)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_odd_sizes_channels_and_classes(size: tuple[int, int], channels: int) -> None:
    state = random_weights("resnet18", seed=3, num_classes=7, in_channels=channels)
    x = normal((3, channels, *size))
    expected = cupy_resnet.load("resnet18", weights=state, engine="numpy")(x)
    logits = cupy_resnet.load("resnet18", weights=state, engine="cuda", precision="fp32")(x)
    assert logits.shape == (3, 7)
    assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 1e-5


def test_an_empty_batch_gives_an_empty_answer() -> None:
    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="cuda")
    assert model(np.zeros((0, 3, 224, 224), np.float32)).shape == (0, 1000)


@pytest.mark.parametrize(("kernel", "precision"), KERNELS)
def test_a_nan_in_the_image_reaches_the_logits(kernel: str, precision: str) -> None:
    x = normal((2, 3, 64, 64))
    x[0, 1, 30, 30] = np.nan
    state = random_weights("resnet18", seed=0)
    logits = cupy_resnet.load("resnet18", weights=state, engine="cuda", kernel=kernel, precision=precision)(x)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


def test_torch_tensors_on_the_gpu_come_back_as_such() -> None:
    import torch

    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="cuda")
    x = torch.randn(2, 3, 64, 64, device="cuda")
    y = model(x)
    assert isinstance(y, torch.Tensor)
    assert y.device == x.device
    assert y.dtype == torch.float32
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), y, rtol=0, atol=0)
    torch.testing.assert_close(model(x.cpu()), y.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(model(x.clone().requires_grad_()), y, rtol=0, atol=0)


def test_work_is_ordered_with_torchs_current_stream() -> None:
    """An input still being computed on torch's side stream is seen complete, and the result is ready there."""
    import torch

    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="cuda")
    good = torch.randn(8, 3, 224, 224, device="cuda")
    expected = model(good)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(side):
            x = torch.zeros_like(good)
            for _ in range(5):
                big = big @ big / 64
            x.copy_(good)
            y = model(x) + 0
        side.synchronize()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_a_fresh_model_is_right_on_every_stream_at_once() -> None:
    """Weights and what kernels derive from them on first use are complete before another stream sees them."""
    import cupy

    x = cupy.random.RandomState(0).standard_normal((4, 3, 224, 224)).astype(cupy.float32)
    state = random_weights("resnet18", seed=0)
    expected = cupy_resnet.load("resnet18", weights=state, engine="cuda")(x)
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        model = cupy_resnet.load("resnet18", weights=state, engine="cuda")
        results: dict[int, Any] = {}

        def work(index: int, model: Any = model, results: dict[int, Any] = results) -> None:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                results[index] = model(x)
                stream.synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(cupy.array_equal(results[i], expected) for i in range(4))


def test_cupy_arrays_come_back_as_such() -> None:
    import cupy

    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="cuda")
    x = cupy.random.standard_normal((2, 3, 64, 64), dtype=cupy.float32)
    logits, features = model.logits_and_features(x)
    assert isinstance(logits, cupy.ndarray)
    assert features.shape == (2, 512)
    assert cupy.array_equal(model(x), logits)


def test_a_cupy_array_on_the_numpy_engine_comes_back_to_the_gpu() -> None:
    import cupy

    x = normal((2, 3, 64, 64))
    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="numpy")
    logits = model(cupy.asarray(x))
    assert isinstance(logits, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(logits), model(x))


def test_an_empty_torch_batch_gives_an_empty_tensor() -> None:
    import torch

    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="cuda")
    logits = model(torch.zeros(0, 3, 64, 64, device="cuda"))
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (0, 1000)
    assert logits.is_cuda


def test_results_do_not_alias_and_repeat_bit_for_bit() -> None:
    import torch

    model = cupy_resnet.load("resnet18", weights=random_weights("resnet18", seed=0), engine="cuda")
    x = torch.randn(4, 3, 64, 64, device="cuda")
    first = model(x)
    kept = first.clone()
    second = model(x)
    model(-x)
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)


@pytest.mark.alone
@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("fp16", 2)])
def test_close_returns_the_memory(precision: str, itemsize: int) -> None:
    import cupy

    state = random_weights("resnet50", seed=0)
    filters = itemsize * sum(array.size for array in state.values() if array.ndim == 4)
    pool = cupy.get_default_memory_pool()
    gc.collect()  # models of tests before this one
    before = pool.used_bytes()
    model = cupy_resnet.load("resnet50", weights=state, engine="cuda", precision=precision)
    model.warmup(8)
    assert pool.used_bytes() >= before + filters
    model.close()
    assert pool.used_bytes() <= before
    with pytest.raises(RuntimeError, match="closed"):
        model(normal((1, 3, 64, 64)))


def test_explain_names_what_runs() -> None:
    state = random_weights("resnet18", seed=0)
    model = cupy_resnet.load("resnet18", weights=state, engine="cuda", kernel="conv2d_winograd")
    text = str(model.explain((8, 3, 224, 224)))
    assert "conv2d_winograd" in text
    assert "stride" in text  # why the strided layers fell back
