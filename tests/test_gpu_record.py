"""The GPU record speaks of this tree, and says that every GPU test passed."""

import gpu_record


def test_record_is_of_these_kernels_and_launchers() -> None:
    assert gpu_record.read()["sha256"] == gpu_record.hashes(), (
        "kernels or the Python that launches them changed since the record was written: run `pytest -m gpu` on a GPU "
        "and commit tests/gpu_record.json"
    )


def test_every_gpu_test_passed_in_the_record() -> None:
    outcomes = gpu_record.read()["outcomes"]
    bad = {test: outcomes.get(test, "missing") for test in gpu_record.collected() if outcomes.get(test) != "passed"}
    assert not bad, f"{len(bad)} GPU tests did not pass in the record, among them {dict(list(bad.items())[:5])}"
