"""convert: files that appear whole or not at all, and manifests that anybody can run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close, normal, torch_model
from torch.nn import functional as F  # noqa: N812

from cupy_resnet import load
from cupy_resnet.checkpoint_files import file_sha256, tensor_sha256
from cupy_resnet.errors import CheckpointError
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.weights_store import convert, resolve, writing
from cupy_resnet.weights_store.manifest import layers

ROOT = Path(__file__).resolve().parent.parent
STATE = random_state_dict(describe("resnet20"), seed=4)


def execute(network: list[dict[str, Any]], tensors: dict[str, np.ndarray], image: np.ndarray) -> torch.Tensor:
    """Runs a manifest's layers as `weights/README.md` describes them; returns the logits."""
    weights = {key: torch.from_numpy(array) for key, array in tensors.items()}
    values = {"image": torch.from_numpy(image)}
    for layer in network:
        x, *others = (values[name] for name in layer["inputs"])
        match layer["kind"]:
            case "conv2d":
                sizes = {name: layer[name] for name in ("stride", "padding", "dilation", "groups")}
                y = F.conv2d(x, weights[layer["weight"]], **sizes)
                assert y.shape[1] == layer["out_channels"]
                assert x.shape[1] == layer["in_channels"]
            case "batch_norm2d":
                keys = ("running_mean", "running_var", "weight", "bias")
                y = F.batch_norm(x, *(weights[layer[key]] for key in keys), eps=layer["eps"])
            case "relu":
                y = F.relu(x)
            case "add":
                y = x + others[0]
            case "max_pool2d":
                y = F.max_pool2d(x, layer["kernel_size"], layer["stride"], layer["padding"])
            case "pad_channels":
                stride = layer["stride"]
                y = F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, layer["before"], layer["after"]))
            case "global_avg_pool2d":
                y = x.mean((2, 3))
            case "linear":
                y = F.linear(x, weights[layer["weight"]], weights[layer["bias"]])
            case kind:
                raise AssertionError(f"the manifest has a kind that is not documented: {kind}")
        assert layer["output"] not in values
        values[layer["output"]] = y
    return y


def test_a_manifest_is_read_back_by_anyone(tmp_path: Path) -> None:
    out = convert("resnet20", STATE, tmp_path / "m.json", batch_norm_eps={"layer2.1.bn2": 0.3})
    manifest = json.loads(out.read_text())
    with np.load(tmp_path / manifest["tensors_file"]) as archive:
        tensors = dict(archive)
    assert file_sha256(tmp_path / "m.npz") == manifest["sha256"]
    for key, entry in manifest["tensors"].items():
        assert (list(tensors[key].shape), tensors[key].dtype.name) == (entry["shape"], entry["dtype"])
        assert tensor_sha256(tensors[key]) == entry["sha256"]
    model = torch_model("resnet20", STATE)
    model.layer2[1].bn2.eps = 0.3
    x = normal((2, 3, 32, 32))
    with torch.inference_mode():
        assert_close(execute(manifest["layers"], tensors, x), model(torch.from_numpy(x)))


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "resnet56"])
def test_every_kind_of_network_is_described_in_full(name: str) -> None:
    network = describe(name, num_classes=5, in_channels=2)
    state = random_state_dict(network)
    x = normal((1, 2, 40, 40))
    with torch.inference_mode():
        assert_close(execute(layers(network), state, x), torch_model(name, state)(torch.from_numpy(x)))


@pytest.mark.parametrize("name", ["a.safetensors", "a.json"])
def test_what_is_written_is_what_load_reads(tmp_path: Path, name: str) -> None:
    wrapped = {"state_dict": {f"module.{key}": torch.from_numpy(array) for key, array in STATE.items()}}
    out = convert("resnet20", wrapped, tmp_path / "new" / name)
    names = {"a.safetensors"} if name.endswith("s") else {"a.json", "a.npz"}
    assert {path.name for path in out.parent.iterdir()} == names
    x = normal((2, 3, 32, 32))
    expected = load("resnet20", STATE, engine="numpy")(x)
    np.testing.assert_array_equal(load("resnet20", out, engine="numpy")(x), expected)
    assert resolve("resnet20", out).sha256 == file_sha256(out)


@pytest.mark.parametrize("name", ["a.safetensors", "a.json"])
def test_equal_weights_give_equal_files_whatever_they_were_read_from(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"categories": list("abcdefghij"), "preset": "CIFAR10", "training": {"epochs": 1}}
    first = convert("resnet20", STATE, tmp_path / "1" / name, **options)
    again = convert("resnet20", dict(reversed(STATE.items())), tmp_path / "2" / name, **options)
    assert first.read_bytes() == again.read_bytes()
    copy = convert("resnet20", first, tmp_path / "3" / "copy.safetensors")
    back = resolve("resnet20", copy)
    assert (back.categories, back.training) == (options["categories"], options["training"])
    assert back.state.keys() == STATE.keys()


def test_half_precision(tmp_path: Path) -> None:
    out = convert("resnet20", STATE, tmp_path / "h.json", dtype="float16")
    assert {entry["dtype"] for entry in json.loads(out.read_text())["tensors"].values()} == {"float16"}
    assert resolve("resnet20", out).state["conv1.weight"].dtype == np.float16
    large = STATE | {"bn1.running_var": np.full(16, 1e5, np.float32)}
    with pytest.raises(CheckpointError, match=r"resnet20: bn1\.running_var has values beyond float16; use float32"):
        convert("resnet20", large, tmp_path / "large.safetensors", dtype="float16")


