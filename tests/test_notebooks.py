"""Every notebook runs on a machine without a GPU, and what is committed was run; what they share does what it says."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, Device
from cupy_resnet.conv2d.configs import ImplicitGemmConfig
from cupy_resnet.proof import notebook
from cupy_resnet.proof.plot_style import new_figure

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROBLEM = Conv2dProblem(N=32, H=28, W=28, C=128, K=128, R=3, S=3, pad_h=1, pad_w=1)


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_without_a_gpu(path, monkeypatch, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(path.parent)}})
    client.create_kernel_manager()
    # This very interpreter, whatever kernels are registered on this machine.
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert "recorded" in json.dumps(outputs).lower()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_was_run_from_top_to_bottom_before_it_was_committed(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", output["text"]


def test_quotes_are_whole_statements_of_the_source():
    quote = notebook.quote("conv2d_direct", "for (int r = 0; r < params.R")
    source = (ROOT / "kernels_cu" / "conv2d_direct.cu").read_text(encoding="utf-8").splitlines()
    there = source[quote.first - 1 : quote.first - 1 + len(quote.lines)]
    assert [line.strip() for line in quote.lines] == [line.strip() for line in there]
    text = "\n".join(quote.lines)
    assert text.startswith("for (int r")
    assert text.count("{") == text.count("}") == 2
    assert f"lines {quote.first}–{quote.first + len(there) - 1}" in quote._repr_markdown_()
    assert notebook.quote("conv2d_direct", "float accumulator").lines == ["float accumulator = 0.0f;"]


def test_a_quote_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"conv2d_direct\.cu has no line with 'for \(int z'"):
        notebook.quote("conv2d_direct", "for (int z")


def test_the_head_of_a_kernel_is_read_to_the_end_of_its_part():
    told = notebook.head("conv2d_shared", "This rung")
    assert told.startswith("Each value is fetched from global memory once per block")
    assert told.endswith("two loads for every multiply-add.")
    assert notebook.head("conv2d_shared", "Colour") == ""


def test_a_picture_is_a_png_at_its_size():
    figure, axes = new_figure("title", width=4, height=2)
    axes.plot([1, 2], [3, 4])
    data, size = notebook.Picture(figure)._repr_mimebundle_()
    assert data["image/png"].startswith("iVBOR")
    assert size["image/png"]["width"] == 4 * 96


def test_a_table_sets_numbers_to_the_right_and_escapes():
    page = notebook.Grid(["name", "value"], [["<b>", "1,234.5"], ["3×3", "–"], ["c", "12 %"]])._repr_html_()
    assert "&lt;b&gt;" in page
    assert page.count("text-align: right") == page.count("text-align: left") == 4
    assert "<table>" in notebook.Grid(["a"], [])._repr_html_()


def test_a_place_says_why_results_are_recorded(monkeypatch):
    monkeypatch.setattr(notebook, "cuda_obstacle", lambda: "the driver is missing")
    place = notebook.where_am_i()
    assert place.device is None
    assert "recorded" in repr(place)
    assert "the driver is missing" in repr(place)
    assert notebook.measure_here(PROBLEM, "conv2d_direct", None) is None


A100 = Device(name="NVIDIA A100", compute_capability=(8, 0), sm_count=108, shared_memory_per_block=166912)


class MeasuredError(Exception):
    """Something is about to be measured."""


@pytest.fixture
def on_a100(monkeypatch):
    """A machine that seems to have one; what is to be measured on it raises `MeasuredError`."""

    def engine(**_: Any) -> None:
        raise MeasuredError

    monkeypatch.setattr(notebook, "cuda_obstacle", lambda: None)
    monkeypatch.setattr(notebook, "find_device", lambda device: 0)
    monkeypatch.setattr(notebook, "describe_device", lambda device: A100)
    monkeypatch.setattr("cupy_resnet.engines.cuda_engine.CudaEngine", engine)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))


@pytest.mark.parametrize(
    ("variant", "precision", "chosen_for", "measured"),
    [
        ("conv2d_wgmma", "fp16", H100, False),  # there is no such instruction
        ("conv2d_winograd", "fp32", H100, False),  # it takes more shared memory than there is
        ("conv2d_winograd", "fp32", A100, True),
        ("conv2d_mma", "fp16", A100, True),
        ("conv2d_direct", "fp32", H100, True),
    ],
)
def test_what_another_gpu_cannot_do_is_not_measured_there(on_a100, variant, precision, chosen_for, measured):
    problem = replace(PROBLEM, precision=precision)
    config = VARIANTS[variant].candidates(problem, chosen_for)[0]
    if measured:
        with pytest.raises(MeasuredError):
            notebook.measure_here(problem, variant, config)
    else:
        assert notebook.measure_here(problem, variant, config) is None


def test_a_tile_of_the_readers_own_is_measured(on_a100):
    """One that no candidate is like, as in notebook 02."""
    mine = ImplicitGemmConfig(tile_m=128, tile_n=64, thread_m=8, thread_n=8, vector=4, min_blocks=3)
    assert mine not in VARIANTS["conv2d_implicit_gemm"].candidates(PROBLEM, A100)
    with pytest.raises(MeasuredError):
        notebook.measure_here(PROBLEM, "conv2d_implicit_gemm", mine)


def test_bars_are_as_long_as_their_values():
    values = {"first": 1.0, "second": 2.5}
    (axes,) = notebook.plot_bars(
        "t", values, "x / s", behind={"second": 4.0}, marks={"first": 3.0, "second": 2.0}, mark="m"
    ).axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [0.0, 1.0, 4.0, 2.5]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(values)
    assert [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata())] == [3.0, 2.0]
    assert axes.get_xlabel() == "x / s"


def test_a_mark_behind_a_bar_moves_its_text_and_a_far_one_does_not():
    values, marks = {"near": 9.5, "far": 1.0}, {"near": 10.0, "far": 10.0}
    (axes,) = notebook.plot_bars("t", values, "x / s", marks=marks, mark="m").axes
    assert [text.xy[0] for text in axes.texts] == [10.0, 1.0]
    assert axes.get_xlim()[1] > 10.0
