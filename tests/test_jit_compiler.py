"""jit's compilation with the NVRTC that is really here: results, statistics, and what errors say."""

import multiprocessing
import sys
import threading
from pathlib import Path

import pytest
from jit_support import HOPPER, KERNELS, use_kernels, write_kernels

from cupy_resnet import jit
from cupy_resnet.errors import CompileError, EngineUnavailableError
from cupy_resnet.jit import toolchain
from cupy_resnet.jit.arch import Arch
from cupy_resnet.jit.compiler import compile_source
from cupy_resnet.jit.ptxas import KernelResources, parse_resources
from cupy_resnet.jit.sources import find_kernel, load_program

pytest.importorskip("cupy")
ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    use_kernels(monkeypatch, tmp_path / "kernels_cu")
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    return write_kernels(tmp_path / "kernels_cu")


@pytest.fixture
def events():
    seen = []
    with jit.on_compile(seen.append):
        yield seen


def test_compiles_to_a_cubin_and_tells_what_it_takes(events):
    compiled = jit.compile_kernel("scale", arch="sm_80")
    assert compiled.cubin.startswith(ELF)
    assert compiled.arch == "sm_80"
    assert list(compiled.resources) == ["scale"]
    assert 0 < compiled.resources["scale"].registers <= 32
    assert not compiled.resources["scale"].spills
    begun, ended = events
    assert (begun.name, begun.arch, begun.seconds) == ("scale", "sm_80", None)
    assert ended.seconds > 0
    assert not ended.failed


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_wmma_finds_its_headers(arch):
    assert "wmma_tile" in jit.compile_kernel("wmma_tile", arch=arch).resources


def test_hopper_instructions_compile_for_sm_90a():
    assert jit.compile_kernel("hopper", arch="sm_90a").cubin.startswith(ELF)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_below_the_minimum_architecture_both_are_named(arch):
    with pytest.raises(CompileError, match=f"hopper needs exactly sm_90a, but {arch} was asked for"):
        jit.compile_kernel("hopper", arch=arch)


def test_below_a_plain_minimum_both_are_named(root):
    (root / "hopper.cu").write_text(HOPPER.replace("sm_90a", "sm_80"))
    with pytest.raises(CompileError, match="hopper needs at least sm_80, but sm_75 was asked for"):
        jit.compile_kernel("hopper", arch="sm_75")


def test_an_architecture_nvrtc_does_not_know_is_refused_with_those_it_knows():
    with pytest.raises(CompileError, match=r"does not know sm_999; it knows .*sm_90.*NVRTC \d+\.\d+.*a newer NVRTC"):
        jit.compile_kernel("scale", arch="sm_999")


def test_nvrtc_13_does_not_know_sm_70():
    if 70 in toolchain.supported_archs():
        assert jit.compile_kernel("scale", arch="sm_70").cubin.startswith(ELF)
    else:
        with pytest.raises(CompileError, match=r"does not know sm_70; .*an older NVRTC"):
            jit.compile_kernel("scale", arch="sm_70")


@pytest.mark.parametrize(("file", "line"), [("scale.cu", 8), ("include/scale.cuh", 2), ("include/inner/factor.cuh", 4)])
def test_an_error_shows_file_and_line_inside_includes_too(root, events, file, line):
    lines = KERNELS[file].splitlines()
    lines[line - 1] += " undeclared = 1;"
    (root / file).write_text("\n".join(lines))
    with pytest.raises(CompileError) as caught:
        jit.compile_kernel("scale", defines={"FACTOR": 3}, arch="sm_80")
    message = str(caught.value)
    assert f"kernels_cu/{file}({line}): error" in message
    assert "for sm_80" in message
    assert "-DFACTOR=3" in message
    assert f"NVRTC {toolchain.nvrtc_version()[0]}." in message
    assert "CuPy " in message
    assert "driver" in message
    assert events[-1].failed


def test_a_missing_header_of_ours_is_named_with_its_line(root):
    (root / "include/scale.cuh").write_text('\n\n#include "lost.cuh"\n')
    with pytest.raises(CompileError, match=r'include/scale\.cuh\(3\): .*cannot open source file "lost\.cuh"'):
        jit.compile_kernel("scale", arch="sm_80")


def test_a_header_in_a_dead_branch_does_not_count_as_included(root):
    (root / "scale.cu").write_text(
        KERNELS["scale.cu"].replace("#include", '#if 0\n#include "scale.cuh"\n#endif\n#include', 1)
    )
    assert jit.compile_kernel("scale", arch="sm_80").resources


def test_defines_reach_the_source_and_their_order_does_not_matter(events):
    two = jit.compile_kernel("scale", arch="sm_80")
    three = jit.compile_kernel("scale", defines={"FACTOR": 3, "OTHER": True}, arch="sm_80")
    again = jit.compile_kernel("scale", defines={"OTHER": 1, "FACTOR": 3}, arch="sm_80")
    assert two.cubin != three.cubin
    assert three.key == again.key
    assert len(events) == 4


