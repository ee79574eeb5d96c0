"""What verification tolerates: torch's numbers, enough for correct engines of every precision and no more."""

import re

import numpy as np
import pytest
import torch
from helpers import normal, photographs
from verify_support import over

from cupy_resnet import weights_store
from cupy_resnet.binding import bind
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.loading import PRECISIONS
from cupy_resnet.networks import describe, list_models, random_state_dict
from cupy_resnet.proof.verification import (
    TOLERANCES,
    Comparison,
    Recording,
    Tolerance,
    check,
    compare,
    depths,
    make_reference,
    metrics,
    record_reference,
    tolerance_for,
)

UNIT = Tolerance(precision="fp32", rtol=0.1, atol=1.0, source="")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_the_numbers_are_torchs(precision: str, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError) as caught:
        torch.testing.assert_close(torch.tensor([1.0], dtype=dtype), torch.tensor([2.0], dtype=dtype))
    allowed = re.findall(r"up to (\S+) allowed", str(caught.value))
    tolerance = TOLERANCES[precision]
    assert [tolerance.atol, tolerance.rtol] == [float(number) for number in allowed]


def test_every_precision_that_can_be_asked_for_has_a_tolerance() -> None:
    assert set(PRECISIONS) - {"auto"} <= set(TOLERANCES)
    assert tolerance_for("fp32", "bf16", "fp16").precision == "bf16"
    with pytest.raises(ValueError, match="unknown precision 'fp61'"):
        tolerance_for("fp32", "fp61")


def test_a_networks_depth_is_what_its_name_says() -> None:
    for name in list_models():
        found = depths(describe(name))
        layers = int(re.findall(r"resne[x]?t(\d+)", name)[0])
        assert found["logits"] == layers
        assert list(found) == list(describe(name).checkpoint_names)
        assert list(found.values()) == sorted(found.values())
    assert set(depths(describe("resnet50"), step=True).values()) == {1, 3}
    assert set(depths(describe("resnet18"), step=True).values()) == {1, 2}


# Correct engines of lower precision, and what exceeds it -------------------------------------------------------------


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """float32 rounded to the nearest value of a precision."""
    if precision == "fp16":
        return x.astype(np.float16).astype(np.float32)
    if precision == "bf16":
        return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()
    bits = np.ascontiguousarray(x).view(np.uint32)  # tf32: 13 bits less, ties to even
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).view(np.float32)


