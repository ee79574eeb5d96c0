"""The command line: `cupy-resnet kernels` on a small folder of kernels, and what all commands have in common."""

import json
import re
import subprocess
import sys

import pytest
from cli_support import run_here
from jit_support import use_kernels, write_kernels

import cupy_resnet
from cupy_resnet import kernels

WHOLE_LIST = """\
kernel solves from
hopper nothing: it moves registers between warps, which only sm_90a can sm_90a
scale y = FACTOR * x sm_70
wmma_tile one 16x16x16 tensor core product sm_70
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command line; returns (exit status, stdout, stderr)."""
    use_kernels(monkeypatch, write_kernels(tmp_path / "kernels_cu"))
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    factors = {"scale": [{"FACTOR": 2}, {"FACTOR": 3}]}
    monkeypatch.setattr(kernels, "configurations", lambda name: factors.get(name, [{}]))

    def run(*arguments):
        done = run_here(monkeypatch, capsys, *arguments)
        return done.status, done.out, done.err

    return run


def test_version(run):
    assert run("--version") == (0, f"cupy-resnet {cupy_resnet.__version__}\n", "")


def test_lists_every_kernel_with_its_problem_and_least_architecture(run):
    status, out, err = run("kernels")
    assert status == 0
    assert err == ""
    assert [" ".join(line.split()) for line in out.splitlines()] == WHOLE_LIST.splitlines()


def test_lists_as_json(run):
    status, out, _ = run("kernels", "--json", "--kernel", "scale")
    assert status == 0
    assert json.loads(out) == [{"name": "scale", "solves": "y = FACTOR * x", "min_arch": "sm_70"}]


