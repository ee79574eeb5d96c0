"""Recordings as folders: there and back, from other programs, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import torch_checkpoints, torch_model
from verify_support import STATE, WEIGHTS, X, model, over

from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.verification import (
    Recording,
    check,
    check_steps,
    dumps,
    make_reference,
    read_dump,
    record,
    record_reference,
    verify,
    write_dump,
)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(model(), X, input_from="the tests")


@pytest.fixture
def dump(recording: Recording, tmp_path: Path) -> Path:
    write_dump(tmp_path / "dump", recording)
    return tmp_path / "dump"


def others_dump(folder: Path) -> Path:
    """What somebody would write with torch and NumPy alone."""
    folder.mkdir()
    np.save(folder / "input.npy", X.astype(np.float64))
    module = torch_model("resnet20", STATE)
    for name, value in torch_checkpoints("resnet20", module, torch.from_numpy(X)).items():
        np.savez_compressed(folder / f"{name}.npz", value[..., None, None] if name == "gap" else value)
    return folder


def test_there_and_back(recording: Recording, dump: Path) -> None:
    found = read_dump(dump)
    assert list(found.values) == list(recording.values)
    for name, value in recording.values.items():
        np.testing.assert_array_equal(found.values[name], value)
    np.testing.assert_array_equal(found.input, recording.input)
    assert found.computed_by == f"numpy engine, fp32, fused (dump {dump})"
    for field in ("input_from", "model", "precision", "weights", "weights_sha256"):
        assert getattr(found, field) == getattr(recording, field)
    report = check(found, recording)
    assert report.passed
    assert report.worst.share == 0


def test_another_program_needs_no_manifest(tmp_path: Path) -> None:
    theirs = read_dump(others_dump(tmp_path / "theirs"))
    assert list(theirs.values) == list(describe("resnet20").checkpoint_names)
    report = verify(model(), WEIGHTS, tmp_path / "theirs").layers
    assert report is not None
    assert report.passed
    assert len(report.comparisons) == 12
    assert check_steps(model(), theirs).passed


def test_two_dumps_without_manifests_are_compared_in_the_networks_order(tmp_path: Path) -> None:
    ours, theirs = others_dump(tmp_path / "a"), others_dump(tmp_path / "b")
    report = check(read_dump(ours), read_dump(theirs))
    assert [c.name for c in report.comparisons] == list(describe("resnet20").checkpoint_names)
    assert report.model is None
    assert report.passed
    np.savez(ours / "layer10.2.npz", np.zeros((1, 1)))
    assert list(read_dump(ours).values)[-4:] == ["layer3.2", "layer10.2", "gap", "logits"]


def test_what_only_one_side_has_is_reported(tmp_path: Path, recording: Recording) -> None:
    theirs = others_dump(tmp_path / "theirs")
    (theirs / "layer1.1.npz").unlink()
    np.savez(theirs / "conv1.npz", X)
    report = check(recording, read_dump(theirs))
    assert report.passed
    assert [line.partition(":")[0] for line in report.missing] == ["layer1.1", "conv1"]
    report = check_steps(model(), read_dump(theirs))
    assert report.passed
    assert len(report.comparisons) == 10
    assert report.missing[1].startswith("layer1.2: its input, layer1.1, is not in another program")


def test_a_broken_block_in_a_dump_is_located(tmp_path: Path) -> None:
    reference = record_reference(make_reference("torch", WEIGHTS), WEIGHTS, X)
    wrong = record(model(state=STATE | {"layer3.0.conv1.weight": STATE["layer3.0.conv1.weight"][:, ::-1].copy()}), X)
    write_dump(tmp_path / "ours", wrong)
    write_dump(tmp_path / "theirs", reference)
    report = check(read_dump(tmp_path / "ours"), read_dump(tmp_path / "theirs"))
    assert over(report)[0] == "layer3.0"


def test_other_weights_are_noted(recording: Recording, tmp_path: Path) -> None:
    write_dump(tmp_path / "a", replace(recording, weights="a", weights_sha256="1" * 64))
    write_dump(tmp_path / "b", replace(recording, weights="b", weights_sha256="2" * 64))
    (note,) = check(read_dump(tmp_path / "a"), read_dump(tmp_path / "b")).notes
    assert "from different files, a (111111111111…) and b (222222222222…)" in note


def test_a_dump_of_another_model_or_shape_is_refused(tmp_path: Path, dump: Path) -> None:
    other = model("resnet32", random_state_dict(describe("resnet32")))
    with pytest.raises(ValueError, match="is of resnet20, which cannot be compared with resnet32"):
        verify(other, WEIGHTS, dump)
    theirs = others_dump(tmp_path / "theirs")
    np.savez(theirs / "layer2.0.npz", np.load(theirs / "layer2.0.npz")["arr_0"].transpose(0, 2, 3, 1))
    with pytest.raises(
        ValueError, match=r"layer2\.0: shapes differ, \(3, 32, 16, 16\) and \(3, 16, 16, 32\)"
    ) as caught:
        verify(model(), WEIGHTS, theirs)
    assert "activations are (N, C, H, W)" in str(caught.value)
    np.save(theirs / "input.npy", X.transpose(0, 2, 3, 1))
    with pytest.raises(ValueError, match=r"expected \(N, 3, H, W\); this looks like \(N, H, W, C\)"):
        verify(model(), WEIGHTS, theirs)


def test_dumps_without_a_common_checkpoint_are_refused(tmp_path: Path) -> None:
    for folder, name in (("a", "stem"), ("b", "conv1")):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "input.npy", X)
        np.savez(tmp_path / folder / f"{name}.npz", X)
    with pytest.raises(ValueError, match="have no checkpoint in common: stem here, conv1 there"):
        check(read_dump(tmp_path / "a"), read_dump(tmp_path / "b"))
    with pytest.raises(ValueError, match="has no checkpoint of resnet20 together with its input: there are conv1"):
        check_steps(model(), read_dump(tmp_path / "b"))


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: (d / "input.npy").unlink(), FileNotFoundError, "has no input.npy"),
        (lambda d: (d / "input.npy").write_bytes(b"no array"), ValueError, r"input\.npy cannot be read"),
        (lambda d: np.save(d / "input.npy", np.zeros((1, 3, 8, 8), np.uint8)), ValueError, "float64, got uint8"),
        (lambda d: (d / "manifest.json").write_text("{"), ValueError, "is not JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), ValueError, "is not a JSON object"),
        (lambda d: edit_manifest(d, version=2), ValueError, "is not of the format"),
        (lambda d: edit_manifest(d, checkpoints=None), ValueError, "'checkpoints' is missing or of the wrong type"),
        (lambda d: edit_manifest(d, checkpoints=[{}]), ValueError, "'name' is missing or of the wrong type"),
        (lambda d: edit_manifest(d, checkpoints=[{"name": "../../x"}]), ValueError, "cannot be a checkpoint's name"),
        (lambda d: edit_manifest(d, checkpoints=[]), FileNotFoundError, "it has no checkpoints"),
        (lambda d: edit_manifest(d, model=3), ValueError, "'model' is missing or of the wrong type"),
        (lambda d: edit_manifest(d, precision="fp61"), ValueError, "unknown precision 'fp61'"),
        (lambda d: (d / "stem.npz").unlink(), ValueError, r"stem\.npz is missing: manifest\.json lists it"),
        (lambda d: (d / "stem.npz").write_bytes(b"PK\3\4 and no more"), ValueError, r"stem\.npz cannot be read"),
        (lambda d: np.savez(d / "stem.npz", a=X, b=X), ValueError, "must hold one array, got a, b"),
        (lambda d: np.savez(d / "stem.npz", np.array([{}])), ValueError, "cannot be read"),  # a pickle
    ],
)
def test_damaged_dumps_are_refused(dump: Path, damage: Callable[[Path], object], error: type, message: str) -> None:
    damage(dump)
    with pytest.raises(error, match=message):
        verify(model(), WEIGHTS, dump)


def test_a_dump_appears_as_a_whole_or_not_at_all(recording: Recording, tmp_path: Path, dump: Path, monkeypatch) -> None:
    written: list[Path] = []
    before = {path.name: path.read_bytes() for path in dump.iterdir()}

    def full_disk(path: Path, content: bytes) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        path.write_bytes(content)
        written.append(path)

    monkeypatch.setattr(dumps, "write_file", full_disk)
    for target in (tmp_path / "new", dump):
        written.clear()
        with pytest.raises(OSError, match="No space left"):
            write_dump(target, recording)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dump"]
    assert {path.name: path.read_bytes() for path in dump.iterdir()} == before


def test_an_earlier_dump_is_replaced_and_nothing_else(recording: Recording, tmp_path: Path, dump: Path) -> None:
    write_dump(dump, record(model(), X + 1))
    np.testing.assert_array_equal(read_dump(dump).input, X + 1)
    (tmp_path / "empty").mkdir()
    write_dump(tmp_path / "empty", recording)
    write_dump(tmp_path / "deep" / "er", recording)
    (dump / "notes.txt").write_text("mine")
    theirs = others_dump(tmp_path / "theirs")
    (tmp_path / "file").write_text("")
    for target in (dump, theirs, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="name a new folder"):
            write_dump(target, recording)
        with pytest.raises(FileExistsError):  # before anything is computed
            verify(model(), WEIGHTS, "torch", dump=target)
    assert (dump / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="cannot be a file"):
        write_dump(tmp_path / "x", Recording(values={"a/b": X}, input=X, computed_by=""))


def test_files_are_read_when_they_are_asked_for(dump: Path) -> None:
    found = read_dump(dump)
    (dump / "layer1.0.npz").unlink()
    assert "layer1.0" in found.values
    assert found.values["stem"].shape == (3, 16, 32, 32)
    assert "other" not in found.values
    with pytest.raises(KeyError):
        found.values["other"]


def test_verify_keeps_what_it_ran(tmp_path: Path) -> None:
    outcome = verify(model(), WEIGHTS, None, dump=tmp_path / "a", batch=2, size=16, seed=5)
    assert outcome.layers is None
    assert outcome.passed
    found = read_dump(tmp_path / "a")
    assert found.input.shape == (2, 3, 16, 16)
    assert found.input_from == "normal deviates, seed 5"
    again = verify(model(), WEIGHTS, tmp_path / "a", dump=tmp_path / "b")
    assert again.layers is not None
    assert again.layers.worst.share == 0
    np.testing.assert_array_equal(read_dump(tmp_path / "b").values["gap"], found.values["gap"])
