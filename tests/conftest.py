"""Fixtures shared by every test."""

import os
import shutil
import tempfile
from pathlib import Path

import gpu_record
import pytest

from cupy_resnet import environment


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The optional folder of photographs, real weights and stored logits; tests that need it skip without it."""
    folder = environment.test_data()
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is not there (set {environment.TEST_DATA.name} to its place)")
    return folder


@pytest.fixture(autouse=True)
def no_engine_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests say which engine they want; the caller's environment must not."""
    monkeypatch.delenv(environment.ENGINE.name, raising=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--add-to-gpu-record", action="store_true", help="put the outcomes of these GPU tests into the record"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # under pytest-xdist the controller hears every report, and processes have its environment
    config.pluginmanager.register(gpu_record.Recorder(config))
    if environment.CACHE_DIR.name not in os.environ and "not gpu" in config.option.markexpr:
        # One for all tests and processes, so that what is compiled is compiled once, and nothing is left.
        folder = tempfile.mkdtemp(prefix="cupy_resnet-tests-")
        os.environ[environment.CACHE_DIR.name] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(environment.CACHE_DIR.name, None))
