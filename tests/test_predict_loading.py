"""What `load` takes over from the weights, and which models the function `predict` keeps."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from predict_support import CLASSES, SMALL, STATE, pixels, small_model

import cupy_resnet
from cupy_resnet import loading, predicting, resources
from cupy_resnet.errors import CheckpointError
from cupy_resnet.images import Transforms
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.weights_store import convert, resolving

CIFAR = Transforms.preset("CIFAR10")


@pytest.fixture(autouse=True)
def no_models_kept() -> Iterator[None]:
    predicting.forget_models()
    yield
    predicting.forget_models()


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights that holds resnet20-cifar10 in place of the package's own."""
    found = resources.folder

    def folder(name: str) -> Path:
        return tmp_path if name == "weights" else found(name)

    monkeypatch.setattr(resolving, "folder", folder)
    return convert(
        "resnet20", STATE, tmp_path / "resnet20-cifar10.safetensors", dtype="float16", categories=CLASSES,
        preset="CIFAR10", source="a test",
    )  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of weights on its own."""
    np.savez(tmp_path / "w.npz", **STATE)
    return tmp_path / "w.npz"


def test_a_model_with_embedded_weights_loads_by_its_name(embedded: Path) -> None:
    model = cupy_resnet.load("resnet20-cifar10", engine="numpy")
    assert (model.name, model.weights_name, model.weights_source) == ("resnet20", "resnet20-cifar10", "a test")
    assert model.transforms == CIFAR
    assert model.categories == CLASSES
    assert model.wnids is None
    assert len(model.sha256) == 64
    image = pixels(0, 32, 32)
    (prediction,) = model.predict(image)
    assert prediction.label in CLASSES
    for arguments in ({"model": "resnet20-cifar10"}, {"model": "resnet20"}):
        (same,) = cupy_resnet.predict(image, engine="numpy", **arguments)
        np.testing.assert_array_equal(same.logits, prediction.logits)
    assert "resnet20-cifar10" not in cupy_resnet.list_models()


def test_a_files_own_metadata_and_what_replaces_it(weights: Path, tmp_path: Path) -> None:
    model = cupy_resnet.load("resnet20", weights, engine="numpy")
    assert model.transforms == Transforms.preset("IMAGENET1K_V1").replace(resize=32, crop=32)
    assert (model.categories, model.wnids) == (None, None)
    assert (model.weights_name, model.weights_source) == ("w.npz", "w.npz")
    converted = convert("resnet20", weights, tmp_path / "w.safetensors", categories=CLASSES, preset="CIFAR10")
    model = cupy_resnet.load("resnet20", converted, engine="numpy")
    assert model.transforms == CIFAR
    assert model.categories == CLASSES
    names = [name.upper() for name in CLASSES]
    model = cupy_resnet.load("resnet20", converted, engine="numpy", categories=names, resize=40, std=(1, 1, 1))
    assert model.transforms == CIFAR.replace(resize=40, std=(1, 1, 1))
    assert model.categories == names
    with pytest.raises(CheckpointError, match=r"2 categories for .*, whose classifier has 10 classes"):
        cupy_resnet.load("resnet20", converted, engine="numpy", categories=["a", "b"])


def test_a_mapping_has_neither_file_nor_hash() -> None:
    model = cupy_resnet.load("resnet20", STATE, engine="numpy")
    assert (model.sha256, model.weights_source) == ("", "a state dict")


def test_batch_norm_eps_is_the_arguments_else_the_weights(tmp_path: Path) -> None:
    x = np.ones((1, 3, 8, 8), np.float32)
    other = cupy_resnet.load("resnet20", STATE, engine="numpy", batch_norm_eps=0.1)(x)
    plain = cupy_resnet.load("resnet20", STATE, engine="numpy")(x)
    assert np.abs(other - plain).max() > 1e-3
    file = convert("resnet20", STATE, tmp_path / "w.safetensors", batch_norm_eps=0.1)
    np.testing.assert_array_equal(cupy_resnet.load("resnet20", file, engine="numpy")(x), other)
    np.testing.assert_array_equal(cupy_resnet.load("resnet20", file, engine="numpy", batch_norm_eps=1e-5)(x), plain)


def test_the_default_is_resnet18_with_torchvisions_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fetching them: the store is asked for them and hands out others."""
    asked = []
    resolve = loading.resolve
    state = random_state_dict(describe("resnet18"))

    def stored(model: str, weights: Any, **options: Any) -> Any:
        asked.append((model, weights))
        return resolve(model, state, **{**options, "resize": 32, "crop": 32})

    monkeypatch.setattr(loading, "resolve", stored)
    (prediction,) = cupy_resnet.predict(pixels(0), engine="numpy", categories="imagenet")
    assert asked == [("resnet18", None)]
    assert prediction.wnid.startswith("n")
    assert prediction.logits.shape == (1000,)


