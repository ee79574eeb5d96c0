"""Weights from files, mappings and the package: transforms, class names, what is kept and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from cupy_resnet.errors import CheckpointError
from cupy_resnet.images.transforms import Transforms
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.weights_store import convert, embedded, imagenet_classes, resolve, resolving, split_name
from cupy_resnet.weights_store.categories import read_categories

STATE = random_state_dict(describe("resnet20"), seed=3)
V1 = Transforms.preset("IMAGENET1K_V1")
V1_AT_32 = V1.replace(resize=32, crop=32)
LETTERS = list("abcdefghij")


@pytest.fixture(autouse=True)
def embedded_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's weights folder, empty."""
    folder = tmp_path / "embedded"
    folder.mkdir()
    monkeypatch.setattr(resolving, "folder", lambda _: folder)
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A file that says nothing but its tensors."""
    np.savez(tmp_path / "plain.npz", **STATE)
    return tmp_path / "plain.npz"


def test_imagenets_classes() -> None:
    classes = imagenet_classes()
    assert [index for index, _, _ in classes] == list(range(1000))
    wnids = [wnid for _, wnid, _ in classes]
    assert wnids == sorted(set(wnids))
    assert classes[1] == (1, "n01443537", "goldfish")
    pairs = {"crane": {134: "n02012849", 517: "n03126707"}, "maillot": {638: "n03710637", 639: "n03710721"}}
    for word, pair in pairs.items():
        found = {index: wnid for index, wnid, name in classes if word in name.split()}
        assert found == pair


def test_a_plain_file_gets_the_first_presets_transforms_and_numbered_classes(plain: Path) -> None:
    weights = resolve("resnet20", plain)
    assert weights.transforms == V1_AT_32.to_dict()
    assert (weights.categories, weights.wnids, weights.batch_norm_eps) == (None, None, None)
    assert weights.label(3) == "class 3"
    assert (weights.model, weights.name, weights.source, weights.path) == ("resnet20", "plain.npz", "plain.npz", plain)
    assert len(weights.sha256) == 64
    assert weights.state.keys() == STATE.keys()


def test_the_imagenet_family_is_prepared_as_torchvision_does() -> None:
    assert resolve("resnet18", {"fc.weight": np.ones((5, 512))}).transforms == V1.to_dict()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "IMAGENET1K_V2"}, Transforms.preset("IMAGENET1K_V2")),
        ({"preset": "CIFAR10", "mean": (0.5, 0.5, 0.5)}, Transforms.preset("CIFAR10").replace(mean=(0.5, 0.5, 0.5))),
        ({"resize": 40}, V1_AT_32.replace(resize=40)),
        ({"crop": 28, "std": [1, 2, 3]}, V1_AT_32.replace(crop=28, std=(1, 2, 3))),
    ],
)
def test_transforms_can_be_given_and_are_kept(
    plain: Path, tmp_path: Path, options: dict[str, Any], expected: Transforms
) -> None:
    assert resolve("resnet20", plain, **options).transforms == expected.to_dict()
    out = convert("resnet20", plain, tmp_path / "kept.safetensors", **options)
    assert resolve("resnet20", out).transforms == expected.to_dict()
    assert resolve("resnet20", out, resize=99).transforms == expected.replace(resize=99).to_dict()
    assert resolve("resnet20", out, preset="IMAGENET1K_V1").transforms == V1.to_dict()


def test_transforms_that_make_no_sense(plain: Path) -> None:
    with pytest.raises(ValueError, match="no preset 'IMAGENET'"):
        resolve("resnet20", plain, preset="IMAGENET")
    with pytest.raises(ValueError, match="mean must be three"):
        resolve("resnet20", plain, mean=(0.5,))


@pytest.mark.parametrize(
    ("name", "content", "wnids"),
    [
        ("c.txt", "\ufeffcrane\r\ncrane\r\n große Katze \r\n\r\n", None),
        ("c.json", '["crane", "crane", "große Katze"]', None),
        ("c.json", '{"2": "große Katze", "0": "crane", "1": "crane"}', None),
        ("c.json", '{"0": ["n1", "crane"], "1": ["n2", "crane"], "2": ["n3", "große Katze"]}', ["n1", "n2", "n3"]),
        ("c.csv", "class_index,wnid,name\n1,n2,crane\n0,n1,crane\n2,n3,große Katze\n", ["n1", "n2", "n3"]),
        ("c.csv", "index,label\n0,crane\n1,crane\n2,große Katze\n", None),
    ],
)
def test_categories_from_files_keep_equal_names_apart(
    tmp_path: Path, name: str, content: str, wnids: list[str] | None
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_categories(tmp_path / name) == (["crane", "crane", "große Katze"], wnids)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", "a\n\nb\n", "line 2 is empty"),
        ("c.json", "[1, 2]", "every class must be a name"),
        ("c.json", '["a", ["n1", "b"]]', "every class must be a name"),
        ("c.json", '"a"', "a list of names"),
        ("c.json", '{"a": "b"}', "must be class indices"),
        ("c.json", "[", "c.json cannot be read"),
        ("c.json", '{"1": "a", "2": "b"}', "must be 0, 1, 2"),
        ("c.csv", "index,name\n0,a\n0,b\n", "must be 0, 1, 2"),
        ("c.csv", "index,name\nzero,a\n", "invalid literal"),
        ("c.csv", "a\nb\n", "header must name class_index and name, but is: a"),
        ("c.xml", "", r"must end in \.txt, \.json, \.csv"),
    ],
)
def test_categories_that_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_categories(tmp_path / name)


def test_categories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file of categories"):
        read_categories(tmp_path / "none.txt")
    with pytest.raises(TypeError, match="that of class 1 is a int"):
        read_categories(["a", 2])  # type: ignore[list-item]


def test_as_many_names_as_classes(plain: Path, tmp_path: Path) -> None:
    assert resolve("resnet20", plain, categories=LETTERS).label(3) == "d"
    with pytest.raises(CheckpointError, match=r"9 categories for resnet20 from .*plain\.npz, whose .* has 10 classes"):
        resolve("resnet20", plain, categories=LETTERS[:9])
    with pytest.raises(CheckpointError, match=r"1000 categories for resnet20 .* 10 classes"):
        resolve("resnet20", plain, categories="imagenet")
    thousand = resolve("resnet20", {"linear.weight": np.ones((1000, 64))}, categories="imagenet")
    assert thousand.wnids is not None
    assert (thousand.label(1), thousand.wnids[1]) == ("goldfish", "n01443537")
    out = convert("resnet20", plain, tmp_path / "named.safetensors", categories=LETTERS)
    assert resolve("resnet20", out).categories == LETTERS
    assert resolve("resnet20", out, categories=LETTERS[::-1]).label(0) == "j"


def test_wrappers_are_undone_and_classes_counted() -> None:
    state = random_state_dict(describe("resnet20", num_classes=7))
    wrapped = {"epoch": 3, "model": {f"module._orig_mod.{key}": torch.from_numpy(a) for key, a in state.items()}}
    weights = resolve("resnet20", wrapped, categories=LETTERS[:7])
    assert weights.state.keys() == state.keys()
    assert (weights.sha256, weights.path) == ("", None)
    with pytest.raises(CheckpointError, match=r"10 categories .* 7 classes"):
        resolve("resnet20", wrapped, categories=LETTERS)


def test_pickles_run_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable, tuple]:
            return Path.touch, (tmp_path / "pwned",)

    torch.save({"fc.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match=r"evil\.pth holds a Python object"):
        resolve("resnet18", tmp_path / "evil.pth")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("eps", [1e-3, {"bn1": 0.5, "layer2.0.bn1": 1e-4}])
@pytest.mark.parametrize("name", ["eps.safetensors", "eps.json"])
def test_eps_is_kept(plain: Path, tmp_path: Path, name: str, eps: Any) -> None:
    out = convert("resnet20", plain, tmp_path / name, batch_norm_eps=eps)
    assert resolve("resnet20", out).batch_norm_eps == eps
    assert resolve("resnet20", out, batch_norm_eps=1e-5).batch_norm_eps == 1e-5
    with pytest.raises(ValueError, match=r"resnet20 has no BatchNorm named bn9"):
        convert("resnet20", plain, tmp_path / "no.json", batch_norm_eps={"bn9": 1e-3})


def test_a_converted_file_belongs_to_its_model(plain: Path, tmp_path: Path) -> None:
    out = convert("resnet20", plain, tmp_path / "r.safetensors")
    with pytest.raises(CheckpointError, match=r"r\.safetensors holds weights of resnet20, not of resnet32"):
        resolve("resnet32", out)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ('{"transforms": 1}', "cannot use transforms of its metadata: 1"),
        ('{"transforms": {"resize": 3}}', "transforms cannot be used: transforms lack"),
        ('{"categories": [1]}', "cannot use categories"),
        ('{"wnids": "n1"}', "cannot use wnids"),
        ('{"categories": ["a"]}', "1 categories .* 10 classes"),
    ],
)
def test_metadata_that_cannot_be_used(tmp_path: Path, metadata: str, message: str) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(STATE, path, {"cupy_resnet": metadata})
    with pytest.raises(CheckpointError, match=message):
        resolve("resnet20", path)


def test_metadata_of_others_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(STATE, path, {"format": "pt"})
    assert resolve("resnet20", path).source == "m.safetensors"


def test_embedded_weights(embedded_folder: Path) -> None:
    assert embedded() == []
    with pytest.raises(ValueError, match=r"resnet20 needs weights: torchvision has none for it; pass a state dict or"):
        resolve("resnet20")
    record = {"epochs": 3, "accuracy": 0.91}
    options: dict[str, Any] = {"dtype": "float16", "categories": LETTERS, "preset": "CIFAR10", "training": record}
    convert("resnet20", STATE, embedded_folder / "resnet20-cifar10.safetensors", source="a test", **options)
    (embedded_folder / "notes-1.safetensors").touch()
    assert embedded() == ["resnet20-cifar10"]
    assert split_name("resnet20-cifar10") == ("resnet20", "resnet20-cifar10")
    assert split_name("resnet20") == ("resnet20", None)
    for model, name in (("resnet20-cifar10", None), ("resnet20", None), ("resnet20", "resnet20-cifar10")):
        weights = resolve(model, name)
        assert (weights.model, weights.name, weights.source) == ("resnet20", "resnet20-cifar10", "a test")
        assert weights.training == record
        assert weights.label(2) == "c"
        assert weights.transforms == Transforms.preset("CIFAR10").to_dict()
        assert {array.dtype for array in weights.state.values()} == {np.dtype(np.float16)}
        np.testing.assert_array_equal(weights.state["conv1.weight"], STATE["conv1.weight"].astype(np.float16))
    with pytest.raises(ValueError, match='with others use model="resnet20"'):
        resolve("resnet20-cifar10", STATE)
    with pytest.raises(ValueError, match="belong to resnet20, not to resnet32"):
        resolve("resnet32", "resnet20-cifar10")
    with pytest.raises(ValueError, match=r'resnet32 needs weights: .*\nmodel="resnet20-cifar10" works now'):
        resolve("resnet32")
    with pytest.raises(ValueError, match=r"unknown model 'resnet20-cifar100'\. Did you mean 'resnet20-cifar10'"):
        resolve("resnet20-cifar100")


def test_things_that_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown weights of resnet18 'pretrained'"):
        resolve("resnet18", "pretrained")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint file .*none\.npz"):
        resolve("resnet18", str(tmp_path / "none.npz"))
    with pytest.raises(TypeError, match=r"got Linear; pass its state_dict\(\)"):
        resolve("resnet18", torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_what_is_written_names_no_folders(plain: Path, tmp_path: Path) -> None:
    out = convert("resnet20", plain, tmp_path / "out.json")
    assert str(tmp_path) not in out.read_text()
    assert json.loads(out.read_text())["source"] == "plain.npz"
