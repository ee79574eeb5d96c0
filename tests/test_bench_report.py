"""Reports: JSON that reads back, ratios and their refusal in words, tables for pages, and the plot."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from bench_support import MACHINE, entry, report, row
from PIL import Image

from cupy_resnet.proof import machine, tables
from cupy_resnet.proof.bench.listings import list_report, list_row, number, percent
from cupy_resnet.proof.bench.plot import plot_report
from cupy_resnet.proof.bench.report import STREAM_FROM, read_report, write_json
from cupy_resnet.proof.plot_style import render

FAST, SLOW = entry("ours", 2.0, stream_ms=1.0), entry("compile", 3.0, stream_ms=1.2)
OTHER = entry("graph-nhwc", 2.5, stream_ms=2.4)


def test_each_kind_of_call_has_a_fastest_rival_of_its_own():
    found = row(FAST, SLOW, OTHER)
    assert found.fastest_rival("latency").name == "graph-nhwc"
    assert found.fastest_rival("stream").name == "compile"
    assert found.ratio(FAST, "latency").value == pytest.approx(1.25)
    assert found.ratio(FAST, "stream").value == pytest.approx(1.2)
    assert found.images_per_second(FAST) == pytest.approx(1000)


@pytest.mark.parametrize(("N", "kind"), [(1, "latency"), (STREAM_FROM - 1, "latency"), (STREAM_FROM, "stream")])
def test_the_figure_of_a_row_follows_from_the_batch_size(N, kind):
    assert row(FAST, SLOW, N=N).kind == kind


def test_wrong_rivals_do_not_count_and_without_any_there_is_no_ratio():
    wrong = entry("compile", 0.1, wrong="its results are not finite", error=None)
    assert row(FAST, wrong, OTHER).fastest_rival("stream").name == "graph-nhwc"
    assert "no rival" in row(FAST, wrong).ratio(FAST, "stream").reason
    assert "no rival" in row(FAST).ratio(FAST, "stream").reason


def test_a_report_reads_back_as_it_was_written(tmp_path):
    wrong = entry("compile", 0.1, wrong="its results are not finite", error=None, peak_bytes=None)
    first = report(row(FAST, wrong, bound_ms=0.25), row(FAST, OTHER, N=8, failed={"compile": "no compiler"}))
    path = tmp_path / "new folder" / "report.json"
    write_json(path, first.to_dict())
    assert read_report(path) == first
    values = json.loads(path.read_text())
    assert values["format"] == "bench"
    assert {key: values[key] for key in MACHINE} == MACHINE
    assert values["rows"][0]["entries"][0]["latency_ms"] == FAST.latency_ms
    assert [each.name for each in path.parent.iterdir()] == ["report.json"]


def test_samples_stand_on_one_line_with_six_digits(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"ms": [1.23456789e-5, 2, -3.5], "names": ["a [1,\n 2]", "b"], "none": [], "deep": [[1, 2], [3]]})
    text = path.read_text()
    assert '"ms": [1.23457e-05, 2, -3.5]' in text
    assert json.loads(text)["names"] == ["a [1,\n 2]", "b"]
    assert json.loads(text)["deep"] == [[1, 2], [3]]


def test_a_number_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"ms": [1.0]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"ms": [float("nan")]})
    assert json.loads(path.read_text()) == {"ms": [1.0]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.update(format="fusion"), "format is 'fusion'"),
        (lambda values: values.pop("rows"), "lacks rows"),
        (lambda values: values["rows"][0].pop("N"), "row of a report: missing or unknown N"),
        (lambda values: values["rows"][0]["entries"][0].update(colour="red"), "missing or unknown colour"),
    ],
)
def test_something_else_is_no_report(change, words, tmp_path):
    values = report(row(FAST, SLOW)).to_dict()
    change(values)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=words) as raised:
        read_report(path)
    assert str(path) in str(raised.value)


def test_a_row_in_words():
    found = list_row(row(FAST, SLOW, OTHER, N=8, failed={"max-autotune": "no compiler"}))
    assert found.title == "resnet20, N = 8, fp32, 32 × 32 pixels, numpy engine, 5 single calls each"
    assert found.header[-1] == "first call s"
    assert found.rows[0] == ("ours", "2.00", "1.99", "2.01", "2.01", "1.00", "8,000", "25.0", "0.50")
    assert found.notes == (
        "ours: calls back to back (the figure for this N): 1.20× the speed of the fastest rival, compile",
        "ours: single calls: 1.25× the speed of the fastest rival, graph-nhwc",
        "max-autotune is left out: no compiler",
    )


def test_a_refused_ratio_says_why():
    close = entry("compile", 2.001, stream_ms=1.5)
    found = list_row(row(FAST, close, bound_ms=0.5))
    assert "ours: single calls (the figure for this N): –, the medians differ by 0.001 ms" in found.notes[0]
    assert found.header[-1] == "of the roofline"
    assert found.rows[0][-1] == "50 %"
    wrong = entry("ours", 1.0, wrong="its results are not finite", error=None)
    found = list_row(row(wrong, close))
    assert found.rows[0][0] == "ours (wrong)"
    assert found.notes[0] == "ours: no ratio, since its results are not finite"


def test_it_is_said_what_the_roofline_is_of():
    launches, apart = row(FAST, bound_ms=0.5, bound_of="launches"), row(FAST, bound_ms=0.5)
    words = "Of the roofline: the least time that memory and arithmetic allow "
    for each, of in ((launches, "what ours launches, each launch by itself"), (apart, "every operation by itself")):
        assert list_row(each).notes[-1].startswith(f"{words}{of}")
        assert f"{words}{of}" in list_report(report(each)).notes[1]
    assert not [note for note in list_row(row(FAST)).notes if "roofline" in note]
    assert len(list_report(report(row(FAST))).notes) == 2  # how to read the columns, and why there is no ratio


def test_a_bound_that_is_beaten_is_none():
    beaten = row(FAST, bound_ms=1.1, precision="fp16")
    for notes in (list_row(beaten).notes, list_report(report(beaten)).notes):
        (said,) = [note for note in notes if "More than 100 %" in note]
        assert "--measure-ceilings" in said
    for fine in (row(FAST, bound_ms=0.9, precision="fp16"), row(FAST, bound_ms=1.1, precision="fp32")):
        assert not [note for note in list_row(fine).notes if "More than 100 %" in note]


def test_a_record_from_before_bounds_were_of_launches_reads_as_what_it_is(tmp_path):
    values = report(row(FAST, bound_ms=0.25)).to_dict()
    del values["rows"][0]["bound_of"]
    path = tmp_path / "report.json"
    write_json(path, values)
    assert read_report(path).rows[0].bound_of == "operations"


def test_the_ratio_that_is_not_the_figure_stands_in_parentheses():
    direct = entry("ours, conv2d_direct", 9.0)
    found = list_report(report(row(FAST, SLOW), row(FAST, direct, SLOW, N=8)))
    assert [cells[0] for cells in found.rows] == [
        "resnet20, N = 1, fp32",
        "resnet20, N = 8, fp32",
        "resnet20, N = 8, fp32, conv2d_direct",
    ]
    assert [(cells[3], cells[6]) for cells in found.rows] == [
        ("1.50×", "(1.20×)"),
        ("(1.50×)", "1.20×"),
        ("(0.33×)", "0.13×"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (1.5, "1.50"), (19.37, "19.4"), (242.6, "243"), (12345.6, "12,346"), (0, "0.00"), (None, "–")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_percentages():
    assert [percent(value) for value in (0.04, 9.94, 99.6, None)] == ["0.0 %", "9.9 %", "100 %", "–"]


def test_a_page_shows_a_stored_comparison_by_its_files_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    write_json(tmp_path / "bench_small.json", report(row(FAST, SLOW)).to_dict())
    page = tables.render("before <!-- table: bench_small --> stale <!-- end --> after")
    assert page.startswith("before <!-- table: bench_small -->\n| network | ours, ms |")
    assert "| resnet20, N = 1, fp32 | 2.00 | 3.00 (compile) | 1.50× |" in page
    assert (
        "Abacus, 2 processors, NumPy 2.0, torch 2.5, 2026-01-02; raw samples in `notebooks/results/bench_small" in page
    )
    assert "stale" not in page
    assert page.endswith("<!-- end --> after")
    assert tables.render(page) == page


def test_a_mark_of_a_table_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(KeyError, match="no table 'nothing'"):
        tables.render("<!-- table: nothing --><!-- end -->")
    write_json(tmp_path / "odd.json", {"format": "odd"})
    with pytest.raises(KeyError, match="no measurement"):
        tables.render("<!-- table: odd --><!-- end -->")


def whole_report():
    return report(
        *(
            row(
                entry("ours", 0.2 * N**0.8),
                entry("compile", 0.3 * N**0.8),
                entry("graph-nhwc", 0.25 * N, wrong="x" if N == 64 else None),
                model=model,
                N=N,
            )
            for model in ("resnet18", "resnet50")
            for N in (64, 1, 8)
        )
    )


def test_a_plot_has_a_line_of_every_contender_and_its_units():
    figure = plot_report(whole_report())
    assert len(figure.axes) == 4
    for axes, unit in zip(figure.axes, ("(images/s)", "/ ms") * 2, strict=True):
        assert unit in axes.get_ylabel()
        assert axes.get_xlabel() == "images in a batch"
        assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "8", "64"]
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines) == ["ours", "compile", "graph-nhwc"]
        assert list(lines["ours"].get_xdata()) == [1, 8, 64]
        assert list(lines["graph-nhwc"].get_xdata()) == [1, 8]  # what is wrong is not drawn
        assert len({line.get_color() for line in lines.values()}) == 3
        assert len({line.get_marker() for line in lines.values()}) == 3
    throughput, latency = figure.axes[:2]
    np.testing.assert_allclose(latency.get_lines()[0].get_ydata(), [0.2 * N**0.8 for N in (1, 8, 64)], rtol=1e-4)
    np.testing.assert_allclose(
        throughput.get_lines()[0].get_ydata(), [1e3 * N**0.2 / 0.2 for N in (1, 8, 64)], rtol=1e-4
    )


def test_a_plot_as_a_file(tmp_path):
    figure = plot_report(whole_report())
    (tmp_path / "plot.png").write_bytes(render(figure, ".png"))
    with Image.open(tmp_path / "plot.png") as image:
        assert min(image.size) > 500
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 50
    text = render(figure, ".svg").decode()
    ElementTree.fromstring(text)
    for words in ("cupy_resnet and PyTorch 2.5 on Abacus", "graph-nhwc", "Wrong results in some rows"):
        assert words in text


def test_an_empty_report_has_no_plot():
    with pytest.raises(ValueError, match="no rows"):
        plot_report(report())


def test_a_machine_without_a_gpu_is_described(monkeypatch):
    found = machine.describe_machine("abc", engine="numpy")
    assert found["device"] == "CPU"
    assert found["processor"]
    assert found["processors"] >= 1
    assert found["driver"] is found["driver_cuda"] is None
    assert found["commit"] == "abc"
    assert found["versions"]["numpy"] == np.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found.keys() == MACHINE.keys()
    monkeypatch.setattr(machine, "_CPUINFO", Path("/nowhere"))
    assert machine.processor_name()


def test_the_commit_is_that_of_the_source_tree(tmp_path):
    import subprocess

    assert machine.source_commit(tmp_path) is None

    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    git("tag", "-a", "v1", "-m", "a tag is not wanted")
    commit = git("rev-parse", "HEAD")
    assert machine.source_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert machine.source_commit(tmp_path) == f"{commit}-dirty"
