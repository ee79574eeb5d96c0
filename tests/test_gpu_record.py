"""The GPU record speaks of this tree, and says that every GPU test passed."""

import json
from pathlib import Path
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
