"""The GPU record speaks of this tree, and says that every GPU test passed."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_record
import pytest


def test_record_is_of_these_kernels_and_launchers() -> None:
    assert gpu_record.read()["sha256"] == gpu_record.hashes(), (
        "kernels or the Python that launches them changed since the record was written: run `pytest -m gpu` on a GPU "
        "and commit tests/gpu_record.json"
    )


def test_every_gpu_test_passed_in_the_record() -> None:
    outcomes = gpu_record.read()["outcomes"]
    bad = {test: outcomes.get(test, "missing") for test in gpu_record.collected() if outcomes.get(test) != "passed"}
    assert not bad, f"{len(bad)} GPU tests did not pass in the record, among them {dict(list(bad.items())[:5])}"


def test_outcomes_are_added_only_to_a_record_of_the_same_kernels(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    gpu_record.write(path, {"a": "passed", "b": "failed"})
    gpu_record.add(path, {"b": "passed", "c": "passed"})
    record: dict[str, Any] = json.loads(path.read_text())
    assert record["outcomes"] == {"a": "passed", "b": "passed", "c": "passed"}
    record["sha256"]["kernels"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="sha256"):
        gpu_record.add(path, {"c": "failed"})
    assert json.loads(path.read_text()) == record


def test_processes_share_the_gpus_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def left_to(worker: str, named: str) -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        gpu_record.share_gpus(worker)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    assert [left_to(f"gw{worker}", "0,3") for worker in (0, 1, 2, 11)] == ["0", "3", "0", "3"]
    assert left_to("gw5", "1") == "1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpu_record.share_gpus("gw1")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_run_that_is_cut_short_leaves_what_it_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "record.json")
    options = {"markexpr": "gpu"}
    config: Any = SimpleNamespace(
        invocation_params=SimpleNamespace(args=("-m", "gpu")), getoption=lambda name, default=None: options.get(name)
    )
    recorder = gpu_record.Recorder(config)

    def report(test: str, **outcomes: str) -> None:
        for when, outcome in outcomes.items():
            given: Any = SimpleNamespace(nodeid=test, when=when, outcome=outcome)
            recorder.pytest_runtest_logreport(given)

    report("a", setup="passed", call="passed", teardown="passed")
    assert not gpu_record.RECORD.exists()  # so soon
    monkeypatch.setattr(gpu_record, "WRITE_SECONDS", -1.0)
    report("b", setup="passed", call="failed", teardown="passed")
    report("c", setup="passed", call="passed")  # its teardown may fail yet
    report("d", setup="passed")
    assert gpu_record.read()["outcomes"] == {"a": "passed", "b": "failed"}
    report("c", teardown="failed")
    session: Any = SimpleNamespace(shouldstop=False)
    recorder.pytest_sessionfinish(session)
    assert gpu_record.read()["outcomes"] == {"a": "passed", "b": "failed", "c": "failed"}
