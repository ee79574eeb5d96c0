"""`cupy-resnet predict`: every format read back, exit statuses, pipes, and files that appear whole or not at all."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_support import COMMAND, MODEL, environment, on_terminal, run, run_here, running
from PIL import Image
from predict_support import pixels

import cupy_resnet

NAMES = ["a.png", "b.png", "c.png"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three images and a file that is none, below ``photos``."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "photos").mkdir()
    for seed, name in enumerate(NAMES):
        Image.fromarray(pixels(seed)).save(folder / "photos" / name)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n, and no more of it")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """What the library says of the three images."""
    paths = [folder / "photos" / name for name in NAMES]
    return cupy_resnet.predict(paths, model="resnet20-cifar10", engine="numpy", topk=3)


def predict(*arguments, folder, **options):
    return run("predict", *arguments, *MODEL, folder=folder, **options)


def check(entry, prediction, name):
    assert entry["path"] == f"photos/{name}"
    assert tuple(entry["labels"]) == prediction.labels
    assert tuple(entry["class_indices"]) == prediction.class_indices
    assert entry["probabilities"] == pytest.approx(prediction.probabilities, rel=1e-5)
    assert entry["error"] is None


def test_json_reads_back(folder, expected):
    done = predict("photos", "--topk", "3", "--format", "json", folder=folder)
    assert done.status == 0
    entries = json.loads(done.out)
    assert [entry["index"] for entry in entries] == [0, 1, 2]
    for entry, prediction, name in zip(entries, expected, NAMES, strict=True):
        check(entry, prediction, name)
    assert re.fullmatch(r"3 images in .* s \(.*/s\): resnet20, resnet20-cifar10, numpy engine\n", done.err)


def test_json_lines_read_back(folder, expected):
    done = predict("photos", "--topk", "3", "--format", "jsonl", "--quiet", folder=folder)
    assert (done.status, done.err) == (0, "")
    for line, prediction, name in zip(done.out.splitlines(), expected, NAMES, strict=True):
        check(json.loads(line), prediction, name)


def test_csv_reads_back(folder, expected):
    done = predict("photos", "--topk", "3", "--format", "csv", folder=folder)
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [(row["path"], row["rank"]) for row in rows] == [(f"photos/{n}", str(k)) for n in NAMES for k in (1, 2, 3)]
    assert [row["label"] for row in rows] == [label for p in expected for label in p.labels]
    assert [int(row["class_index"]) for row in rows] == [index for p in expected for index in p.class_indices]
    probabilities = [value for p in expected for value in p.probabilities]
    assert [float(row["probability"]) for row in rows] == pytest.approx(probabilities, rel=1e-5)
    assert {row["error"] for row in rows} == {""}


def test_a_table_in_a_pipe_is_as_wide_as_it_needs(folder, expected):
    done = predict("photos", "--topk", "2", folder=folder, COLUMNS="20")
    lines = done.out.splitlines()
    assert lines[0].split() == ["image", "prob.", "class", "index"]
    assert lines[1].split() == [
        f"photos/{NAMES[0]}",
        f"{expected[0].probability:.1%}",
        expected[0].label,
        str(expected[0].class_index),
    ]
    assert len(lines) == 1 + 2 * len(NAMES)


def test_a_table_on_a_terminal_of_40_columns_loses_no_letter(folder):
    arguments = ("predict", "photos", *MODEL, "--quiet")
    narrow = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_terminal(*arguments, folder=folder, columns=40))
    assert max(map(len, narrow.splitlines())) <= 40
    assert sorted("".join(narrow.split())) == sorted("".join(run(*arguments, folder=folder).out.split()))


def test_a_terminal_shows_progress_but_not_between_the_lines_of_results(folder):
    assert "3/3" in on_terminal("predict", "photos", *MODEL, folder=folder, columns=80)
    lines = on_terminal("predict", "photos", *MODEL, "--format", "jsonl", folder=folder, columns=80)
    assert "3/3" not in lines
    assert "3 images in" in lines


def test_the_name_of_the_output_tells_its_format(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name in ("out.json", "out.jsonl", "out.csv", "out.txt"):
        done = run_here(monkeypatch, capsys, "predict", "photos", *MODEL, "--output", name)
        assert (done.status, done.out) == (0, ""), done.err
    assert len(json.loads((folder / "out.json").read_text())) == 3
    assert len((folder / "out.jsonl").read_text().splitlines()) == 3
    assert (folder / "out.csv").read_text().startswith("index,path,rank,")
    assert (folder / "out.txt").read_text().startswith("image ")
    assert not list(folder.glob(".writing-*"))


def test_a_bad_image_ends_the_run_after_what_came_before_it(folder, expected):
    done = predict("photos/a.png", "broken.png", "photos/b.png", "--topk", "3", "--format", "json", folder=folder)
    assert done.status == 1
    assert done.err.startswith("error: broken.png: ")
    (entry,) = json.loads(done.out)
    check(entry, expected[0], NAMES[0])


@pytest.mark.parametrize("name", ["json", "jsonl", "csv", "table"])
def test_a_recorded_error_is_among_the_results_and_the_exit_status(folder, monkeypatch, capsys, name):
    monkeypatch.chdir(folder)
    arguments = ("photos/a.png", "broken.png", "photos/b.png", "--on-error", "record", "--topk", "1")
    done = run_here(monkeypatch, capsys, "predict", *arguments, *MODEL, "--format", name)
    assert done.status == 1
    assert "3 images" in done.err
    assert "1 failed" in done.err
    if name == "csv":
        rows = list(csv.DictReader(io.StringIO(done.out)))
        assert [bool(row["error"]) for row in rows] == [False, True, False]
    elif name == "table":
        assert re.search(r"^broken.png +error +\S", done.out, re.MULTILINE)
    else:
        entries = json.loads(done.out) if name == "json" else [json.loads(line) for line in done.out.splitlines()]
        assert [entry["error"] is None for entry in entries] == [True, False, True]


def test_a_failed_run_leaves_the_output_as_it_was(folder):
    (folder / "kept.csv").write_text("before")
    done = predict("photos/a.png", "broken.png", "--output", "kept.csv", folder=folder)
    assert done.status == 1
    assert (folder / "kept.csv").read_text() == "before"
    assert not list(folder.glob(".writing-*"))


def test_the_output_may_be_a_link_or_stdout(folder):
    (folder / "elsewhere").mkdir()
    (folder / "link.jsonl").symlink_to("elsewhere/real.jsonl")
    assert predict("photos", "--output", "link.jsonl", folder=folder).status == 0
    assert (folder / "link.jsonl").is_symlink()
    assert len((folder / "elsewhere/real.jsonl").read_text().splitlines()) == 3
    for name in ("-", "/dev/stdout"):
        done = predict("photos", "--output", name, "--format", "jsonl", folder=folder)
        assert done.status == 0, done.err
        assert len(done.out.splitlines()) == 3


def test_stdout_that_is_a_file_is_appended_to_and_not_replaced(folder):
    arguments = ["predict", "photos", *MODEL, "--output", "/dev/stdout", "--format", "jsonl"]
    with (folder / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        subprocess.run([*COMMAND, *arguments], stdout=log, cwd=folder, env=environment(), timeout=100, check=True)
    first, *rest = (folder / "log").read_text().splitlines()
    assert (first, len(rest)) == ("before", 3)


def test_names_from_stdin_in_their_place(folder):
    done = predict("photos/c.png", "-", "--format", "jsonl", folder=folder, stdin=b"photos/b.png\r\n\nphotos/a.png")
    paths = [json.loads(line)["path"] for line in done.out.splitlines()]
    assert paths == ["photos/c.png", "photos/b.png", "photos/a.png"]
    done = predict("-", "--format", "json", folder=folder)
    assert (done.status, json.loads(done.out)) == (0, [])


def test_an_image_on_stdin_is_told_apart_from_names(folder):
    done = predict("-", folder=folder, stdin=(folder / "photos/a.png").read_bytes())
    assert (done.status, done.out) == (1, "")
    assert "one a line" in done.err


def test_any_name_of_a_file_reads_back_and_cannot_move_the_cursor(folder):
    strange = folder / "strange"
    strange.mkdir()
    names = [b"\xff.png", b"a\x1b[31m,\"b'.png", "ünï.png".encode(), b"new\nline.png"]
    for name in names:
        (strange / os.fsdecode(name)).write_bytes((folder / "photos/a.png").read_bytes())
    wanted = {b"strange/" + name for name in names}
    done = predict("strange", "--topk", "1", "--format", "json", folder=folder)
    assert {os.fsencode(entry["path"]) for entry in json.loads(done.out)} == wanted
    done = predict("strange", "--topk", "1", "--format", "csv", folder=folder)
    assert {os.fsencode(row["path"]) for row in csv.DictReader(io.StringIO(done.out, newline=""))} == wanted
    done = predict("strange", "--topk", "1", folder=folder)
    assert "\x1b" not in done.out
    assert len(done.out.splitlines()) == 1 + len(names)
    assert predict("strange", "--topk", "1", folder=folder, PYTHONIOENCODING="ascii").status == 0


def test_options_reach_the_model(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    image = Image.fromarray(pixels(7, 40, 20))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(folder / "turned.jpg", exif=exif)
    (folder / "names.txt").write_text("\n".join(f"name {i}" for i in range(10)))

    def first(*arguments):
        done = run_here(monkeypatch, capsys, "predict", "turned.jpg", *MODEL, "--format", "json", *arguments)
        assert done.status == 0, done.err
        return json.loads(done.out)[0]

    plain, upright = first(), first("--no-exif")
    assert plain["probabilities"] != upright["probabilities"]
    assert first("--batch-size", "1", "--workers", "1")["probabilities"] == plain["probabilities"]
    assert first("--categories", "names.txt")["labels"][0].startswith("name ")
    assert len(first("--topk", "2")["labels"]) == 2
    assert first("--resize", "64", "--crop", "32")["probabilities"] != plain["probabilities"]
    assert first("--mean", "0,0,0", "--std", "1,1,1")["probabilities"] != plain["probabilities"]


def test_results_come_while_names_are_still_being_read(folder):
    arguments = ("predict", "-", *MODEL, "--format", "jsonl", "--batch-size", "1", "--workers", "1", "--quiet")
    with running(*arguments, folder=folder) as process:
        process.stdin.write(b"photos/a.png\n" * 8)
        process.stdin.flush()
        first = json.loads(process.stdout.readline())
        assert first["path"] == "photos/a.png"
        assert process.poll() is None
        process.stdin.close()
        process.stdin = None
        rest = process.stdout.read().splitlines()
        assert process.wait(60) == 0
    assert [json.loads(line)["index"] for line in rest] == list(range(1, 8))


@pytest.mark.parametrize("name", ["csv", "json"])
def test_killed_in_the_middle_the_output_is_what_it_was(folder, name):
    output = folder / f"killed.{name}"
    output.write_text("before")
    arguments = ("predict", "-", *MODEL, "--output", output.name, "--batch-size", "1", "--workers", "1")
    with running(*arguments, folder=folder) as process:
        process.stdin.write(b"photos/a.png\n" * 8)
        process.stdin.flush()
        deadline = time.monotonic() + 60
        # The first results are written, or kept, while the process waits for more names.
        while not _in_progress(folder, name) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _in_progress(folder, name)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert output.read_text() == "before"
    for temporary in folder.glob(".writing-*"):
        temporary.unlink()
    assert predict("photos", "--output", output.name, folder=folder).status == 0
    assert output.read_text() != "before"


def _in_progress(folder: Path, name: str) -> bool:
    parts = list(folder.glob(".writing-*"))
    return any(part.stat().st_size > 100 for part in parts) if name == "csv" else bool(parts)


@pytest.mark.parametrize("name", ["jsonl", "json"])
def test_a_closed_pipe_is_no_news(folder, name):
    listed = " ".join(["photos"] * 40)
    command = f"{' '.join(COMMAND)} predict {listed} {' '.join(MODEL)} --topk 1 --format {name} --quiet | head -1"
    done = subprocess.run(
        command, shell=True, capture_output=True, cwd=folder, env=environment(), timeout=60, check=False
    )
    assert done.stderr == b""
    assert len(done.stdout.splitlines()) == 1


def test_interrupted_it_leaves_quietly(folder):
    arguments = ("predict", "-", *MODEL, "--format", "jsonl", "--batch-size", "1", "--workers", "1", "--quiet")
    with running(*arguments, folder=folder) as process:
        process.stdin.write(b"photos/a.png\n" * 8)
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""
