"""The demonstration and its drawings; what the network answers is shown, not prescribed."""

import json

import numpy as np
import pytest
from cli_support import run, run_here
from PIL import Image

import cupy_resnet
from cupy_resnet import demo, drawings
from cupy_resnet.weights_store import WeightsUnavailableError, resolve


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = run("demo", "--json", "--save", "drawings", folder=folder, CUPY_RESNET_ENGINE="numpy")
    assert done.status == 0, done.err
    assert done.err == ""
    return folder, json.loads(done.out)


def test_the_drawings_are_of_the_networks_classes():
    assert list(drawings.NAMES) == resolve(demo.MODEL).categories
    images = [drawings.draw(name) for name in drawings.NAMES]
    assert {(image.mode, image.size) for image in images} == {("RGB", (drawings.SIZE, drawings.SIZE))}
    arrays = [np.asarray(image, np.float32) for image in images]
    for index, array in enumerate(arrays):
        assert array.std() > 20
        assert all(np.abs(array - other).mean() > 5 for other in arrays[:index])


def test_the_answers_are_those_that_predict_gives_for_the_saved_drawings(shown):
    folder, result = shown
    paths = [folder / "drawings" / f"{name}.png" for name in drawings.NAMES]
    predictions = cupy_resnet.predict(paths, model="resnet20-cifar10", engine="numpy")
    assert [answer["drawn"] for answer in result["answers"]] == list(drawings.NAMES)
    for answer, prediction in zip(result["answers"], predictions, strict=True):
        assert answer["label"] == prediction.label
        assert answer["probability"] == pytest.approx(prediction.probability, rel=1e-5)
        assert [label for label, _ in answer["others"]] == list(prediction.labels[1:3])


def test_it_tells_engine_kernels_and_speed(shown):
    _, result = shown
    assert result["engine"] == "numpy"
    assert result["obstacle"] is None  # the NumPy engine was asked for
    assert result["kernels"]["im2col + BLAS"] == 19
    assert sum(result["kernels"].values()) > 20
    assert result["images_per_second"] > 0
    assert 0.5 < result["seconds"] < 60


def test_it_speaks_to_people(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPY_RESNET_ENGINE", "numpy")
    monkeypatch.setattr(demo, "_MEASURED_SECONDS", 0.01)
    done = run_here(monkeypatch, capsys, "demo")
    assert (done.status, done.err) == (0, "")
    for name in drawings.NAMES:
        assert f"\n{name} " in done.out
    assert "images/s" in done.out
    assert "drawings" in done.out.splitlines()[0]
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_wrong_answer_is_shown_as_it_is(monkeypatch):
    monkeypatch.setattr(drawings, "draw", lambda name: Image.new("RGB", (32, 32), (90, 140, 220)))
    monkeypatch.setenv("CUPY_RESNET_ENGINE", "numpy")
    monkeypatch.setattr(demo, "_MEASURED_SECONDS", 0.01)
    result = demo.run_demo()
    assert len({answer.label for answer in result.answers}) == 1  # the same picture, the same answer


def test_without_its_weights_it_says_so(monkeypatch):
    monkeypatch.setattr(demo, "embedded", list)
    with pytest.raises(WeightsUnavailableError, match="reinstall"):
        demo.run_demo()
