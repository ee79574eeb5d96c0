"""`predict` on the NumPy engine: what goes in and what comes out. Cases are named as in the collection of faults
people meet: orientation, bad files, odd arrays, other numbers of classes, names that occur twice, features."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close
from PIL import Image
from predict_support import CLASSES, STATE, encoded, pixels, small_model

import cupy_resnet
from cupy_resnet.images import ImageError, Transforms, normalize, prepare
from cupy_resnet.networks import describe, random_state_dict


@pytest.fixture(scope="module")
def model() -> cupy_resnet.Model:
    return small_model()


def reference(model: cupy_resnet.Model, array: np.ndarray) -> np.ndarray:
    """The logits of one RGB image, by the plain way through preprocessing and model."""
    x = normalize(prepare(Image.fromarray(array), model.transforms)[None], model.transforms)
    return model(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))[0]


def test_answers_are_the_models_own(model) -> None:
    images = [pixels(seed) for seed in range(5)]
    predictions = model.predict(images, topk=10)
    assert [p.index for p in predictions] == list(range(5))
    for prediction, image in zip(predictions, images, strict=True):
        logits = reference(model, image)
        assert prediction.logits.dtype == np.float32
        assert prediction.logits.shape == (10,)
        assert prediction.logits.base is None  # keeping one keeps no batch
        assert_close(prediction.logits, logits, rtol=1e-5, atol=1e-5)
        order = np.argsort(-prediction.logits, kind="stable")
        assert list(prediction.class_indices) == order.tolist()
        assert list(prediction.labels) == [CLASSES[index] for index in order]
        softmax = torch.softmax(torch.from_numpy(prediction.logits).double(), 0).numpy()
        np.testing.assert_allclose(prediction.probabilities, softmax[order], rtol=1e-5)
        assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-6)
        assert prediction.error is None
        assert prediction.wnids is None
        assert min(prediction.timings.decode, prediction.timings.preprocess, prediction.timings.inference) > 0
        json.dumps(prediction.to_dict(logits=True), allow_nan=False)
    assert len({p.logits.tobytes() for p in predictions}) == 5


def test_results_do_not_depend_on_the_batch(model) -> None:
    images = [pixels(seed) for seed in range(11)]
    alone = [model.predict(image)[0] for image in images]
    for batch_size in (1, 2, 3, 4, 11, 100, None):
        together = model.predict(images, batch_size=batch_size)
        assert [p.index for p in together] == list(range(11))
        for one, other in zip(alone, together, strict=True):
            assert_close(other.logits, one.logits, rtol=1e-5, atol=1e-5)
            assert other.class_indices[0] == one.class_indices[0]


def test_every_kind_of_input_gives_the_same_answer(model, tmp_path: Path) -> None:
    image = pixels(1)
    (tmp_path / "a.png").write_bytes(encoded(image))
    (expected,) = model.predict(image)
    inputs = {
        "path": str(tmp_path / "a.png"),
        "Path": tmp_path / "a.png",
        "folder": tmp_path,
        "pattern": str(tmp_path / "*.png"),
        "bytes": encoded(image),
        "file": io.BytesIO(encoded(image)),
        "PIL": Image.fromarray(image),
        "CHW": image.transpose(2, 0, 1),
        "NHWC": image[None],
        "torch": torch.from_numpy(image),
        "list": [image],
        "generator": (i for i in [image]),
    }
    for kind, value in inputs.items():
        (prediction,) = model.predict(value)
        np.testing.assert_array_equal(prediction.logits, expected.logits, err_msg=kind)
        named = kind in ("path", "Path", "folder", "pattern")
        assert prediction.path == (str(tmp_path / "a.png") if named else None), kind


def test_case_12_orientation_is_applied_unless_declined(model) -> None:
    upright = pixels(2)
    turned = np.ascontiguousarray(np.rot90(upright, 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270°
    content = encoded(turned, "PNG", exif=exif)
    np.testing.assert_array_equal(model.predict(content)[0].logits, model.predict(upright)[0].logits)
    np.testing.assert_array_equal(model.predict(content, exif=False)[0].logits, model.predict(turned)[0].logits)


def test_case_14_blue_first(model) -> None:
    rgb = pixels(3)
    bgr = np.ascontiguousarray(rgb[..., ::-1])
    expected = model.predict(rgb)[0].logits
    assert np.abs(model.predict(bgr)[0].logits - expected).max() > 1e-3
    np.testing.assert_array_equal(model.predict(bgr, channel_order="bgr")[0].logits, expected)


def bad_files(folder: Path) -> list[Path]:
    """Truncated, empty, no image, missing; a.png and z.png are good."""
    (folder / "a.png").write_bytes(encoded(pixels(1)))
    whole = encoded(pixels(2, 200, 200), "JPEG")
    (folder / "b.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "c.jpg").write_bytes(b"")
    (folder / "d.jpg").write_bytes(b"<html>not found</html>")
    (folder / "z.png").write_bytes(encoded(pixels(3)))
    return [folder / name for name in ("a.png", "b.jpg", "c.jpg", "d.jpg", "missing.jpg", "z.png")]


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_case_15_bad_files_are_recorded_in_their_place(model, tmp_path: Path, batch_size: int | None) -> None:
    paths = bad_files(tmp_path)
    good = [model.predict(pixels(seed))[0] for seed in (1, 3)]
    predictions = model.predict(paths, on_error="record", batch_size=batch_size)
    assert [p.path for p in predictions] == [str(path) for path in paths]
    assert [p.index for p in predictions] == list(range(6))
    assert [p.error is None for p in predictions] == [True, False, False, False, False, True]
    assert_close(predictions[0].logits, good[0].logits, rtol=1e-5, atol=1e-5)
    assert_close(predictions[-1].logits, good[1].logits, rtol=1e-5, atol=1e-5)
    for prediction in predictions[1:-1]:
        assert prediction.error.startswith(f"{prediction.path}: ")
        assert prediction.label is None
        assert prediction.logits is None
        assert prediction.timings.inference is None
        json.dumps(prediction.to_dict())
    assert "empty" in predictions[2].error
    assert "web page" in predictions[3].error


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_case_15_the_first_bad_file_is_raised_after_what_comes_before(model, tmp_path: Path, batch_size) -> None:
    paths = bad_files(tmp_path)
    with pytest.raises(ImageError, match=r"b\.jpg: "):
        model.predict(paths, batch_size=batch_size)
    results = model.predict(paths, stream=True, batch_size=batch_size)
    assert next(results).path == str(paths[0])
    with pytest.raises(ImageError, match=r"b\.jpg: "):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_case_15_only_bad_files(model) -> None:
    predictions = model.predict([b"x", None, 3], on_error="record")
    assert [p.index for p in predictions] == [0, 1, 2]
    assert all(p.error and p.label is None for p in predictions)


@pytest.mark.parametrize("inputs", [[], (), iter([]), np.zeros((0, 20, 24, 3), np.uint8)])
def test_case_18_no_images(model, inputs) -> None:
    assert model.predict(inputs) == []
    assert list(model.predict([], stream=True)) == []


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (7, 3001), (16, 16), (17, 33)])
def test_case_18_odd_sizes(model, size: tuple[int, int]) -> None:
    image = pixels(5, *size)
    (prediction,) = model.predict(Image.fromarray(image))
    assert_close(prediction.logits, reference(model, image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(lambda x: np.repeat(x, 2, 1)[:, ::2], id="strided"),
        pytest.param(lambda x: x[::-1].copy()[::-1], id="negative stride"),
        pytest.param(np.asfortranarray, id="Fortran order"),
        pytest.param(lambda x: (x / np.float64(255)).astype(">f8"), id="big-endian floats"),
        pytest.param(lambda x: torch.from_numpy(x).permute(2, 0, 1), id="torch CHW"),
    ],
)
def test_case_19_arrays_of_every_kind(model, variant) -> None:
    image = pixels(4)
    (expected,) = model.predict(image)
    value = variant(image)
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    np.testing.assert_array_equal(model.predict(value)[0].logits, expected.logits)


def test_case_22_another_number_of_classes() -> None:
    model = small_model(random_state_dict(describe("resnet20", num_classes=3), seed=1))
    (prediction,) = model.predict(pixels(0))
    assert len(prediction.labels) == 3  # though five is the default
    assert list(prediction.labels) == [f"class {index}" for index in prediction.class_indices]
    assert prediction.logits.shape == (3,)


def test_case_28_two_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "classes.csv"
    rows = [f"{index},n{index:08},{'crane' if index in (3, 7) else f'thing {index}'}" for index in range(10)]
    file.write_text("\n".join(["class_index,wnid,name", *rows]), encoding="utf-8")
    bias = STATE["linear.bias"].copy()
    bias[[7, 3]] += np.float32([1000, 500])
    model = small_model(STATE | {"linear.bias": bias}, categories=file)
    (prediction,) = model.predict(pixels(0), topk=2)
    assert prediction.labels == ("crane", "crane")
    assert prediction.class_indices == (7, 3)
    assert prediction.wnids == ("n00000007", "n00000003")
    assert (prediction.wnid, prediction.class_index) == ("n00000007", 7)


def test_case_29_features_and_logits_come_from_one_pass(model, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [pixels(seed) for seed in range(3)]
    assert all(p.features is None for p in model.predict(images))
    ops = model.ops
    passes = []
    linear = ops.linear
    monkeypatch.setattr(ops, "linear", lambda *arguments: passes.append(1) or linear(*arguments))
    for prediction in model.predict(images, features=True, batch_size=3):
        assert prediction.features.shape == (64,)
        assert prediction.features.dtype == np.float32
        assert_close(STATE["linear.weight"] @ prediction.features + STATE["linear.bias"], prediction.logits)
    assert len(passes) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 0}, "topk must be a whole number of at least 1, got 0"),
        ({"topk": True}, "topk must be a whole number"),
        ({"batch_size": -1}, "batch_size must be a whole number of at least 1, got -1"),
        ({"workers": 1.5}, "workers must be a whole number"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'record', got 'ignore'"),
        ({"channel_order": "RGB"}, "channel_order must be 'rgb' or 'bgr', got 'RGB'"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_wrong_arguments_are_named_at_once(model, options: dict, message: str, stream: bool) -> None:
    with pytest.raises(ValueError, match=message):
        model.predict([], stream=stream, **options)


def test_networks_without_three_channels_are_refused() -> None:
    model = small_model(random_state_dict(describe("resnet20", in_channels=4)))
    with pytest.raises(ValueError, match="this resnet20 has 4 input channels"):
        model.predict(pixels(0))
    model.warmup()


def test_transforms_can_be_replaced_one_by_one() -> None:
    assert small_model().transforms == Transforms.preset("IMAGENET1K_V1").replace(resize=16, crop=16)
    model = small_model(resize=20, crop=16, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    assert model.transforms == Transforms(20, 16, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    image = pixels(6)
    assert_close(model.predict(image)[0].logits, reference(model, image), rtol=1e-5, atol=1e-5)


def test_photographs_get_torchs_answers(data_folder: Path) -> None:
    """A few here; all 200, with every kernel, among the tests on the GPU."""
    folder = data_folder / "imagenet"
    model = cupy_resnet.load(
        "resnet18", folder / "resnet18_state_dict.npz", engine="numpy", categories=folder / "classes.csv"
    )
    names = [line.split(",")[0] for line in (folder / "labels.csv").read_text(encoding="utf-8").splitlines()[1:]]
    chosen = list(range(0, 200, 40))
    expected = np.load(folder / "resnet18_torch_logits.npy")[chosen]
    predictions = model.predict([folder / "photos" / names[index] for index in chosen], exif=False)
    for prediction, logits in zip(predictions, expected, strict=True):
        assert np.abs(prediction.logits - logits).max() < 1e-3
        assert prediction.class_index == logits.argmax()
        assert prediction.wnid.startswith("n")
