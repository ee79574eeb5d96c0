"""Real photographs and CIFAR images through trained weights on the NumPy engine. Needs the data folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import cifar_images, photographs, torch_model

import cupy_resnet
from cupy_resnet.checkpoints import read_state_dict


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("name", "indices"), [("resnet18", range(0, 200, 17)), ("resnet50", range(3, 200, 50))])
def test_photographs_give_torchs_logits(data_folder: Path, name: str, indices: range, fuse: bool) -> None:
    weights = data_folder / "imagenet" / f"{name}_state_dict.npz"
    expected = np.load(data_folder / "imagenet" / f"{name}_torch_logits.npy")[list(indices)]
    model = cupy_resnet.load(name, weights, engine="numpy", fuse=fuse)
    logits = model(photographs(data_folder, indices))
    assert np.abs(logits - expected).max() < 1e-3
    np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


def test_cifar_images(data_folder: Path, record_property: pytest.FixtureRequest) -> None:
    images, labels = cifar_images(data_folder)
    weights = data_folder / "cifar10" / "resnet20_state_dict.npz"
    with torch.inference_mode():
        expected = torch_model("resnet20", read_state_dict(weights))(torch.from_numpy(images)).numpy()
    for fuse in (True, False):
        logits = cupy_resnet.load("resnet20", weights, engine="numpy", fuse=fuse)(images)
        assert np.abs(logits - expected).max() < 1e-3
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))
        accuracy = (logits.argmax(1) == labels).mean()
        record_property("accuracy", float(accuracy))
        assert accuracy > 0.88