class RoundingEngine(NumpyEngine):
    """Tensor cores by the book: filters and inputs rounded, sums in float32, and activations stored rounded."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def filter(self, weight: np.ndarray) -> np.ndarray:
        return rounded(super().filter(weight), self.precision)

    def conv2d(self, x: np.ndarray, weight: np.ndarray, *arguments: np.ndarray, **options: object) -> np.ndarray:
        y = super().conv2d(rounded(x, self.precision), weight, *arguments, **options)
        return y if self.precision == "tf32" else rounded(y, self.precision)

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        return super().linear(rounded(x, self.precision), rounded(weight, self.precision), bias)


def recorded(name: str, weights: weights_store.Weights, x: np.ndarray, computed: str, claimed: str) -> Recording:
    ops = NumpyEngine() if computed == "fp32" else RoundingEngine(computed)
    classes = weights.state["linear.weight" if "linear.weight" in weights.state else "fc.weight"].shape[0]
    network = bind(describe(name, num_classes=classes), weights.state, ops)
    values: dict[str, np.ndarray] = {}
    network(
        ops,
        ops.nchw_to_nhwc(x),
        lambda key, y: values.update({key: y.transpose(0, 3, 1, 2) if y.ndim == 4 else y}),
    )
    return Recording(values=values, input=x, model=name, computed_by=computed, precision=claimed)


@pytest.fixture(scope="module", params=["resnet20, trained", "resnet56, random", "resnet50, random"])
def case(request: pytest.FixtureRequest) -> tuple[str, weights_store.Weights, np.ndarray, Recording]:
    name, _, kind = request.param.partition(", ")
    state = None if kind == "trained" else random_state_dict(describe(name), seed=1)
    weights = weights_store.resolve(name, state)
    x = normal((2, 3, 32, 32), 3)
    return name, weights, x, record_reference(make_reference("torch", weights), weights, x)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_a_correct_engine_of_each_precision_passes(case, precision: str) -> None:
    name, weights, x, reference = case
    report = check(recorded(name, weights, x, precision, precision), reference)
    assert report.passed, [(c.name, c.value_share, c.norm_share) for c in report.comparisons]
    assert report.worst.share > 0.03  # a tolerance of which nothing is used would prove nothing


@pytest.mark.parametrize(("computed", "claimed"), [("tf32", "fp32"), ("fp16", "fp32"), ("bf16", "fp16")])
def test_an_engine_less_precise_than_it_claims_is_found_at_once(case, computed: str, claimed: str) -> None:
    name, weights, x, reference = case
    report = check(recorded(name, weights, x, computed, claimed), reference)
    assert over(report)[0] == "stem"
    assert len(over(report)) > len(report.comparisons) / 2


def test_trained_weights_on_photographs(data_folder) -> None:
    weights = weights_store.resolve("resnet18", data_folder / "imagenet" / "resnet18_state_dict.npz")
    x = photographs(data_folder, [0])
    reference = record_reference(make_reference("torch", weights), weights, x)
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        report = check(recorded("resnet18", weights, x, precision, precision), reference)
        assert report.passed, (precision, [(c.name, c.value_share, c.norm_share) for c in report.comparisons])
        assert report.worst.share > 0.2


# The numbers ---------------------------------------------------------------------------------------------------------


def compared(a: list[float], b: list[float], depth: int = 1) -> Comparison:
    return compare("x", np.array([a], np.float32), np.array([b], np.float32), UNIT, depth)


def test_the_numbers_of_a_comparison_by_hand() -> None:
    c = compared([3.0, 4.0, 0.5], [3.0, 2.0, 0.0], depth=4)
    assert c.max_abs == 2
    assert c.relative_l2 == pytest.approx(np.sqrt(4.25 / 13))
    assert c.cosine == pytest.approx((9 + 8) / np.sqrt(25.25 * 13))
    assert c.atol == pytest.approx(4 * (1 + 0.1 * 3))
    assert c.rtol == pytest.approx(0.4)
    assert c.value_share == pytest.approx(2 / (5.2 + 0.4 * 2))
    assert c.norm_share == pytest.approx(np.sqrt(4.25 / 13) / (2 * 0.1))
    assert c.share == c.norm_share > 1
    assert not c.passed
    assert c.worst == (0, 1)
    assert (c.worst_ours, c.worst_reference) == (4, 2)


def test_equal_arrays_use_nothing() -> None:
    for values in ([1.0, -2.0], [0.0, 0.0]):
        c = compared(values, values)
        assert (c.max_abs, c.relative_l2, c.cosine, c.share) == (0, 0, 1, 0)
        assert c.passed


def test_the_cosine_keeps_its_digits() -> None:
    x = normal((1, 1000)).astype(np.float64)
    assert compare("x", x * (1 + 1e-7), x, UNIT, 1).cosine == 1
    rotated = x + 1e-7 * np.roll(x, 1)
    expected = 1e-14 / 2 * (1 - (np.vdot(x, np.roll(x, 1)) / np.vdot(x, x)) ** 2)
    assert 1 - compare("x", rotated, x, UNIT, 1).cosine == pytest.approx(expected, rel=0.05)


def test_a_reference_of_zeros_asks_for_zeros() -> None:
    c = compared([0.0, 0.001], [0.0, 0.0])
    assert c.relative_l2 == np.inf
    assert c.cosine == 0
    assert not c.passed
    assert c.to_dict()["relative_l2"] is None


@pytest.mark.parametrize(
    ("ours", "reference", "counts", "passed"),
    [
        ([1.0, np.nan], [1.0, 2.0], (1, 0, 1), False),
        ([1.0, 2.0], [1.0, np.inf], (0, 1, 1), False),
        ([1.0, np.inf], [1.0, -np.inf], (1, 1, 1), False),
        ([1.0, np.nan], [1.0, np.inf], (1, 1, 1), False),
        ([1.0, np.nan], [1.0, np.nan], (1, 1, 0), True),
        ([1.0, np.inf], [1.0, np.inf], (1, 1, 0), True),
        ([np.nan, np.nan], [np.nan, np.nan], (2, 2, 0), False),  # nothing was compared
    ],
)
def test_nan_and_infinity(ours: list[float], reference: list[float], counts: tuple[int, ...], passed: bool) -> None:
    c = compared(ours, reference)
    assert (c.not_finite_ours, c.not_finite_reference, c.not_finite_differ) == counts
    assert c.passed is passed
    assert c.max_abs == 0
    assert c.to_dict()["share"] == (0 if passed else None)


def test_large_arrays_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal((2, 5, 7, 3), 1), normal((2, 5, 7, 3), 2)
    a[1, 4, 6, 2], b[0, 1, 2, 0] = np.nan, np.inf
    whole = compare("x", a, b, UNIT, 3)
    monkeypatch.setattr(metrics, "_CHUNK", 11)
    pieces = compare("x", a, b, UNIT, 3)
    for field, value in whole.to_dict().items():
        assert pieces.to_dict()[field] == (pytest.approx(value) if isinstance(value, float) else value)


def test_arrays_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stem: shapes differ, \(1, 2\) and \(2, 1\)"):
        compare("stem", np.zeros((1, 2)), np.zeros((2, 1)), UNIT, 1)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare("stem", np.zeros((0, 2)), np.zeros((0, 2)), UNIT, 1)