@pytest.mark.parametrize(
    ("model", "name", "options", "message"),
    [
        ("resnet32", "a.safetensors", {}, "does not fit resnet32"),
        ("resnet20", "a.npz", {}, r"must end in \.safetensors or \.json, got .*a\.npz"),
        ("resnet20", "a.json", {"format": "safetensors"}, r"must end in \.safetensors for safetensors, got"),
        ("resnet20", "a.json", {"format": "npz"}, r"unknown format 'npz'.* Valid: safetensors, npz\+json"),
        ("resnet20", "a.json", {"dtype": "int8"}, r"unknown dtype 'int8'.* Valid: float32, float16"),
        ("resnet21", "a.json", {}, "unknown model 'resnet21'"),
    ],
)
def test_what_is_refused_writes_nothing(
    tmp_path: Path, model: str, name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(model, STATE, tmp_path / name, **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, **changes: np.ndarray | None) -> None:
    """Replaces tensors of an npz file, or takes them out."""
    with np.load(path) as archive:
        tensors = dict(archive) | changes
    np.savez(path, **{key: array for key, array in tensors.items() if array is not None})


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


WRONG = np.ones(16, np.float32)
TAMPERINGS = {
    "another value": (
        lambda p: rewritten(p.with_suffix(".npz"), **{"bn1.weight": WRONG}),
        "bn1.weight has another sha",
    ),
    "another dtype": (lambda p: rewritten(p.with_suffix(".npz"), **{"bn1.bias": np.ones(16)}), r"bn1.bias is float64"),
    "another shape": (lambda p: rewritten(p.with_suffix(".npz"), **{"bn1.bias": WRONG[:3]}), r"is float32 \(3,\), not"),
    "one missing": (lambda p: rewritten(p.with_suffix(".npz"), **{"bn1.bias": None}), "bn1.bias is missing"),
    "one too many": (lambda p: rewritten(p.with_suffix(".npz"), more=WRONG), "more is left over"),
    "cut short": (lambda p: os.truncate(p.with_suffix(".npz"), 5000), "truncated archive"),
    "no archive": (lambda p: p.with_suffix(".npz").unlink(), "m.npz, which does not lie beside it"),
    "an archive elsewhere": (lambda p: edited(p, tensors_file="../m.npz"), "is not a file's name beside it"),
    "a later format": (lambda p: edited(p, format="cupy_resnet npz+json 2"), "its format is 'cupy_resnet npz.json 2'"),
    "no table": (lambda p: edited(p, tensors=None), "is no complete manifest"),
    "some other JSON": (lambda p: p.write_text("[]"), "is no manifest of weights"),
    "half a manifest": (lambda p: os.truncate(p, 500), "cannot be read as a manifest"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_manifest_and_archive_that_do_not_belong_together(tmp_path: Path, name: str) -> None:
    tamper, message = TAMPERINGS[name]
    out = convert("resnet20", STATE, tmp_path / "m.json")
    tamper(out)
    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        resolve("resnet20", out)


def test_another_container_of_the_same_tensors_is_fine(tmp_path: Path) -> None:
    out = convert("resnet20", STATE, tmp_path / "m.json")
    np.savez_compressed(tmp_path / "m.npz", **STATE)
    assert resolve("resnet20", out).state.keys() == STATE.keys()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = convert("resnet20", STATE, tmp_path / "a.safetensors")
    before = out.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        convert("resnet20", random_state_dict(describe("resnet20"), seed=9), out)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_old_leftovers_are_cleared_and_fresh_ones_are_not(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".writing-old", tmp_path / ".writing-fresh"
    old.touch()
    fresh.touch()
    os.utime(old, (0, 0))
    a_day_ago = time.time() - 24 * 3600  # a long run that writes at its end
    os.utime(fresh, (a_day_ago, a_day_ago))
    convert("resnet20", STATE, tmp_path / "a.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {".writing-fresh", "a.safetensors"}


# A disk that takes its time keeps every file unfinished for long enough to be killed there.
PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.weights_store import convert, writing
states = [random_state_dict(describe("resnet110"), seed) for seed in (0, 1)]
fsync = os.fsync
writing.os.fsync = lambda descriptor: (time.sleep(0.05), fsync(descriptor))
while True:
    for state in states:
        convert("resnet110", state, {folder!r} + "/a.safetensors")
        convert("resnet110", state, {folder!r} + "/a.json")
    print("ready", flush=True)
"""


def read(path: Path) -> tuple[Mapping[str, np.ndarray], str]:
    """Returns what a file holds, or why it is refused."""
    try:
        return resolve("resnet110", path).state, ""
    except CheckpointError as error:
        return {}, str(error)


def test_a_process_killed_while_converting_leaves_nothing_half_written(tmp_path: Path) -> None:
    network = describe("resnet110")
    whole = [random_state_dict(network, seed)["conv1.weight"].tobytes() for seed in (0, 1)]
    delays = random.Random(0)
    leftovers: set[str] = set()

    def unfinished() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if path.name.startswith(".writing-")} - leftovers

    found = 0
    for _ in range(6):
        program = PROGRAM.format(root=str(ROOT), folder=str(tmp_path))
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(delays.uniform(0.01, 0.4))
            deadline = time.monotonic() + 60
            while not unfinished() and time.monotonic() < deadline:
                pass
            process.send_signal(signal.SIGKILL)
        leftovers |= unfinished()
        for path in (tmp_path / "a.safetensors", tmp_path / "a.json"):
            if not path.exists():
                continue
            state, refusal = read(path)
            if refusal:
                # Killed between archive and manifest: both are whole, and told apart.
                assert path.suffix == ".json"
                assert "is not the archive that" in refusal
                continue
            assert state.keys() == network.tensor_table().keys()
            assert state["conv1.weight"].tobytes() in whole
            found += 1
    assert found
    assert leftovers, "no process was killed in the middle of a write"
