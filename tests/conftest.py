"""Fixtures shared by every test."""

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
    if not hasattr(config, "workerinput"):  # under pytest-xdist the controller hears every report
        config.pluginmanager.register(gpu_record.Recorder(config))