@pytest.mark.parametrize("name", ["", "A B", "1X", "A=1 -DB"])
def test_a_define_must_be_an_identifier(name):
    with pytest.raises(ValueError, match="no C identifier"):
        jit.compile_kernel("scale", defines={name: 1}, arch="sm_80")


def test_denormals_are_not_flushed(root):
    program = load_program(find_kernel("scale"))
    cubin, _ = compile_source(program, (), Arch(80))
    flushed, _ = compile_source(program, ("--ftz=true",), Arch(80))
    kept, _ = compile_source(program, ("--ftz=false",), Arch(80))
    assert cubin == kept
    assert cubin != flushed


def test_spills_are_seen(root):
    body = "\n".join(f"    const float a{i} = x[{i} * n];" for i in range(120))
    total = " + ".join(f"a{i} * a{119 - i}" for i in range(120))
    (root / "spill.cu").write_text(
        "// @solves nothing\n// @arch sm_70\n"
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* x, float* y, int n) {\n'
        f"{body}\n    __syncthreads();\n    y[0] = {total};\n}}\n"
    )
    resources = jit.compile_kernel("spill", arch="sm_80").resources["spill"]
    assert resources.registers == 32
    assert resources.spills
    assert resources.spill_stores > 0
    assert resources.stack_frame > 0


def test_static_shared_memory_is_seen(root):
    (root / "stage.cu").write_text(
        "// @solves nothing\n// @arch sm_70\n"
        'extern "C" __global__ void stage(float* y) {\n'
        "    __shared__ float tile[256];\n    tile[threadIdx.x] = y[threadIdx.x];\n    __syncthreads();\n"
        "    y[threadIdx.x] = tile[255 - threadIdx.x];\n}\n"
    )
    assert jit.compile_kernel("stage", arch="sm_80").resources["stage"].shared_memory == 1024


def test_statistics_of_nvrtc_12_and_13_are_read():
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'a' for 'sm_80'\n"
        "ptxas info    : Function properties for a\n"
        "ptxas         .     64 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 64 bytes cumulative stack size, 400 bytes smem\n"
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_80'\n"
        "ptxas info    : Function properties for b\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, 352 bytes cmem[0]\n"
    )
    assert parse_resources(log) == {
        "a": KernelResources(registers=40, shared_memory=400, stack_frame=80, spill_stores=12, spill_loads=16),
        "b": KernelResources(registers=8),
    }
    assert parse_resources("") == {}


def test_without_cupy_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for function in (toolchain.import_nvrtc, toolchain.nvrtc_version, toolchain.supported_archs):
        function.cache_clear()
    try:
        with pytest.raises(
            EngineUnavailableError, match=r"CuPy cannot be imported.*pip install 'cupy-resnet\[cuda12\]'"
        ):
            jit.compile_kernel("scale", arch="sm_80")
        with pytest.raises(EngineUnavailableError, match="pip install"):
            jit.get_function("scale")
    finally:
        toolchain.import_nvrtc.cache_clear()


def test_without_nvrtc_the_package_that_has_it_is_named(monkeypatch):
    import cupy

    def fail():
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", fail)
    toolchain.import_nvrtc.cache_clear()
    toolchain.nvrtc_version.cache_clear()
    with pytest.raises(CompileError, match=r"no NVRTC.*libnvrtc\.so\.12.*pip install .*nvidia-cuda-nvrtc"):
        jit.compile_kernel("scale", arch="sm_80")


def compile_from_threads(kernels, results):
    """In a fresh process: many threads whose compilations are the first ones."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CUPY_RESNET_DISK_CACHE", "0")
    use_kernels(patch, Path(kernels))
    barrier = threading.Barrier(4)

    def work(factor):
        barrier.wait()
        try:
            results.put(jit.compile_kernel("scale", defines={"FACTOR": factor}, arch="sm_80").arch)
        except Exception as error:
            results.put(str(error))

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("attempt", range(3))
def test_the_first_compilations_may_come_from_several_threads(root, attempt):
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=compile_from_threads, args=(str(root), results))
    process.start()
    process.join(60)
    assert [results.get() for _ in range(4)] == ["sm_80"] * 4


def test_nvrtcs_own_cache_is_not_used(root, monkeypatch):
    """Where there is a driver, a second compilation would be served from it, with an empty log."""
    monkeypatch.setenv("CUPY_RESNET_DISK_CACHE", "0")
    program = load_program(find_kernel("scale"))
    assert [bool(parse_resources(compile_source(program, (), Arch(80))[1])) for _ in range(2)] == [True, True]
