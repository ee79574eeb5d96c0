"""What a profile is written as: trace, roofline, JSON, table."""

import json
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_support import run, run_here
from profile_support import LIMITS, FakeClock

import cupy_resnet
from cupy_resnet.cli.profile import _print_profile
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof import plot_style
from cupy_resnet.proof.profiling import Profile, Roof, profile, trace, write_trace
from cupy_resnet.proof.roofline import LABELS, Point, plot_profile, plot_roofline

MODEL = ("profile", "resnet20-cifar10", "--engine", "numpy", "--batch", "2", "--samples", "2")


@pytest.fixture(scope="module")
def result() -> Profile:
    model = cupy_resnet.load("resnet20", random_state_dict(describe("resnet20")), engine="numpy", fuse=False)
    times = [1e-4 * (1 + number % 7) for number in range(101)]
    return profile(model, 2, samples=3, clock=FakeClock(alone=times), limits=LIMITS)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The command line in this process, on a machine whose ceilings are known."""
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("cupy_resnet.proof.profiling.measuring.ceilings", lambda device, refresh: LIMITS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def slices(events, track):
    return [event for event in events if event["ph"] == "X" and event["tid"] == track]


def test_a_trace_lays_operations_end_to_end_with_blocks_below(result):
    events = trace(result)["traceEvents"]
    operations, blocks, whole = (slices(events, track) for track in (1, 2, 3))
    assert [event["dur"] for event in operations] == [op.median_us for op in result.ops]
    now = 0.0
    for event in operations:
        assert event["ts"] == pytest.approx(now)
        now += event["dur"]
    assert now == pytest.approx(result.sum_us)
    assert [event["name"] for event in blocks] == [
        "stem", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)), "head"
    ]  # fmt: skip
    assert sum(event["dur"] for event in blocks) == pytest.approx(now)
    assert [event["dur"] for event in whole] == [result.median_whole_us]


def test_a_trace_is_what_perfetto_reads(result, tmp_path):
    write_trace(result, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    stored = json.loads((tmp_path / "trace.json").read_text())
    assert "overlap off" in stored["otherData"]["method"]
    for event in stored["traceEvents"]:
        assert event.keys() >= {"ph", "pid", "tid", "name", "args"}
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
        else:
            assert event["ph"] == "M"
            assert event["name"] in ("process_name", "thread_name")
    conv = next(event for event in stored["traceEvents"] if event["name"] == "layer2.0.conv1")
    assert conv["args"]["kernel"] == "im2col + BLAS"
    assert conv["args"]["problem"].startswith("2×32×32×16 → 32")


def test_a_failed_trace_leaves_what_was_there(result, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_trace(result, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_roofline_shows_every_operation_with_arithmetic(result):
    figure = plot_profile(result)
    (axes,) = figure.axes
    points = [tuple(point) for collection in axes.collections for point in collection.get_offsets()]
    expected = [(op.intensity, op.tflops * 1e3) for op in result.ops if op.flops]
    np.testing.assert_allclose(sorted(points), sorted(expected))
    assert len(points) == len(result.ops) - 3  # the layout and two shortcuts compute nothing
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "FLOP/B" in axes.get_xlabel()
    assert "GFLOP/s" in axes.get_ylabel()
    numbers = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    assert numbers == [str(number) for number in range(1, LABELS + 1)]


def test_the_roof_is_drawn_where_it_was_measured(result):
    (axes,) = plot_profile(result).axes
    xs, ys = axes.lines[0].get_data()
    assert (xs[1], ys[1]) == (pytest.approx(10), pytest.approx(1000))  # 1 TFLOP/s from 10 FLOP/B on, in GFLOP/s
    assert ys[0] / xs[0] == pytest.approx(100)  # 100 GB/s
    assert ys[2] == ys[1]


def test_without_a_compute_ceiling_memory_alone_bounds():
    points = [Point(label="a", group="g", intensity=x, tflops=1.0, share=0.5) for x in (1.0, 100.0)]
    (axes,) = plot_roofline(points, Roof(1e12, None, "bfloat16")).axes
    xs, ys = axes.lines[0].get_data()
    assert ys / xs == pytest.approx([1.0] * len(xs))
    assert not any("bfloat16" in text.get_text() for text in axes.texts)


def test_points_alike_are_named_once():
    points = [Point(label="twice", group="g", intensity=9.0, tflops=2.0, share=0.3) for _ in range(2)]
    points.append(Point(label="once", group="h", intensity=50.0, tflops=3.0, share=0.4))
    (axes,) = plot_roofline(points, Roof(1e12, 1e13, "float32")).axes
    (listed,) = (text.get_text() for text in axes.texts if "share" in text.get_text())
    assert [line.split()[::2] for line in listed.splitlines()[1:]] == [["1", "twice"], ["2", "once"]]
    assert "60%" in listed


@pytest.mark.parametrize("suffix", plot_style.FORMATS)
def test_plots_are_written_whole_and_the_same_every_time(result, tmp_path, suffix):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        plot_style.save_figure(plot_profile(result), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    assert sorted(tmp_path.iterdir()) == paths


def test_text_of_an_svg_is_text(result):
    root = ElementTree.fromstring(plot_style.render(plot_profile(result), ".svg"))
    words = " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "memory 100 GB/s" in words
    assert "A device" in words


def test_a_plot_of_another_kind_is_refused(result, tmp_path):
    for path in (tmp_path / "plot.bmp", tmp_path / "plot"):
        with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
            plot_style.save_figure(plot_profile(result), path)
        with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
            plot_style.check_plot_path(path)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy-resnet\[notebooks\]'"):
        plot_style.check_plot_path(tmp_path / "plot.png")


def luminance(color: str) -> float:
    """WCAG's relative luminance."""
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_series_differ_in_colour_and_marker_and_words_can_be_read():
    assert len(set(plot_style.COLORS)) == len(plot_style.COLORS) == len(set(plot_style.MARKERS))
    assert plot_style.series(0) == plot_style.series(len(plot_style.COLORS))
    assert 1.05 / (luminance(plot_style.GREY) + 0.05) >= 4.5  # WCAG's contrast for text on white


