"""The doctor on machines that lack one thing or another, each made up from this one."""

import builtins
import json
import sys
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace

import pytest
from cli_support import run

from cupy_resnet import doctor
from cupy_resnet.doctor import cuda, storage
from cupy_resnet.errors import CompileError
from cupy_resnet.jit import headers, toolchain


@pytest.fixture
def examine(tmp_path, monkeypatch) -> Callable[[], dict[str, list[doctor.Finding]]]:
    """Examines with an empty cache folder; gives the findings by name."""
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))

    def examine():
        found: dict[str, list[doctor.Finding]] = {}
        for finding in doctor.examine().findings:
            found.setdefault(finding.name, []).append(finding)
        return found

    return examine


def has_gpu() -> bool:
    return cuda.obstacle() is None


def test_every_problem_comes_with_a_fix(examine):
    for findings in examine().values():
        for finding in findings:
            assert finding.status in doctor.STATUSES
            assert finding.detail
            assert (finding.fix is None) == (finding.status == "ok"), finding


def test_this_machine_compiles_a_kernel_past_the_cache(examine, tmp_path):
    found = examine()
    for name in ("NVRTC", "compiling", "headers"):
        assert found[name][0].status == "ok", found[name]
    assert "relu for sm_" in found["compiling"][0].detail
    assert has_gpu() or not (tmp_path / "cache").exists()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_numpy_engine_is_ready(examine):
    diagnosis = doctor.examine()
    assert (diagnosis.engine, diagnosis.works) == ("numpy", True)
    assert "NumPy" in diagnosis.verdict
    assert examine()["GPU"][0].status == "missing"


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_demanded_engine_that_cannot_work_is_exit_status_1(tmp_path):
    done = run("doctor", "--json", folder=tmp_path, CUPY_RESNET_ENGINE="cuda")
    assert done.status == 1
    result = json.loads(done.out)
    assert result["works"] is False
    assert result["engine"] == "cuda"
    assert "CUPY_RESNET_ENGINE=numpy" in result["verdict"]
    assert run("doctor", folder=tmp_path, CUPY_RESNET_ENGINE="numpy").status == 0


def test_the_table_has_a_line_for_each_finding_and_one_for_each_fix(tmp_path):
    result = json.loads(run("doctor", "--json", folder=tmp_path).out)
    done = run("doctor", folder=tmp_path)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    for finding in result["findings"]:
        assert any(line.startswith(f"{finding['status']} ") and f" {finding['name']} " in line for line in lines)
    assert sum("→ " in line for line in lines) == sum(finding["fix"] is not None for finding in result["findings"])
    assert lines[-1] == result["verdict"]


def test_two_wheels_of_cupy_at_once(examine, monkeypatch):
    both = [SimpleNamespace(metadata={"Name": name}) for name in ("numpy", "cupy-cuda12x", "CuPy-CUDA13x")]
    monkeypatch.setattr(metadata, "distributions", lambda: both)
    finding = examine()["CuPy"][0]
    assert finding.status == "warning"
    assert "cupy-cuda12x and cupy-cuda13x" in finding.detail
    assert finding.fix.startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupy-resnet[cuda")


@pytest.mark.parametrize(("driver", "extra"), [(None, "cuda12"), (12080, "cuda12"), (13000, "cuda13")])
def test_without_cupy_the_extra_for_the_driver_is_advised(examine, monkeypatch, driver, extra):
    find_spec = cuda.importlib.util.find_spec
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None if name == "cupy" else find_spec(name))
    monkeypatch.setattr(cuda, "_driver_version", lambda: driver)
    found = examine()
    assert (found["CuPy"][0].status, found["CuPy"][0].fix) == ("missing", f"pip install 'cupy-resnet[{extra}]'")
    assert "NVRTC" not in found
    assert doctor.examine().works  # by the NumPy engine


def test_cupy_that_cannot_be_imported(examine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: True)
    finding = examine()["CuPy"][0]
    assert finding.status == "missing"
    assert "cannot be imported" in finding.detail
    assert "pip uninstall -y" in finding.fix


