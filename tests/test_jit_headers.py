"""jit.headers: which folders are chosen for which NVRTC, and what a failure says."""

import os

import pytest
from jit_support import use_kernels, write_kernels

from cupy_resnet import jit
from cupy_resnet.errors import CompileError
from cupy_resnet.jit import headers, toolchain

pytest.importorskip("cupy")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any header; tests put some onto it."""
    monkeypatch.setattr(headers, "_wheel_roots", lambda: [tmp_path / "nvidia"])
    monkeypatch.setattr(headers, "_toolkits", lambda: [tmp_path / "toolkit/include"])
    monkeypatch.setattr(headers, "_pathfinder_folders", list)
    monkeypatch.setattr(headers, "_bundled_libcudacxx", lambda: tmp_path / "libcudacxx")
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (12, 9))
    return tmp_path


def put(root, folder, *files, version=None):
    write_kernels(root / folder, dict.fromkeys(files, ""))
    if version:
        write_kernels(root / folder, {"cuda_runtime_api.h": f"#define CUDART_VERSION  {version}\n"})
    return root / folder


def test_the_headers_of_this_machine_are_complete_and_of_nvrtcs_major():
    found = headers.find_headers()
    assert found.major == toolchain.nvrtc_version()[0]
    assert found.missing == ()
    assert any((folder / "crt/mma.h").is_file() for folder in found.folders)
    versions = {headers._cuda_major(folder) for folder in found.folders} - {None}
    assert versions == {found.major}


def test_wheels_of_cuda_12_are_two_folders(machine):
    runtime = put(machine, "nvidia/cuda_runtime/include", "cuda_fp16.h", "mma.h")
    nvcc = put(machine, "nvidia/cuda_nvcc/include", "crt/mma.h")
    put(machine, "nvidia/cu13/include", "cuda_fp16.h", "crt/mma.h")
    found = headers.find_headers()
    assert found.folders == (runtime, nvcc)
    assert found.missing == ()


def test_wheels_of_cuda_13_are_one_folder(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    put(machine, "nvidia/cuda_runtime/include", "cuda_fp16.h", "mma.h")
    put(machine, "nvidia/cuda_nvcc/include", "crt/mma.h")
    new = put(machine, "nvidia/cu13/include", "cuda_fp16.h")
    found = headers.find_headers()
    assert found.folders == (new,)
    assert found.missing == ("crt/mma.h",)
    assert "pip install 'nvidia-cuda-crt==13.*'" in found.report()


@pytest.mark.parametrize(("version", "taken"), [(12040, True), (13000, False), (None, False)])
def test_a_toolkit_counts_only_if_it_is_of_nvrtcs_major(machine, version, taken):
    toolkit = put(machine, "toolkit/include", "cuda_fp16.h", "crt/mma.h", version=version)
    found = headers.find_headers()
    assert (toolkit in found.folders) == taken
    assert str(toolkit) in found.report()
    if not taken:
        assert "passed over" in found.report()


def test_folders_the_user_names_come_first(machine, monkeypatch):
    mine, other = put(machine, "mine", "crt/mma.h"), put(machine, "other", "cuda_fp16.h")
    runtime = put(machine, "nvidia/cuda_runtime/include", "cuda_fp16.h")
    monkeypatch.setenv("CUPY_RESNET_CUDA_INCLUDE", f"{mine}{os.pathsep}{other}")
    assert headers.find_headers().folders == (mine, other, runtime)


def test_nothing_found_names_what_was_searched_and_what_to_install(machine):
    report = headers.find_headers().report()
    assert str(machine / "nvidia/cuda_runtime/include") in report
    assert str(machine / "toolkit/include") in report
    assert "no such folder" in report
    assert "pip install nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12" in report
    assert "CUPY_RESNET_CUDA_INCLUDE" in report


def test_a_future_major_still_gets_a_report(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (14, 1))
    assert "CUDA 14 headers" in headers.find_headers().report()


def test_a_wheel_only_installation_without_crt_is_told_what_is_missing(tmp_path, monkeypatch):
    """The real mma.h, with crt/ missing beside it, as in torch's CUDA 13 wheels."""
    real = headers.find_headers()
    complete = next(folder for folder in real.folders if (folder / "mma.h").is_file())
    bare = tmp_path / "bare"
    bare.mkdir()
    for header in complete.glob("*.h*"):
        (bare / header.name).symlink_to(header)
    for name in ("_wheel_roots", "_toolkits", "_pathfinder_folders"):
        monkeypatch.setattr(headers, name, list)
    monkeypatch.setenv("CUPY_RESNET_CUDA_INCLUDE", str(bare))
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    use_kernels(monkeypatch, write_kernels(tmp_path / "kernels_cu"))

    with pytest.raises(CompileError) as caught:
        jit.compile_kernel("wmma_tile", arch="sm_90")
    message = str(caught.value)
    assert "crt/" in message
    assert "cannot open source file" in message
    assert str(bare) in message
    package = {12: "nvidia-cuda-nvcc-cu12", 13: "nvidia-cuda-crt"}[real.major]
    assert "crt/mma.h not found there. Install with: pip install" in message
    assert package in message
    # Kernels that need no header of the toolkit compile all the same.
    assert jit.compile_kernel("scale", arch="sm_90").cubin