def test_the_command_prints_a_table_and_writes_files(quick, monkeypatch, capsys):
    done = run_here(monkeypatch, capsys, *MODEL, "--trace", "t.json", "--plot", "r.png", "--json", "p.json")
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0].split()[:5] == ["layer", "operation", "problem", "kernel", "configuration"]
    assert "GFLOP/s" in lines[0]
    stored = json.loads((quick / "p.json").read_text())
    for op, line in zip(stored["ops"], lines[1:], strict=False):
        assert line.startswith(op["layer"] or f"({op['block']})")
        assert f" {op['median_us']:.1f} " in line
        assert line.endswith(f" {op['share']:.1%}")
    assert "launch overlap off" in done.out
    assert f"{stored['sum_us'] / 1e3:.3f} ms: {len(stored['ops'])} operations" in done.out
    assert f"{stored['median_whole_us'] / 1e3:.3f} ms, as it is called" in done.out
    assert f"{sum(op['bound_us'] for op in stored['ops']) / 1e3:.3f} ms: the sum of all bounds" in done.out
    assert done.err == "wrote t.json\nwrote r.png\nwrote p.json\n"
    assert json.loads((quick / "t.json").read_text())["traceEvents"]
    assert stored["ceilings"] == LIMITS.to_dict()
    assert stored["versions"]["python"]


def test_json_on_stdout_is_in_place_of_the_table(quick, monkeypatch, capsys):
    done = run_here(monkeypatch, capsys, *MODEL, "--json", "-", "--no-fuse", "--size", "16")
    stored = json.loads(done.out)
    assert (stored["model"], stored["input_shape"], stored["fuse"]) == ("resnet20", [2, 3, 16, 16], False)
    assert [len(op["samples_us"]) for op in stored["ops"]] == [2] * len(stored["ops"])
    assert "overlap off" in stored["method"]


def test_random_weights_need_no_file(quick, monkeypatch, capsys):
    arguments = ("profile", "resnet32", "--engine", "numpy", "--samples", "1", "--random-weights")
    done = run_here(monkeypatch, capsys, *arguments)
    assert done.status == 0, done.err
    assert re.search(r"^network +resnet32, input 1 × 3 × 32 × 32, fp32, numpy engine, A device$", done.out, re.M)


@pytest.mark.parametrize(
    ("model", "reason"), [("resnet18", "weights of resnet18 cannot be had"), ("resnet32", "resnet32 needs weights")]
)
def test_without_weights_the_error_names_the_way_out(quick, monkeypatch, capsys, model, reason):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # torchvision's are not to be had
    done = run_here(monkeypatch, capsys, "profile", model, "--engine", "numpy", "--samples", "1")
    assert (done.status, done.out) == (1, "")
    assert reason in done.err
    assert "--random-weights" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "r.bmp"), "r.bmp"),
        (("--random-weights", "--weights", "w.npz"), "exclude each other"),
        (("--samples", "0"), "--samples"),
        (("--batch", "0"), "--batch"),
        (("--kernel", "conv3d"), "conv3d"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_is_measured(quick, monkeypatch, capsys, arguments, message):
    done = run_here(monkeypatch, capsys, *MODEL, *arguments)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


def test_the_command_measures_this_machine_once(tmp_path):
    first = run(*MODEL, folder=tmp_path)
    assert first.status == 0, first.err
    assert "numpy.matmul" in first.out
    (kept,) = (tmp_path / "cache" / "ceilings").iterdir()
    before = kept.stat().st_mtime_ns
    assert run(*MODEL, folder=tmp_path).status == 0
    assert kept.stat().st_mtime_ns == before


def test_steps_of_several_layers_fit_a_narrow_terminal(result, monkeypatch, capsys):
    names = ("layer1.1.conv2", "layer1.1.conv3", "layer1.2.conv1", "layer2.0.downsample.0")
    op = "conv2d_back_to_back + bias + shortcut + relu + following"
    joint = replace(result.ops[1], layer=" + ".join(names), op=op)
    fused = replace(result, ops=(*result.ops, joint))
    monkeypatch.setenv("FORCE_COLOR", "1")
    told = {}
    for columns in (110, 1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        _print_profile(fused)
        told[columns] = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, told[110].splitlines())) <= 110
    assert sorted("".join(told[110].split())) == sorted("".join(told[1000].split()))
    for name in names:
        assert re.search(rf"^{re.escape(name)}( \+)?( |$)", told[110], re.M)
    monkeypatch.delenv("FORCE_COLOR")
    _print_profile(fused)
    assert f"\n{joint.layer}  {joint.op}  " in capsys.readouterr().out


def test_help_fits_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    done = run_here(monkeypatch, capsys, "profile", "--help")
    assert done.status == 0
    assert max(map(len, done.out.splitlines())) <= 60
