"""What is published: the sdist and the wheel hold all they need, and the wheel works where the repository is not."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cupy_resnet

ROOT = Path(__file__).resolve().parent.parent


def files_below(*folders: str) -> set[str]:
    """Names of the repository's files in these folders, relative to its root, without what Python leaves behind."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {str(path.relative_to(ROOT)) for path in paths if path.is_file() and "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_sdist_holds_everything_that_builds_and_tests_it(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= files_below("cupy_resnet", "kernels_cu", "weights", "tests")
    assert names >= {"pyproject.toml", "README.md", "LICENSE"}


def test_the_wheel_holds_the_package_its_kernels_and_its_weights_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    beside = {f"cupy_resnet/{name}" for name in files_below("kernels_cu", "weights")}
    metadata = {name for name in names if name.partition("/")[0] == f"cupy_resnet-{cupy_resnet.__version__}.dist-info"}
    assert names - metadata == files_below("cupy_resnet") | beside
    assert "cupy_resnet/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in metadata)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment, outside the repository, with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return folder.resolve()


def run(environment: Path, *command: str) -> str:
    """Runs a command of the environment, in it and with nothing of ours in the variables; returns what it prints."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "CUPY_RESNET"))}
    program = [str(environment / "bin" / command[0]), *command[1:]]
    done = subprocess.run(program, capture_output=True, text=True, cwd=environment, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_heavy_comes_with_it(environment: Path) -> None:
    program = "import importlib.util as u; print([n for n in ('torch', 'cupy', 'nvidia', 'scipy') if u.find_spec(n)])"
    assert run(environment, "python", "-c", program).strip() == "[]"


def test_a_network_runs_from_the_installed_wheel(environment: Path) -> None:
    program = """
import numpy as np
import cupy_resnet
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.resources import folder
model = cupy_resnet.load("resnet20", random_state_dict(describe("resnet20")))
logits = model(np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32))
assert logits.shape == (2, 10) and np.isfinite(logits).all() and logits.std() > 0
print(model.engine, cupy_resnet.__file__, folder("kernels_cu"), folder("weights"), sep="\\n")
"""
    engine, *places = run(environment, "python", "-c", program).split()
    assert engine == "numpy"
    assert all(Path(place).is_relative_to(environment) for place in places)


def test_the_command_line_is_installed(environment: Path) -> None:
    assert run(environment, "cupy-resnet", "--version") == f"cupy-resnet {cupy_resnet.__version__}\n"
    kernels = [line.split()[0] for line in run(environment, "cupy-resnet", "kernels").splitlines()[1:]]
    assert kernels == sorted(path.stem for path in (ROOT / "kernels_cu").glob("*.cu"))


def test_the_readmes_example_runs(environment: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "conv2d_mma" in run(environment, "python", "-c", example)
