"""cupy_resnet.environment: one table of variables, and what each accessor makes of them."""

import os
import re
from pathlib import Path

import pytest

import cupy_resnet
from cupy_resnet import environment

PACKAGE = Path(cupy_resnet.__file__).parent


def test_every_variable_in_the_package_is_in_the_table_and_the_other_way_round():
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"CUPY_RESNET_[A-Z0-9_]+", path.read_text(encoding="utf-8"))
    }
    assert used == {variable.name for variable in environment.VARIABLES}


def test_only_this_module_reads_variables_of_ours():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "environment.py":
            reads = re.findall(r"(?:environ|getenv)\W+CUPY_RESNET", path.read_text(encoding="utf-8"))
            assert not reads, path


def test_the_table_is_documented():
    for variable in environment.VARIABLES:
        assert variable.default
        assert variable.meaning.endswith(".")
    assert len({variable.name for variable in environment.VARIABLES}) == len(environment.VARIABLES)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_unset_and_blank_mean_the_default(monkeypatch, value):
    if value is not None:
        for variable in environment.VARIABLES:
            monkeypatch.setenv(variable.name, value)
    assert environment.cache_dir().name == "cupy_resnet"
    assert environment.disk_cache() is True
    assert environment.engine() == "auto"
    assert environment.cuda_include() == ()
    assert environment.test_data().parts[-2:] == ("shared", "data")


def test_folders_are_expanded_and_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", "~/cache")
    assert environment.cache_dir() == tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPY_RESNET_CACHE_DIR", "here")
    assert environment.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("CUPY_RESNET_TEST_DATA", "data")
    assert environment.test_data() == tmp_path / "data"


def test_include_folders_keep_their_order(monkeypatch):
    monkeypatch.setenv("CUPY_RESNET_CUDA_INCLUDE", f"/b{os.pathsep}{os.pathsep}/a")
    assert environment.cuda_include() == (Path("/b"), Path("/a"))


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_disk_cache_switch(monkeypatch, value, expected):
    monkeypatch.setenv("CUPY_RESNET_DISK_CACHE", value)
    assert environment.disk_cache() is expected


def test_engine(monkeypatch):
    monkeypatch.setenv("CUPY_RESNET_ENGINE", "NumPy")
    assert environment.engine() == "numpy"


@pytest.mark.parametrize(
    ("name", "value", "accessor"),
    [
        ("CUPY_RESNET_DISK_CACHE", "off", environment.disk_cache),
        ("CUPY_RESNET_ENGINE", "gpu", environment.engine),
    ],
)
def test_a_wrong_value_names_variable_value_and_choices(monkeypatch, name, value, accessor):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name} must be .*'{value}'"):
        accessor()
