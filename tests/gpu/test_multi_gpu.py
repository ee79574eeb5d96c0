"""Two GPUs: everything runs where the model's weights are, whichever device is current, and from several threads.

Marked `multi_gpu`, not `gpu`: the GPU record comes from a machine with one. ``pytest -m multi_gpu`` runs them.
"""

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from helpers import normal

import cupy_resnet
from cupy_resnet import networks
from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.errors import EngineUnavailableError

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    import cupy

    assert cupy.cuda.runtime.getDeviceCount() >= 2, "these tests need two GPUs"
    assert cupy.cuda.runtime.getDevice() == 0, "a test before left another device current"


@lru_cache
def weights(name: str) -> dict[str, np.ndarray]:
    return networks.random_state_dict(networks.describe(name), seed=0)


def load(name: str = "resnet18", **options: Any) -> cupy_resnet.Model:
    return cupy_resnet.load(name, weights=weights(name), **{"engine": "cuda", "precision": "fp16", **options})


X = normal((3, 3, 64, 64), seed=1)


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_on_device_1_while_device_0_is_current(precision: str, plan: bool) -> None:
    import cupy

    here, there = (load(precision=precision, plan=plan, device=device) for device in (0, 1))
    expected = here(X)
    for _ in range(3):
        np.testing.assert_array_equal(there(X), expected)
        assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        x = cupy.asarray(X)
    logits, features = there.logits_and_features(x)
    assert logits.device.id == features.device.id == 1
    np.testing.assert_array_equal(cupy.asnumpy(logits), expected)
    assert cupy.cuda.runtime.getDevice() == 0


def test_predict_and_checkpoints_on_device_1() -> None:
    import cupy

    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 40, 3), np.uint8)
    here, there = load(device=0, resize=64, crop=64), load(device=1, resize=64, crop=64)
    for got, want in zip(there.predict(pixels, batch_size=2), here.predict(pixels, batch_size=2), strict=True):
        np.testing.assert_array_equal(got.logits, want.logits)
    for name, value in there.checkpoints(X).items():
        np.testing.assert_array_equal(value, here.checkpoints(X, [name])[name], err_msg=name)
    assert cupy.cuda.runtime.getDevice() == 0


def test_torch_tensors_on_device_1() -> None:
    import torch

    model = load(device=1)
    expected = load(device=0)(X)
    x = torch.from_numpy(X).to("cuda:1")
    side = torch.cuda.Stream(device=1)
    for stream in (torch.cuda.current_stream(1), side):
        stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.device(1), torch.cuda.stream(stream):
            y = model(x)
        stream.synchronize()
        assert y.device == x.device
        np.testing.assert_array_equal(y.cpu().numpy(), expected)
    with torch.cuda.device(0):
        np.testing.assert_array_equal(model(x).cpu().numpy(), expected)
        assert torch.cuda.current_device() == 0


def test_arrays_on_the_wrong_device_are_refused() -> None:
    import cupy
    import torch

    model = load(device=1)
    x = cupy.asarray(X)
    with pytest.raises(ValueError, match="x is on GPU 0, but the model's weights are on GPU 1"):
        model(x)
    with pytest.raises(ValueError, match="x is on GPU 0, but the model's weights are on GPU 1"):
        model(torch.from_numpy(X).to("cuda:0"))
    with cupy.cuda.Device(1):
        there = cupy.asarray(X)
    with pytest.raises(ValueError, match="out must be on the device of x"):
        model(there, out=cupy.empty((3, 1000), cupy.float32))
    with pytest.raises(EngineUnavailableError, match=r"there is no GPU 99; this machine has \d+"):
        load(device=99)
    assert model(there).device.id == 1


@pytest.mark.parametrize("plan", [True, False])
def test_models_on_both_devices_from_two_threads(plan: bool) -> None:
    """Each thread has its own current device, whichever the models' are."""
    import cupy

    models = [load(device=device, plan=plan) for device in (0, 1)]
    inputs = [normal((N, 3, 64, 64), seed=N) for N in (1, 2, 5)]
    expected = [load(device=0, plan=False)(x) for x in inputs]
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            with cupy.cuda.Device(index):
                for turn in range(20):
                    i = (turn + index) % len(inputs)
                    model = models[turn % 2]
                    with cupy.cuda.Device(turn % 2):
                        x = cupy.asarray(inputs[i])
                    with x.device:
                        result = cupy.asnumpy(model(x))
                    if not np.array_equal(result, expected[i]):
                        failures.append(f"thread {index}, turn {turn}: input {i} on GPU {turn % 2}")
                assert cupy.cuda.runtime.getDevice() == index
        except BaseException as error:
            failures.append(f"thread {index}: {error!r}")
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_closing_one_leaves_the_other_alone() -> None:
    here, there = load(device=0), load(device=1)
    expected = here(X)
    there(X)
    here.close()
    np.testing.assert_array_equal(there(X), expected)