def test_a_narrow_pipe_gets_whole_names(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    _, out, _ = run("kernels")
    assert "nothing: it moves registers between warps, which only sm_90a can" in out
    assert "…" not in out


def test_a_narrow_terminal_loses_no_letter(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = run("kernels")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "…" not in plain
    assert max(map(len, plain.splitlines())) <= 30
    letters = sorted("".join(plain.split()))
    assert letters == sorted("".join(WHOLE_LIST.split()))


def test_square_brackets_in_a_kernels_head_are_not_markup(run, tmp_path):
    (tmp_path / "kernels_cu/scale.cu").write_text("// @solves y[i] = 2 * x[/i]\n// @arch sm_70\n")
    assert "y[i] = 2 * x[/i]" in run("kernels")[1]


def test_compiles_every_configuration_for_every_architecture(run):
    status, out, err = run("kernels", "--compile", "--arch", "sm_80,sm_90", "--json")
    assert status == 0, out + err
    reports = json.loads(out)
    outcomes = [(r["kernel"], r["arch"], r["defines"], r["status"]) for r in reports]
    assert outcomes == [
        ("hopper", "sm_80", {}, "skipped"),
        ("hopper", "sm_90a", {}, "ok"),
        ("scale", "sm_80", {"FACTOR": 2}, "ok"),
        ("scale", "sm_90", {"FACTOR": 2}, "ok"),
        ("scale", "sm_80", {"FACTOR": 3}, "ok"),
        ("scale", "sm_90", {"FACTOR": 3}, "ok"),
        ("wmma_tile", "sm_80", {}, "ok"),
        ("wmma_tile", "sm_90", {}, "ok"),
    ]
    assert reports[0]["detail"] == "needs sm_90a"
    assert reports[2]["functions"]["scale"]["registers"] > 0
    assert reports[2]["functions"]["scale"]["spill_stores"] == 0


def test_the_same_target_is_compiled_once(run):
    _, out, _ = run("kernels", "--compile", "--arch", "sm_90,sm_90a", "--kernel", "hopper", "--json")
    assert [report["arch"] for report in json.loads(out)] == ["sm_90a"]


def test_prints_a_table(run):
    status, out, err = run("kernels", "--compile", "--arch", "sm_80", "--jobs", "1")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert " ".join(rows[0]) == "kernel arch configuration function registers shared B stack B spills B status"
    assert rows[1][:2] == ["hopper", "sm_80"]
    assert "skipped: needs sm_90a" in out
    row = next(row for row in rows if "FACTOR=3" in row)
    assert row[:4] == ["scale", "sm_80", "FACTOR=3", "scale"]
    assert row[5:] == ["0", "0", "0", "ok"]
    assert "3 ok, 0 spills, 0 failed, 1 skipped" in err


def test_exit_status_1_and_file_and_line_when_one_does_not_compile(run, tmp_path):
    (tmp_path / "kernels_cu/include/scale.cuh").write_text("float oops(\n")
    status, out, err = run("kernels", "--compile", "--arch", "sm_80")
    assert status == 1
    assert "include/scale.cuh(" in err
    assert "wmma_tile" in out  # the others are reported all the same
    status, out, _ = run("kernels", "--compile", "--arch", "sm_80", "--json")
    assert status == 1
    assert [r["status"] for r in json.loads(out)] == ["skipped", "failed", "failed", "ok"]


def test_exit_status_1_on_a_spill(run, tmp_path):
    body = "".join(f"const float a{i} = x[{i} * n]; " for i in range(120))
    total = " + ".join(f"a{i} * a{119 - i}" for i in range(120))
    (tmp_path / "kernels_cu/scale.cu").write_text(
        "// @solves x\n// @arch sm_70\n"
        'extern "C" __global__ void __launch_bounds__(1024, 2) scale(const float* x, float* y, int n) {\n'
        f"{body} __syncthreads(); y[0] = {total}; }}\n"
    )
    status, out, err = run("kernels", "--compile", "--arch", "sm_80", "--kernel", "scale")
    assert status == 1
    assert out.splitlines()[1].split()[-1] == "spills"
    assert "2 spills" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kernels", "--kernel", "scael"), "hopper, scale, wmma_tile"),
        (("kernels", "--compile", "--arch", "sm80"), "spelled like sm_80"),
        (("kernels", "--compile", "--arch", ""), "spelled like sm_80"),
        (("kernels", "--compile", "--jobs", "0"), "--jobs"),
        (("kernals",), "kernals"),
    ],
)
def test_wrong_usage_is_exit_status_2_without_a_traceback(run, arguments, words):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_without_cupy_compiling_says_how_to_install_it(run, monkeypatch):
    from cupy_resnet.jit import toolchain

    monkeypatch.setitem(sys.modules, "cupy", None)
    for function in (toolchain.import_nvrtc, toolchain.nvrtc_version, toolchain.supported_archs):
        function.cache_clear()
    status, out, err = run("kernels", "--compile")
    assert (status, out) == (1, "")
    assert err.startswith("error: CuPy cannot be imported")
    assert "pip install" in err
    assert run("kernels")[0] == 0  # listing needs no CuPy


def test_the_installed_command_and_a_closed_pipe():
    command = f"{sys.executable} -c 'from cupy_resnet.cli import main; main()' kernels | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert len(done.stdout) == 1
    assert "Traceback" not in done.stderr


def test_explains_a_network_operation_by_operation(run):
    status, out, _ = run("explain", "resnet20", "--batch", "4", "--engine", "numpy")
    assert status == 0
    assert "(4, 3, 32, 32)" in out
    assert "layer3.2.conv2" in out
    steps = json.loads(run("explain", "resnet20", "--engine", "numpy", "--json")[1])
    assert sum(step["record"]["op"] == "conv2d" for step in steps) == 19


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("explain", "resnet19"), 2, "resnet18"),
        (("explain", "resnet18", "--engine", "gpu"), 2, "cuda, numpy"),
        (("explain", "resnet18", "--batch", "-1"), 2, "--batch"),
    ],
)
def test_explain_with_wrong_arguments(run, arguments, status, words):
    left, out, err = run(*arguments)
    assert (left, out) == (status, "")
    assert words in err
