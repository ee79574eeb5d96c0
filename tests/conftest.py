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
        # Under pytest-xdist the controller hears every report, and processes have its environment.
        gpu_record.share_gpus(config.workerinput["workerid"])
        return
    config.pluginmanager.register(gpu_record.Recorder(config))
    on_gpu = "not gpu" not in config.option.markexpr
    if on_gpu or environment.CACHE_DIR.name not in os.environ:
        use_own_cache(config, environment.cache_dir() / "kernels" if on_gpu else None)


def use_own_cache(config: pytest.Config, kernels: Path | None) -> None:
    """Gives all tests and processes one cache, so that what is compiled is compiled once, and nothing is left.

    On a GPU it is that of the user for compiled `kernels`, of which there are many, and for nothing else: tests must
    not follow what was tuned, nor leave ceilings that were measured while other tests were running.
    """
    folder = Path(tempfile.mkdtemp(prefix="cupy_resnet-tests-"))
    if kernels is not None:
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(kernels, target_is_directory=True)
    patch = pytest.MonkeyPatch()
    patch.setenv(environment.CACHE_DIR.name, str(folder))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(patch.undo)
