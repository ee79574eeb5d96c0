"""Verification layer by layer: correct engines pass, broken ones are found and located."""

import json
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import assert_close, normal, torch_checkpoints, torch_model
from verify_support import STATE, WEIGHTS, X, model, one_tap_dropped, over, padding_off_by_one, wrong_epsilon

from cupy_resnet import weights_store
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.verification import (
    Recording,
    Report,
    check,
    check_steps,
    make_reference,
    record,
    record_reference,
    sentence,
    verify,
)
from cupy_resnet.proof.verification.recording import stages


@pytest.fixture(scope="module")
def references() -> dict[str, Recording]:
    """What torch and the NumPy engine make of `X`, before any test breaks the latter."""
    return {kind: record_reference(make_reference(kind, WEIGHTS), WEIGHTS, X) for kind in ("torch", "numpy")}


def compared(loaded, reference: Recording, *, step: bool) -> Report:
    return check_steps(loaded, reference) if step else check(record(loaded, reference.input), reference)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_correct_engine_passes(references, kind: str, fuse: bool, step: bool) -> None:
    report = compared(model(fuse=fuse), references[kind], step=step)
    assert [comparison.name for comparison in report.comparisons] == list(model().checkpoint_names)
    assert report.passed
    assert report.first_over is None
    assert 0 < report.worst.share < 1
    assert not report.missing
    assert report.model == "resnet20"


@pytest.mark.parametrize(
    ("name", "size", "step"), [("resnet18", 48, False), ("resnet18", 48, True), ("resnext50_32x4d", 33, False)]
)
def test_a_correct_engine_passes_against_torchvision(name: str, size: int, step: bool) -> None:
    state = random_state_dict(describe(name), seed=3)
    weights = weights_store.resolve(name, state)
    outcome = verify(model(name, state), weights, "torch", size=size, batch=2, step=step)
    assert outcome.passed
    assert outcome.layers is not None
    assert outcome.layers.reference.startswith("torchvision ")
    assert len(outcome.layers.comparisons) == len(describe(name).checkpoint_names)


MISTAKES = {
    "a tap in one convolution": (
        lambda patch: one_tap_dropped(patch, lambda p: (p.C, p.K) == (16, 32)),
        {"layer2.0"},
    ),
    "padding in the last stage": (
        lambda patch: padding_off_by_one(patch, lambda p: p.C == 64),
        {"layer3.0", "layer3.1", "layer3.2"},
    ),
    "BatchNorm's epsilon in the second stage": (
        lambda patch: wrong_epsilon(patch, 32),
        {"layer2.0", "layer2.1", "layer2.2"},
    ),
    "a tap everywhere": (
        lambda patch: one_tap_dropped(patch, lambda p: True),
        {name for name in describe("resnet20").checkpoint_names if name not in ("gap", "logits")},
    ),
}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_engine_is_located(references, monkeypatch: pytest.MonkeyPatch, mistake: str, kind: str) -> None:
    spoil: Callable[[pytest.MonkeyPatch], None] = MISTAKES[mistake][0]
    guilty = MISTAKES[mistake][1]
    loaded = model(fuse=False)
    spoil(monkeypatch)
    names = loaded.checkpoint_names
    first = min(guilty, key=names.index)

    report = compared(loaded, references[kind], step=False)
    assert not report.passed
    assert report.first_over is not None
    assert report.first_over.name == first
    assert over(report)[0] == first
    assert sentence(report).startswith(f"{first} is the first over tolerance")

    report = compared(loaded, references[kind], step=True)
    assert set(over(report)) == guilty  # what only passes the error on is acquitted


def test_an_epsilon_that_is_folded_into_the_filters_is_found_too(references) -> None:
    loaded = model(batch_norm_eps={"layer2.1.bn1": 1e-3})
    assert over(compared(loaded, references["torch"], step=False))[0] == "layer2.1"
    assert over(compared(loaded, references["torch"], step=True)) == ["layer2.1"]


def test_one_wrong_value_in_one_image_is_found_and_placed(references) -> None:
    recorded = record(model(), X)
    values = {name: value.copy() for name, value in recorded.values.items()}
    values["layer3.1"][1, 5, 7, 2] += 0.01
    ours = Recording(values=values, input=X, model="resnet20", computed_by="a test")
    report = check(ours, references["torch"])
    assert over(report) == ["layer3.1"]
    assert report.first_over is not None
    assert report.first_over.worst == (1, 5, 7, 2)
    assert "[1, 5, 7, 2]" in sentence(report)