def test_predict_does_what_the_model_does(weights: Path) -> None:
    images = [pixels(seed) for seed in range(3)]
    options: dict[str, Any] = {"topk": 2, "features": True, "batch_size": 2}
    expected = small_model(categories=None).predict(images, **options)
    found = cupy_resnet.predict(images, model="resnet20", weights=weights, **SMALL, **options)
    assert isinstance(found, list)
    stream = cupy_resnet.predict(iter(images), model="resnet20", weights=weights, stream=True, **SMALL, **options)
    assert not isinstance(stream, list)
    for one, other, streamed in zip(expected, found, stream, strict=True):
        assert len(other.labels) == 2
        for prediction in (other, streamed):
            np.testing.assert_array_equal(prediction.logits, one.logits)
            np.testing.assert_array_equal(prediction.features, one.features)
    recorded = cupy_resnet.predict([b"x"], model="resnet20", weights=weights, on_error="record", **SMALL)
    assert recorded[0].error


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that `predict` loads, in order."""
    names: list[str] = []
    load = predicting.load

    def recorded(model: str, *arguments: Any, **options: Any) -> Any:
        names.append(model)
        time.sleep(0.05)  # so that threads meet here
        return load(model, *arguments, **options)

    monkeypatch.setattr(predicting, "load", recorded)
    return names


def test_models_are_kept_and_the_least_recent_goes_first(loads: list[str], weights: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "w32.npz", **random_state_dict(describe("resnet32")))
    np.savez(tmp_path / "w44.npz", **random_state_dict(describe("resnet44")))
    files = {"resnet20": weights, "resnet32": tmp_path / "w32.npz", "resnet44": tmp_path / "w44.npz"}

    def use(model: str, **options: Any) -> None:
        cupy_resnet.predict(pixels(0), model=model, weights=files[model], **(SMALL | options))

    use("resnet20")
    use("resnet20", mean=[0.5, 0.5, 0.5])
    assert loads == ["resnet20", "resnet20"]
    use("resnet20", mean=(0.5, 0.5, 0.5))
    use("resnet20")
    assert loads == ["resnet20"] * 2
    use("resnet32")
    use("resnet20")
    assert loads == ["resnet20", "resnet20", "resnet32"]
    use("resnet44")
    use("resnet20")
    assert loads == ["resnet20", "resnet20", "resnet32", "resnet44"]
    use("resnet32")
    assert loads[-1] == "resnet32"
    predicting.forget_models()
    use("resnet32")
    assert loads[-2:] == ["resnet32", "resnet32"]


def test_a_file_that_has_changed_is_loaded_again(loads: list[str], weights: Path) -> None:
    first = cupy_resnet.predict(pixels(0), model="resnet20", weights=weights, **SMALL)[0]
    np.savez(weights, **random_state_dict(describe("resnet20"), seed=9))
    second = cupy_resnet.predict(pixels(0), model="resnet20", weights=weights, **SMALL)[0]
    assert len(loads) == 2
    assert np.abs(first.logits - second.logits).max() > 1e-3


def test_a_mapping_is_loaded_each_time(loads: list[str]) -> None:
    state = {key: array.copy() for key, array in STATE.items()}
    first = cupy_resnet.predict(pixels(0), model="resnet20", weights=state, **SMALL)[0]
    state["linear.bias"] += 1
    second = cupy_resnet.predict(pixels(0), model="resnet20", weights=state, **SMALL)[0]
    np.testing.assert_allclose(second.logits, first.logits + 1, rtol=1e-5, atol=1e-5)
    assert len(loads) == 2


def test_threads_that_want_one_model_load_it_once(loads: list[str], weights: Path) -> None:
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        results[index] = cupy_resnet.predict(pixels(0), model="resnet20", weights=str(weights), **SMALL)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["resnet20"]
    assert all(np.array_equal(result[0].logits, results[0][0].logits) for result in results)


def test_what_cannot_be_loaded_is_not_kept(loads: list[str], weights: Path) -> None:
    content = weights.read_bytes()
    weights.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            cupy_resnet.predict(pixels(0), model="resnet20", weights=weights, **SMALL)
    assert len(loads) == 2
    weights.write_bytes(content)
    assert cupy_resnet.predict(pixels(0), model="resnet20", weights=weights, **SMALL)[0].error is None


def test_unknown_arguments_are_named(weights: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
        cupy_resnet.predict(pixels(0), model="resnet20", weights=weights, top_k=3)


def test_without_cupy_torch_and_rich_photographs_are_classified(weights: Path) -> None:
    program = (
        "import sys, json\n"
        "for name in ('cupy', 'torch', 'torchvision', 'rich'): sys.modules[name] = None\n"
        "import numpy as np, cupy_resnet\n"
        f"p, = cupy_resnet.predict(np.zeros((40, 50, 3), np.uint8), model='resnet20', weights={str(weights)!r})\n"
        "print(json.dumps(p.to_dict()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"].startswith("class ")
