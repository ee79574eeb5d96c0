"""The GPU record: what a full ``pytest -m gpu`` run on a GPU found, kept where machines without one can check it.

``tests/gpu_record.json`` holds the device and versions, the sha256 of the kernel sources and of the Python that
compiles and launches them, and the outcome of every test id. `tests/conftest.py` installs `Recorder`, which writes the
file during and after a full run, ``pytest -m gpu``. After a change to tests alone, or where a run was cut short,
``pytest -m gpu --add-to-gpu-record FILE`` runs some more and puts their outcomes in, provided that device, versions and
sources are the record's. Where ``CUDA_VISIBLE_DEVICES`` names several GPUs, processes of pytest-xdist share them.
`tests/test_gpu_record.py` fails when the file does not match the repository.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cupy_resnet.proof.machine import describe_machine
from cupy_resnet.weights_store.writing import write_file

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"

KERNELS = ("kernels_cu/*.cu", "kernels_cu/include/*.cuh")
WRITE_SECONDS = 30.0
"""How often a full run writes what it has found so far: a machine may be taken away before its end."""

LAUNCHERS = ("cupy_resnet/jit/*.py", "cupy_resnet/conv2d/*.py", "cupy_resnet/engines/**/*.py")


def digest(patterns: tuple[str, ...]) -> str:
    """sha256 over the names and bytes of the repository's files that match, in sorted order."""
    result = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        result.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        result.update(hashlib.sha256(path.read_bytes()).digest())
    return result.hexdigest()


def hashes() -> dict[str, str]:
    """The hashes a record must carry to speak of this tree."""
    return {"kernels": digest(KERNELS), "launchers": digest(LAUNCHERS)}


def subject() -> dict[str, Any]:
    """What a record written here and now speaks of, torch's cuDNN included, whoever imports torch beside it."""
    with suppress(ImportError):
        import torch  # noqa: F401
    return {**describe_machine(), "sha256": hashes()}


def write(path: Path, outcomes: dict[str, str]) -> None:
    """Writes the record atomically."""
    record = {**subject(), "outcomes": dict(sorted(outcomes.items()))}
    write_file(path, json.dumps(record, indent=0, ensure_ascii=False).encode())


def add(path: Path, outcomes: dict[str, str]) -> None:
    """Replaces outcomes in the record.

    Raises:
        ValueError: it is of another device, other versions or other sources.
    """
    record = json.loads(path.read_text())
    here = subject()
    differing = [key for key in ("device", "driver_cuda", "versions", "sha256") if record.get(key) != here[key]]
    if differing:
        raise ValueError(f"{path.name} differs in {', '.join(differing)}: it takes a full run, pytest -m gpu")
    write(path, {**record["outcomes"], **outcomes})


def share_gpus(worker: str) -> None:
    """Leaves a process of pytest-xdist, ``"gw3"``, one of the GPUs that ``CUDA_VISIBLE_DEVICES`` names."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


class Recorder:
    """Collects the outcome of every GPU test and writes the record after a full run of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.outcomes: dict[str, str] = {}  # of tests that have ended
        self._running: dict[str, str] = {}
        self._written = time.monotonic()
        arguments = {str(Path(a).resolve()) for a in config.invocation_params.args if not a.startswith("-")}
        partial = (
            config.getoption("keyword")
            or config.getoption("lf", False)
            or config.getoption("collectonly")
            or any(a.startswith(f"{ROOT}/tests/") for a in arguments)
        )
        self.full = config.getoption("markexpr") == "gpu" and not partial
        self.adds = config.getoption("add_to_gpu_record")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # setup, call and teardown each report; the worst counts, so that a failed teardown is not a pass
        rank = ("passed", "skipped", "failed")
        outcome = max(self._running.get(report.nodeid, "passed"), report.outcome, key=rank.index)
        self._running[report.nodeid] = outcome
        if report.when == "teardown":
            self.outcomes[report.nodeid] = outcome
            if self.full and not self.adds and time.monotonic() - self._written > WRITE_SECONDS:
                write(RECORD, self.outcomes)
                self._written = time.monotonic()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.outcomes or session.shouldstop:
            return
        if self.adds:
            add(RECORD, self.outcomes)
        elif self.full:
            write(RECORD, self.outcomes)


def read() -> dict[str, Any]:
    """The committed record."""
    return json.loads(RECORD.read_text())


def collected() -> list[str]:
    """Ids of every GPU test in this tree, collected in a process of its own.

    Where the test data is absent, a test that goes through its rows has none, for which pytest invents ``[NOTSET]``.
    """
    import subprocess
    import sys

    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    output = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTEST_ADDOPTS": ""}
    )
    ids = [line for line in output.stdout.splitlines() if "::" in line and not line.endswith("[NOTSET]")]
    assert ids, f"no GPU test was collected:\n{output.stdout}\n{output.stderr}"
    return ids
