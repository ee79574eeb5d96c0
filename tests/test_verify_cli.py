"""`cupy-resnet verify`: what it prints, how it ends, and which command lines it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from cli_support import on_terminal, run_here
from PIL import Image
from predict_support import pixels
from verify_support import one_tap_dropped

MODEL = ("resnet20-cifar10", "--engine", "numpy")


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs the command here, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(monkeypatch, capsys, "verify", *map(str, arguments))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(5):
        Image.fromarray(pixels(index)).save(folder / f"{index}.png")
    (folder / "2.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize(("against", "words"), [("torch", "torch 2"), ("numpy", "NumPy engine, float64, not fused")])
def test_a_table_and_a_verdict(verify, against: str, words: str) -> None:
    outcome = verify(*MODEL, "--against", against, "--batch", 2)
    assert outcome.status == 0
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert "network    resnet20, weights resnet20-cifar10" in lines
    assert "verified   numpy engine, fp32, fused" in lines
    assert "input      2 × 3 × 32 × 32, normal deviates, seed 0" in lines
    assert any(line.startswith("against ") and words in line for line in lines)
    rows = [line.split() for line in lines if re.match(r"(stem|layer|gap|logits)\S* +2×", line)]
    assert [row[0] for row in rows][::11] == ["stem", "logits"]
    assert len(rows) == 12
    assert all(0 <= int(row[-1].rstrip("%")) < 100 for row in rows)
    assert re.fullmatch(r"All 12 checkpoints are within tolerance; \S+ uses most of it, \d+%\.", lines[-1])


def test_a_broken_engine_is_named_and_the_status_is_1(verify, monkeypatch: pytest.MonkeyPatch) -> None:
    one_tap_dropped(monkeypatch, lambda p: (p.C, p.K) == (16, 32))
    outcome = verify(*MODEL, "--against", "torch")
    assert outcome.status == 1
    assert re.search(r"^layer2\.0 is the first over tolerance, with [\d,]+ times what that allows: ", outcome.out, re.M)
    assert "--step tells which blocks are wrong themselves" in outcome.out

    outcome = verify(*MODEL, "--against", "torch", "--step", "--json", "-")
    assert outcome.status == 1
    report = json.loads(outcome.out)
    assert not report["passed"]
    assert report["layers"]["step"]
    assert report["layers"]["first_over"] == "layer2.0"
    assert [row["name"] for row in report["layers"]["checkpoints"] if not row["passed"]] == ["layer2.0"]


def test_photographs(verify, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,label\n0.png,cat\n1.png,4\n2.png,ship\n")
    outcome = verify(*MODEL, "--against", "numpy", "--photos", photos, "--labels", "labels.csv", "--json", "r.json")
    assert outcome.status == 0
    assert outcome.err == "wrote r.json\n"
    assert f"input      4 × 3 × 32 × 32, the first 4 photographs of {photos}" in outcome.out
    fields = dict(re.findall(r"^(\S+(?: \S+)*?)  +(.*)$", outcome.out, re.MULTILINE))
    assert fields["photographs"] == "5, 1 unreadable"
    assert fields["same top 1"] == fields["same top 5"] == "4 of 4 (100.00%)"
    assert fields["over tolerance"].startswith("0 of 4")
    assert re.fullmatch(r"top 1 \d of 2 \(\d+\.00%\), top 5 \d of 2 \(\d+\.00%\)", fields["right, verified"])
    assert fields["right, verified"] == fields["right, reference"]
    assert "no image format" in fields[str(photos / "2.png")]
    assert outcome.out.splitlines()[-1] == "The logits of every photograph are within tolerance."
    report = json.loads(Path("r.json").read_text())
    assert report["passed"]
    assert report["photographs"]["labelled"] == 2

    (tmp_path / "labels.csv").write_text("other.png,cat\n")
    outcome = verify(*MODEL, "--against", "numpy", "--photos", photos, "--labels", "labels.csv")
    assert "labels.csv names none of these photographs." in outcome.out


def test_photographs_that_differ(verify, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_tap_dropped(monkeypatch, lambda p: p.C == 64)
    outcome = verify(*MODEL, "--against", "torch", "--photos", photos, "--batch", 2)
    assert outcome.status == 1
    assert re.search(r"^photograph +verified +margin +reference +their margin", outcome.out, re.MULTILINE)
    assert re.search(rf"^{re.escape(str(photos))}/0\.png  ", outcome.out, re.MULTILINE)
    assert "The logits of 4 photographs are over tolerance." in outcome.out


def test_dumps(verify) -> None:
    outcome = verify(*MODEL, "--dump", "a", "--batch", 1, "--seed", 4)
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "wrote a\n")
    outcome = verify(*MODEL, "--dump", "b", "--against", "a", "--no-fuse")
    assert outcome.status == 0
    assert "input      1 × 3 × 32 × 32, normal deviates, seed 4" in outcome.out
    outcome = verify("a", "--against", "b")
    assert outcome.status == 0
    assert "verified   numpy engine, fp32, fused (dump a)" in outcome.out
    assert "against    numpy engine, fp32, not fused (dump b)" in outcome.out
    np.savez("b/layer2.1.npz", np.load("b/layer2.1.npz")["output"] + 1)
    outcome = verify("a", "--against", "b")
    assert outcome.status == 1
    assert "layer2.1 is the first over tolerance" in outcome.out
    assert "--step" not in outcome.out
    outcome = verify("resnet20-cifar10", "--against", "nowhere")
    assert outcome.status == 2
    Path("b/input.npy").unlink()
    outcome = verify("a", "--against", "b")
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith("error: b is no dump: it has no input.npy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet19", "--against", "torch"], "unknown model 'resnet19'"),
        (["resnet20"], "say what counts as right: torch, numpy or a dump's folder"),
        (["resnet20", "--against", "pytorch"], "unknown reference 'pytorch'. Did you mean 'torch'?"),
        (["resnet20", "--against", "torch", "--precision", "fp61"], "unknown precision 'fp61'"),
        (["resnet20", "--against", "torch", "--batch", "0"], "Invalid value for '--batch'"),
        (["resnet20", "--dump", "x", "--json", "r.json"], "--json cannot be used here: nothing is compared without"),
        (["resnet20", "--dump", "x", "--step", "--against", "torch"], "--dump cannot be used here: with --step"),
        (
            ["resnet20", "--against", "torch", "--labels", "l.csv"],
            "--labels cannot be used here: it describes --photos",
        ),
        (["resnet20", "--against", "torch", "--photos", "p", "--random"], "--random cannot be used here: the input is"),
        (["resnet20", "--against", "torch", "--photos", "p", "--seed", "0"], "--seed cannot be used here"),
        (
            ["resnet20", "--against", "d", "--photos", "p"],
            "--photos cannot be used here: the input is that of the dump d",
        ),
        (
            ["resnet20", "--against", "d", "--batch", "2"],
            "--batch cannot be used here: the input is that of the dump d",
        ),
        (["d", "--against", "torch"], "d is a dump, which is compared with another dump"),
        (["d", "--against", "d", "--kernel", "conv2d_direct"], "--kernel cannot be used here: d is a dump"),
        (["d", "--against", "d", "--seed", "0"], "--seed cannot be used here: d is a dump"),
        (["d", "--dump", "e"], "say what counts as right"),
    ],
)
def test_command_lines_that_mean_nothing(verify, arguments: list[str], message: str) -> None:
    Path("d").mkdir()
    outcome = verify(*arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert message in " ".join(outcome.err.split())


def test_a_bar_and_colors_on_a_terminal(photos: Path, tmp_path: Path) -> None:
    shown = on_terminal("verify", *MODEL, "--against", "numpy", "--photos", str(photos), folder=tmp_path, columns=160)
    assert "images" in shown
    assert "5/5" in shown
    assert "\x1b[32mAll 12 checkpoints are within tolerance" in shown
    assert "Traceback" not in shown


def test_it_is_listed(verify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "verify" in run_here(monkeypatch, capsys, "--help").out
    assert "--against" in verify("--help").out
