"""jit.get_function on a GPU: compiled, loaded, launched."""

import os

import numpy as np
import pytest
from jit_support import use_kernels, write_kernels

from cupy_resnet import jit
from cupy_resnet.jit import loading

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_loaded", loading._Loaded())
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    use_kernels(monkeypatch, write_kernels(tmp_path / "kernels_cu"))


def scaled(kernel, device=0):
    import cupy

    with cupy.cuda.Device(device):
        x = cupy.arange(1000, dtype=np.float32)
        y = cupy.full_like(x, np.nan)
        kernel((4,), (256,), (x, y, np.int32(x.size)))
        return y.get()


@pytest.mark.parametrize("disk", ["0", "1"])
def test_launches(monkeypatch, disk):
    monkeypatch.setenv("CUPY_RESNET_DISK_CACHE", disk)
    np.testing.assert_array_equal(scaled(jit.get_function("scale")), 2 * np.arange(1000))
    tripled = jit.get_function("scale", defines={"FACTOR": 3})
    np.testing.assert_array_equal(scaled(tripled), 3 * np.arange(1000))
    assert jit.get_function("scale", defines={"FACTOR": 3}) is tripled


def test_on_every_device():
    import cupy

    for device in range(cupy.cuda.runtime.getDeviceCount()):
        np.testing.assert_array_equal(scaled(jit.get_function("scale", device=device), device), 2 * np.arange(1000))


def test_what_is_loaded_outlives_the_cache_folder(tmp_path):
    kernel = jit.get_function("scale")
    for path in (tmp_path / "cache/kernels").iterdir():
        path.unlink()
    np.testing.assert_array_equal(scaled(kernel), 2 * np.arange(1000))


def test_wmma_multiplies():
    import cupy

    a = cupy.asarray(np.random.default_rng(0).integers(-3, 4, (16, 16)), dtype=np.float16)
    b = cupy.asarray(np.random.default_rng(1).integers(-3, 4, (16, 16)), dtype=np.float16)
    c = cupy.full((16, 16), np.nan, dtype=np.float32)
    jit.get_function("wmma_tile")((1,), (32,), (a, b, c))
    np.testing.assert_array_equal(c.get(), a.get().astype(np.float32) @ b.get().astype(np.float32).T)


def test_registers_agree_with_what_the_driver_says():
    kernel = jit.get_function("scale")
    compiled = jit.compile_kernel("scale", arch=loading._arch_for("scale", None, 0))
    assert kernel.num_regs == compiled.resources["scale"].registers


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is the mistake
@pytest.mark.parametrize("through_jit", [True, False])
def test_a_forked_child_is_told_to_spawn(through_jit):
    import cupy

    if through_jit:
        jit.get_function("scale")
    else:
        cupy.zeros(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(jit.get_function("scale"))
        except BaseException as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert "spawn" in text
