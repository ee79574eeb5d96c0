"""The command line: `cupy-resnet bench` in all its modes, small, and what it refuses."""

import json
import re

import numpy as np
import pytest
from cli_support import on_terminal, run, run_here
from PIL import Image

import cupy_resnet
from cupy_resnet.proof.bench.end_to_end import EndToEndReport
from cupy_resnet.proof.bench.fusion import FusionReport
from cupy_resnet.proof.bench.report import read_report

SMALL = ("bench", "--engine", "numpy", "--models", "resnet20-cifar10", "--samples", "5", "--warmup", "1")
QUICK = (*SMALL, "--seconds", "0.2", "--no-roofline")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command in this process; an option that is given twice counts the last time."""
    from cupy_resnet.proof.bench import timing

    monkeypatch.setattr(timing, "STREAM_RUN_S", 0.001)
    return lambda *arguments: run_here(monkeypatch, capsys, *arguments)


def test_a_comparison_on_the_processor(bench, tmp_path):
    stored, drawn = tmp_path / "new" / "bench.json", tmp_path / "bench.svg"
    done = bench(*QUICK, "--batch", "1,8", "--json", str(stored), "--plot", str(drawn), "--commit", "abc")
    assert done.status == 0
    assert done.err.splitlines() == [f"wrote {stored}", f"wrote {drawn}"]
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "resnet20-cifar10, N = 1, fp32, 32 × 32 pixels, numpy engine, 5 single calls each"
    assert lines[2] == "contender median ms p10 p90 p99 back to back ms images/s memory MB first call s"
    assert [line.split()[0] for line in lines[3:7]] == ["ours", "torch-cpu-nchw", "torch-cpu-nhwc", "torch-cpu-folded"]
    assert any(line.startswith("ours: single calls (the figure for this N): ") for line in lines)
    assert any(line.startswith("ours: calls back to back (the figure for this N): ") for line in lines)
    assert sum(line.startswith("resnet20-cifar10, N = 8, fp32 ") for line in lines) == 1  # in the table of ratios
    report = read_report(stored)
    assert [row.N for row in report.rows] == [1, 8]
    assert report.machine["commit"] == "abc"
    assert report.machine["device"] == "CPU"
    assert report.settings["samples"] == 5
    assert "torch-cpu-folded" in drawn.read_text()


def test_json_on_stdout_takes_the_place_of_the_tables(bench):
    done = bench(*QUICK, "--batch", "1", "--json", "-", "--rivals", "torch-cpu")
    values = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    assert values["rows"][0]["entries"][0]["name"] == "ours"


def test_wrong_results_are_exit_status_1_and_no_ratio(bench, monkeypatch):
    load = cupy_resnet.loading.load

    def broken(*arguments, **options):
        model = load(*arguments, **options)
        return lambda x: model(x) * np.float32(1.001)

    monkeypatch.setattr(cupy_resnet.loading, "load", broken)
    done = bench(*QUICK, "--batch", "1")
    assert done.status == 1
    assert "ours (wrong)" in done.out
    assert "ours: no ratio, since its relative error against float64 is 0.001" in done.out


def test_what_was_measured_before_a_failure_is_kept(bench, monkeypatch, tmp_path):
    load = cupy_resnet.loading.load
    loads = []

    def once(*arguments, **options):
        loads.append(arguments)
        if len(loads) == 2:
            raise MemoryError("no room for the second row")
        return load(*arguments, **options)

    monkeypatch.setattr(cupy_resnet.loading, "load", once)
    done = bench(*QUICK, "--batch", "1,2", "--json", str(tmp_path / "part.json"))
    assert done.status == 1
    assert "error: no room for the second row" in done.err
    assert [row.N for row in read_report(tmp_path / "part.json").rows] == [1]


def test_the_roofline_is_measured_once_and_kept(tmp_path, monkeypatch):
    arguments = (*SMALL, "--seconds", "0.05", "--batch", "1", "--json", "-")
    done = run(*arguments, folder=tmp_path)
    assert done.status == 0, done.err
    kept = list((tmp_path / "cache" / "ceilings").iterdir())
    assert len(kept) == 1
    values = json.loads(done.out)
    assert values["rows"][0]["bound_ms"] > 0
    assert values["settings"]["ceilings"]["matmul_flops_per_s"]


def test_the_ladder_of_a_convolution_and_of_a_network(bench, tmp_path):
    stored = tmp_path / "ladder.json"
    words = ("--conv", "N=2,H=8,C=4,K=4,R=3,pad=1", "--conv", "N=1,H=8,C=4,K=4,R=1")
    done = bench(*QUICK, "--ladder", *words, "--json", str(stored))
    assert (done.status, done.err) == (0, f"wrote {stored}\n")
    assert done.out.startswith("2 convolutions, each once, fp32\n")
    assert "oneDNN bf16" in done.out
    assert [layer["text"] for layer in json.loads(stored.read_text())["layers"]] == [
        "2×8×8×4 → 4, 3×3, pad 1×1",
        "1×8×8×4 → 4, 1×1",
    ]
    done = bench(*QUICK, "--ladder", "--models", "resnet20", "--batch", "1", "--samples", "1")
    assert done.out.startswith("The distinct convolutions of resnet20, N = 1, each once, fp32\n")


def test_fusion(bench, tmp_path):
    stored = tmp_path / "fusion.json"
    done = bench(*QUICK, "--fusion", "--batch", "2", "--json", str(stored))
    assert done.status == 0
    assert done.out.startswith("resnet20-cifar10, N = 2, fp32, 32 × 32 pixels, numpy engine, median of 5\n")
    for stage in ("standard", "+ add-ReLU", "+ conv-BN-ReLU", "+ conv-BN", "+ conv-add-ReLU"):
        assert f"\n{stage} " in done.out
    assert FusionReport.from_dict(json.loads(stored.read_text())).N == 2


def test_end_to_end(bench, tmp_path):
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(folder / f"{number}.jpg")
    stored = tmp_path / "files.json"
    done = bench(*QUICK, "--end-to-end", str(folder), "--workers", "1", "--batch", "2", "--json", str(stored))
    assert done.status == 0
    for stage in ("decode", "preprocess", "copy", "inference"):
        assert f"\n{stage} " in done.out
    assert "images/s: 3 files" in done.out
    report = EndToEndReport.from_dict(json.loads(stored.read_text()))
    assert (report.workers, report.batch_size, report.images) == (1, 2, 3)
    done = bench(*QUICK, "--end-to-end", str(tmp_path / "nowhere"))
    assert done.status == 1
    assert done.err == f"error: there is no folder {tmp_path / 'nowhere'}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--models", "resnet19"), "resnet18"),
        (("--models", ","), "names nothing"),
        (("--batch", "1,x"), "got 'x'"),
        (("--batch", "0"), "at least 1"),
        (("--precision", "fp8"), "unknown precision to measure 'fp8'"),
        (("--precision", "auto"), "unknown precision to measure 'auto'"),
        (("--rivals", "eager,tensorflow"), "unknown rival 'tensorflow'"),
        (("--rivals", "graph"), "needs the CUDA engine"),
        (("--kernels", "conv2d_direct"), "applies to the CUDA engine"),
        (("--plot", "picture.gif"), "picture.gif"),
        (("--json", "."), "is a folder"),
        (("--ladder", "--fusion"), "--ladder and --fusion exclude each other"),
        (("--ladder", "--plot", "a.png"), "does not go with --ladder"),
        (("--fusion", "--rivals", "eager"), "does not go with --fusion"),
        (("--conv", "N=1,H=8,C=4,K=4,R=1"), "goes with --ladder only"),
        (("--workers", "2"), "goes with --end-to-end only"),
        (("--ladder", "--conv", "N=1"), "lacks H, C, K, R"),
        (("--fusion", "--batch", "1,2"), "needs exactly one value"),
        (("--fusion", "--precision", "fp16"), "fusion is measured in fp32"),
        (("--end-to-end", ".", "--size", "64"), "does not go with --end-to-end"),
        (("--samples", "0"), "--samples"),
        (("--seconds", "0"), "--seconds"),
        (("--engine", "tpu"), "engine"),
    ],
)
def test_wrong_usage_is_exit_status_2_before_anything_is_measured(bench, arguments, words, monkeypatch):
    def measured(*arguments, **options):
        raise AssertionError("something was measured")

    monkeypatch.setattr("cupy_resnet.proof.bench.comparison.rows", measured)
    done = bench(*QUICK, *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in " ".join(done.err.replace("│", " ").split())


def test_help_fits_a_narrow_terminal(bench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    done = bench("bench", "--help")
    assert done.status == 0
    assert max(map(len, done.out.splitlines())) <= 60
    for option in ("--rivals", "--end-to-end", "--ladder", "--fusion", "--json", "--plot"):
        assert option in done.out


def test_a_terminal_sees_the_table_and_what_is_being_done(tmp_path):
    shown = on_terminal(*SMALL, "--seconds", "0.1", "--no-roofline", "--batch", "1", folder=tmp_path, columns=80)
    assert "timing single calls" in shown
    table = [line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).splitlines() if line.startswith("torch-cpu")]
    assert [len(line.split()) for line in table] == [9] * 3  # a narrow table loses neither a name nor a number
    assert max(map(len, table)) <= 80