def test_a_driver_older_than_cupy_and_nvrtc(examine, monkeypatch):
    monkeypatch.setattr(cuda, "_driver_version", lambda: 11080)
    found = examine()
    assert found["driver"][0].detail == "for CUDA 11.8"
    assert "driver only for CUDA 11" in found["CuPy"][-1].detail
    assert found["NVRTC"][0].status == "warning"
    assert "update the driver" in found["NVRTC"][0].fix


def test_without_nvrtc(examine, monkeypatch):
    def missing():
        raise CompileError("CuPy finds no NVRTC, the compiler. Install it with: pip install nvidia-cuda-nvrtc-cu12")

    monkeypatch.setattr(toolchain, "nvrtc_version", missing)
    found = examine()
    assert found["NVRTC"][0].status == "missing"
    assert found["NVRTC"][0].fix == "pip install nvidia-cuda-nvrtc-cu12"
    assert "compiling" not in found


def test_without_the_headers_of_wmma(examine, monkeypatch):
    monkeypatch.setattr(headers, "_PROBES", ("cuda_fp16.h", "crt/no_such_header.h"))
    monkeypatch.setattr(headers, "_PACKAGES", {n: {"crt/no_such_header.h": f"package-of-cuda-{n}"} for n in (12, 13)})
    finding = examine()["headers"][0]
    assert finding.status == "missing"
    assert "crt/no_such_header.h" in finding.detail
    assert finding.fix == f"pip install package-of-cuda-{toolchain.nvrtc_version()[0]}"


def test_a_kernel_that_does_not_compile(examine, monkeypatch):
    monkeypatch.setattr(cuda, "_PROBE_KERNEL", "no_such_kernel")
    finding = examine()["compiling"][0]
    assert finding.status == "warning"  # the examination itself is what failed
    assert "no_such_kernel" in finding.detail


def test_a_cache_folder_that_cannot_be_written(examine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "file"))
    finding = examine()["cache"][0]
    assert finding.status == "warning"
    assert "CUPY_RESNET_CACHE_DIR=" in finding.fix


def test_what_the_cache_holds_is_counted(examine, tmp_path):
    for name in ("kernels/a.cubin", "kernels/b.cubin", "weights/resnet18-IMAGENET1K_V1.safetensors"):
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(500_000))
    found = examine()
    assert "2 files (1.0 MB) of compiled kernels, 1 files (0.5 MB) of weights" in found["cache"][0].detail
    half, whole = found["weights"]
    assert half.status == "warning"
    assert half.fix.startswith("rm '")
    assert whole.detail.endswith("none yet")
    (tmp_path / "cache/weights/resnet18-IMAGENET1K_V1.json").write_text("{}")
    assert examine()["weights"][0].detail.endswith("resnet18-IMAGENET1K_V1")


def test_without_torch(examine, monkeypatch):
    find_spec = storage.importlib.util.find_spec
    absent = ("torch", "torchvision")
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    finding = examine()["torch"][0]
    assert finding.status == "missing"
    assert finding.fix == "pip install 'cupy-resnet[torch]'"
    assert doctor.examine().works


def test_an_engine_variable_that_names_no_engine(examine, monkeypatch):
    monkeypatch.setenv("CUPY_RESNET_ENGINE", "gpu")
    assert examine()["engine"][0].fix == "unset CUPY_RESNET_ENGINE"
    monkeypatch.setattr(doctor.cuda, "obstacle", lambda: "no GPU")
    diagnosis = doctor.examine()
    assert not diagnosis.works
    assert "use the NumPy engine" not in diagnosis.verdict, "that is the one that cannot work"


def test_embedded_weights_that_are_damaged(examine, monkeypatch, tmp_path):
    from cupy_resnet.weights_store import resolving

    (tmp_path / "resnet20-broken.safetensors").write_bytes(b"not at all")
    monkeypatch.setattr(resolving, "folder", lambda name: tmp_path)
    finding = examine()["embedded"][0]
    assert finding.status == "missing"
    assert "resnet20-broken" in finding.detail


def test_nothing_that_is_broken_ends_the_examination(examine, monkeypatch):
    def broken() -> int:
        raise builtins.KeyError("what nobody thought of")

    monkeypatch.setattr(cuda, "_driver_version", broken)
    found = examine()
    assert "what nobody thought of" in found["driver"][0].detail
    assert found["embedded"]
