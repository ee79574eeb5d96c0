"""jit.get_function without a GPU: a stand-in for CuPy's module loading shows what is asked of it and how often.

`test_jit_gpu.py` does the same on a GPU, with CuPy itself.
"""

import contextlib
import os
import threading
import time
import types
from pathlib import Path

import pytest
from jit_support import use_kernels, write_kernels

from cupy_resnet import jit
from cupy_resnet.errors import CompileError, EngineUnavailableError
from cupy_resnet.jit import loading, toolchain

cupy = pytest.importorskip("cupy")


class CudaError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class DriverError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class FakeCupy(types.SimpleNamespace):
    """Two devices: an sm_90 and an sm_75."""

    def __init__(self):
        super().__init__(__version__="0", loads=[], current=0, fail=None)
        capabilities = {0: "90", 1: "75", 2: "70", 3: "120"}
        outer = self

        class Device(contextlib.AbstractContextManager):
            def __init__(self, number):
                self.number = number
                self.compute_capability = capabilities[number]

            def __enter__(self):
                self.before, outer.current = outer.current, self.number

            def __exit__(self, *_):
                outer.current = self.before

        class RawModule:
            def __init__(self, path):
                self.path = path

            def get_function(self, name):
                return Kernel(self.path, name)

        class Kernel:
            def __init__(self, path, name):
                self.path, self.name = path, name

            @property
            def kernel(self):
                if outer.fail:
                    raise outer.fail
                outer.loads.append((outer.current, Path(self.path).read_bytes(), self.name))

        self.RawModule = RawModule
        runtime = types.SimpleNamespace(
            getDevice=lambda: outer.current, CUDARuntimeError=CudaError, driverGetVersion=lambda: 13000
        )
        driver = types.SimpleNamespace(CUDADriverError=DriverError)
        self.cuda = types.SimpleNamespace(Device=Device, runtime=runtime, driver=driver)


@pytest.fixture(autouse=True)
def fake(tmp_path, monkeypatch):
    toolchain.supported_archs(), toolchain.nvrtc_version()  # asked of the real one, and remembered
    fake = FakeCupy()
    monkeypatch.setattr(toolchain, "import_cupy", lambda: fake)
    monkeypatch.setattr(loading, "_loaded", loading._Loaded())
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    use_kernels(monkeypatch, write_kernels(tmp_path / "kernels_cu"))
    return fake


def test_the_function_is_named_as_the_file_and_compiled_for_the_device(fake):
    assert jit.get_function("scale").name == "scale"
    assert fake.loads == [(0, jit.compile_kernel("scale", arch="sm_90").cubin, "scale")]


def test_a_repeated_call_loads_nothing_and_is_quick(fake):
    first = jit.get_function("scale", defines={"FACTOR": 3})
    begin = time.perf_counter()
    assert all(jit.get_function("scale", defines={"FACTOR": 3}) is first for _ in range(10_000))
    assert (time.perf_counter() - begin) / 10_000 < 20e-6
    assert len(fake.loads) == 1


def test_defines_and_devices_are_kept_apart(fake):
    plain = jit.get_function("scale")
    assert jit.get_function("scale", defines={"FACTOR": 3}) is not plain
    other = jit.get_function("scale", device=1)
    assert other is not plain
    assert fake.current == 0
    assert [device for device, _, _ in fake.loads] == [0, 0, 1]
    assert fake.loads[2][1] == jit.compile_kernel("scale", arch="sm_75").cubin
    fake.current = 1
    assert jit.get_function("scale") is other


def test_a_hopper_kernel_is_compiled_with_its_letter(fake):
    jit.get_function("hopper")
    assert fake.loads[0][1] == jit.compile_kernel("hopper", arch="sm_90a").cubin


def test_a_device_below_the_kernels_minimum_is_named():
    with pytest.raises(CompileError, match="hopper needs sm_90a; device 1 is sm_75"):
        jit.get_function("hopper", device=1)


def test_a_device_nvrtc_no_longer_knows_is_named(monkeypatch):
    monkeypatch.setattr(toolchain, "supported_archs", lambda: (75, 80, 90))
    with pytest.raises(CompileError, match=r"no architecture that runs on device 2 \(compute capability 7\.0\)"):
        jit.get_function("scale", device=2)
    with pytest.raises(CompileError, match=r"device 3 \(compute capability 12\.0\)"):
        jit.get_function("scale", device=3)


def test_an_unknown_function_lists_the_known():
    with pytest.raises(ValueError, match="scale has no function 'scales'; it has: scale"):
        jit.get_function("scale", "scales")


def test_loads_from_a_file_when_the_cache_is_memory_only(fake, monkeypatch):
    monkeypatch.setenv("CUPY_RESNET_DISK_CACHE", "0")
    jit.get_function("scale")
    assert fake.loads[0][1] == jit.compile_kernel("scale", arch="sm_90").cubin


def test_from_many_threads_it_is_compiled_once():
    begun, barrier = [], threading.Barrier(8)
    results = []

    def work():
        barrier.wait()
        results.append(jit.get_function("scale", defines={"FACTOR": 7}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    with jit.on_compile(lambda event: begun.append(event) if event.seconds is None else None):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 8
    assert all(result is results[0] for result in results)
    assert len(begun) == 1


def test_a_cuda_error_says_what_was_tried(fake):
    fake.fail = DriverError(209, "CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(
        CompileError, match=r"scale, compiled for sm_80, cannot be loaded on device 1: .*NO_BINARY.*NVRTC"
    ):
        jit.get_function("scale", device=1, arch="sm_80")
    fake.fail = CudaError(100, "cudaErrorNoDevice")
    with pytest.raises(EngineUnavailableError, match="cudaErrorNoDevice"):
        jit.get_function("scale")


def in_forked_child(function):
    """Runs a function in a forked child and returns what it returns, a string."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def test_fork_after_cuda_was_used_is_detected_and_spawn_advised():
    jit.get_function("scale")
    text = in_forked_child(lambda: str(jit.get_function("scale")))
    assert text.startswith("EngineUnavailableError: CUDA was started in the parent process before fork()")
    assert "spawn" in text
    assert jit.get_function("scale")  # the parent goes on


def test_fork_before_cuda_was_used_is_fine():
    assert in_forked_child(lambda: jit.get_function("scale").name) == "scale"


def test_fork_after_someone_else_started_cuda_is_recognised_by_the_error(fake):
    def child():
        fake.fail = CudaError(3, "cudaErrorInitializationError")
        return str(jit.get_function("scale"))

    assert "spawn" in in_forked_child(child)


def test_compiling_in_a_forked_child_does_not_wait_for_the_parents_threads():
    """A lock held by another thread at the fork is never released in the child."""
    inside, leave = threading.Event(), threading.Event()

    def hold(event):
        if event.seconds is None:
            inside.set()
            leave.wait(30)

    with jit.on_compile(hold):
        thread = threading.Thread(target=jit.compile_kernel, args=("scale",), kwargs={"arch": "sm_80"})
        thread.start()
        assert inside.wait(30)
        jit.compile_listeners.clear()
        try:
            text = in_forked_child(lambda: jit.compile_kernel("scale", arch="sm_80").arch)
        finally:
            jit.compile_listeners.append(hold)
            leave.set()
            thread.join()
    assert text == "sm_80"