def test_where_nan_begins_is_where_it_fails(references) -> None:
    state = {key: array.copy() for key, array in STATE.items()}
    loaded = model(state=state)
    network = loaded.network
    network.blocks[4][1].conv1.bias[3] = np.nan
    report = check(record(loaded, X), references["torch"])
    assert report.first_over is not None
    assert report.first_over.name == network.blocks[4][0] == "layer2.1"
    assert report.first_over.not_finite_reference == 0
    assert "NaN or infinite on one side only" in sentence(report)


def test_the_stages_are_the_network() -> None:
    for name, size in (("resnet20", 32), ("resnet18", 40)):
        loaded = model(name, random_state_dict(describe(name), seed=2))
        network, ops = loaded.network, loaded.ops
        x = normal((2, 3, size, size))
        expected = loaded.checkpoints(x)
        y = x.transpose(0, 2, 3, 1)
        for stage, function in stages(network):
            y = function(ops, y)
            np.testing.assert_array_equal(y.transpose(0, 3, 1, 2) if y.ndim == 4 else y, expected.pop(stage))
        assert not expected


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_the_reference_is_torch_itself(name: str, channels: int) -> None:
    network = describe(name, num_classes=7, in_channels=channels)
    state = random_state_dict(network, seed=4)
    x = normal((2, channels, 40, 40))
    reference = make_reference("torch", weights_store.resolve(name, state))
    expected = torch_checkpoints(name, torch_model(name, state), torch.from_numpy(x))
    found = reference.checkpoints(x)
    assert list(found) == list(network.checkpoint_names)
    for checkpoint, value in found.items():
        assert_close(value, expected[checkpoint])
    np.testing.assert_array_equal(reference.logits(x), found["logits"])


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_the_reference_knows_the_weights_own_epsilons(name: str, kind: str) -> None:
    state = random_state_dict(describe(name), seed=4)
    eps = {"bn1": 0.0, "layer2.0.bn2": 0.1}
    reference = make_reference(kind, weights_store.resolve(name, state, batch_norm_eps=eps))
    x = normal((1, 3, 40, 40))
    ours = record(model(name, state, batch_norm_eps=eps, fuse=False), x)
    recorded = record_reference(reference, weights_store.resolve(name, state), x)
    assert check(ours, recorded).passed
    assert over(check(record(model(name, state), x), recorded))[0] == "stem"


def test_torch_computes_in_float32_and_its_settings_are_left_alone() -> None:
    seen = []
    reference = make_reference("torch", WEIGHTS)
    correct = torch.nn.functional.linear

    def look(*arguments: torch.Tensor) -> torch.Tensor:
        seen.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.is_grad_enabled()))
        return correct(*arguments)

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", look)
            reference.logits(X)
            assert torch.backends.cudnn.allow_tf32
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [(False, "highest", False)]


def test_a_report_is_json(references) -> None:
    report = check(record(model(), X, input_from="somewhere"), references["torch"])
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["passed"] is True
    assert values["first_over"] is None
    assert values["input"] == {"from": "somewhere", "shape": [3, 3, 32, 32]}
    assert [row["name"] for row in values["checkpoints"]] == list(model().checkpoint_names)
    assert values["tolerance"]["precision"] == "fp32"


def test_other_inputs_and_other_models_are_refused(references) -> None:
    with pytest.raises(ValueError, match="were given different inputs"):
        check(record(model(), X + 1), references["torch"])
    other = model("resnet32", random_state_dict(describe("resnet32")))
    for compare in (
        lambda: check(record(other, X), references["torch"]),
        lambda: check_steps(other, references["torch"]),
    ):
        with pytest.raises(ValueError, match="is of resnet20, which cannot be compared with resnet32"):
            compare()
    with pytest.raises(ValueError, match="at least one image"):
        record(model(), X[:0])
    with pytest.raises(ValueError, match="unknown reference 'tensorflow'"):
        make_reference("tensorflow", WEIGHTS)


@pytest.mark.parametrize("library", ["torch", "torchvision"])
def test_without_torch_the_message_says_how_to_get_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    weights = weights_store.resolve("resnet18", random_state_dict(describe("resnet18")))
    with pytest.raises(ImportError, match=r"pip install 'cupy-resnet\[torch\]'"):
        make_reference("torch", weights)
