"""What a machine can do at best: measured with a clock that tests hold in their hands, and kept between runs."""

import json
import logging

import numpy as np
import pytest
from profile_support import LIMITS, FakeClock

from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.proof import ceilings as module
from cupy_resnet.proof import matrix_products
from cupy_resnet.proof.ceilings import Ceilings, ceilings, measure_processor


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceilings"


@pytest.fixture
def measured(monkeypatch):
    """Counts how often the processor is measured, which takes no time here."""
    calls = []

    def measure():
        calls.append(1)
        return measure_processor(FakeClock([len(calls) * 1e-3]), matrix=8, copy_bytes=1000)

    monkeypatch.setattr(module, "measure_processor", measure)
    return calls


def test_the_fastest_of_all_tries_counts():
    copies, products = [3e-3, 2e-3] + [4e-3] * 18, [7e-3] * 19 + [5e-3]
    found = measure_processor(FakeClock(copies + products), matrix=32, copy_bytes=1000)
    assert found.copy_bytes_per_s == 2 * 1000 / 2e-3
    assert found.matmul_flops_per_s == {"float32": 2 * 32**3 / 5e-3}
    assert "32×32×32" in found.method["float32"]
    assert set(found.method) == {"copy", "float32"}


def test_this_processor():
    found = measure_processor(matrix=256, copy_bytes=2**22)
    assert 1e8 < found.copy_bytes_per_s < 1e13
    assert 1e8 < found.matmul_flops_per_s["float32"] < 1e14
    assert found.device
    assert np.__version__ in found.driver


def test_measured_once(cache, measured):
    first = ceilings()
    assert ceilings() == first
    assert len(measured) == 1
    (path,) = cache.iterdir()
    assert Ceilings.from_dict(json.loads(path.read_text())) == first


def test_measured_again_on_demand_and_kept(cache, measured):
    first = ceilings()
    second = ceilings(refresh=True)
    assert second.copy_bytes_per_s == first.copy_bytes_per_s / 2
    assert ceilings() == second
    assert len(measured) == 2


def test_other_threads_are_another_machine(cache, measured, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = ceilings()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert ceilings().driver != one.driver
    assert len(measured) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"device": 1}', "\x00", "null"])
def test_a_damaged_file_is_measured_anew(cache, measured, caplog, content):
    first = ceilings()
    (path,) = cache.iterdir()
    path.write_text(content)
    with caplog.at_level(logging.WARNING, "cupy_resnet"):
        ceilings()
    assert "measured anew" in caplog.text
    assert json.loads(path.read_text())["device"] == first.device


def test_ceilings_of_another_machine_in_the_file_are_not_believed(cache, measured):
    ceilings()
    (path,) = cache.iterdir()
    path.write_text(json.dumps(LIMITS.to_dict()))
    assert ceilings() != LIMITS
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(cache, measured, caplog):
    cache.parent.write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING, "cupy_resnet"):
        assert ceilings().copy_bytes_per_s == 2e6
    assert "cannot be kept" in caplog.text


def test_from_dict_takes_what_to_dict_gives_and_nothing_else():
    stored = json.loads(json.dumps(LIMITS.to_dict()))
    assert Ceilings.from_dict(stored) == LIMITS
    for wrong in ({"copy_bytes_per_s": 0.0}, {"copy_bytes_per_s": "fast"}, {"matmul_flops_per_s": {"float32": -1.0}}):
        with pytest.raises(ValueError, match="no ceilings"):
            Ceilings.from_dict(stored | wrong)
    with pytest.raises(ValueError, match="no ceilings"):
        Ceilings.from_dict(stored | {"colour": "red"})


def test_where_there_is_no_cublas_our_own_convolution_multiplies(monkeypatch):
    def missing(device, size):
        raise ImportError("no such library")

    for source in ("_cublas", "_torch"):
        monkeypatch.setattr(matrix_products, source, missing)
    monkeypatch.setattr(matrix_products, "_cuda_engine", lambda device: NumpyEngine())
    (product,) = matrix_products.gpu_products(0, 48)
    assert product.precision == "float32"
    assert "own conv2d" in product.library
    a, b = (matrix_products.normal_matrix(48, seed) for seed in (0, 1))
    np.testing.assert_allclose(product.prepare()().reshape(48, 48), a @ b, rtol=1e-4, atol=1e-4)


def test_the_first_library_that_is_there_multiplies(monkeypatch):
    def missing(device, size):
        raise ImportError("no such library")

    product = matrix_products.Product("float32", "a library", lambda: lambda: None)
    monkeypatch.setattr(matrix_products, "_cublas", missing)
    monkeypatch.setattr(matrix_products, "_torch", lambda device, size: [product])
    assert matrix_products.gpu_products(0, 48) == [product]


def test_operands_are_normal_and_bfloat16_is_the_upper_half():
    x = matrix_products.normal_matrix(2048, 0)
    assert x.shape == (2048, 2048)
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    bits = matrix_products._bfloat16_bits(np.array([1.0, -2.5, 3.140625], np.float32))
    np.testing.assert_array_equal(bits, np.array([0x3F80, 0xC020, 0x4049], np.uint16))
