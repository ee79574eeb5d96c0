"""Operands rounded to TF32 beforehand, and who does it."""

import numpy as np
import pytest

from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.conv2d.tf32_parts import nearest_tf32
from cupy_resnet.engines.cuda.arrays import CudaArrays

MANTISSA = 10


def nearest(values: np.ndarray) -> np.ndarray:
    """As `nearest_tf32`, by arithmetic in float64."""
    exact = values.astype(np.float64)
    exponents = np.maximum(np.frexp(exact)[1] - 1, -126)  # below, floats are as far apart as there
    unit = np.exp2(exponents - MANTISSA)
    return (np.rint(exact / unit) * unit).astype(np.float32)


def test_the_nearest_tf32_is_that_of_arithmetic() -> None:
    rng = np.random.default_rng(0)
    ties = (np.arange(0x3F800000, 0x3F840000, 0x2000, dtype=np.uint32) + 0x1000).view(np.float32)
    values = np.concatenate(
        (
            rng.standard_normal(5000),
            rng.standard_normal(500) * 1e-39,
            np.array([0.0, -0.0, 3e38, -1e38, 1e-45]),
            ties,
            -ties,
            np.nextafter(ties, np.float32(0)),
            np.nextafter(ties, np.float32(9)),
        )
    ).astype(np.float32)
    rounded = nearest_tf32(values)
    np.testing.assert_array_equal(rounded, nearest(values))
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(values))
    assert not (rounded.view(np.uint32) & 0x1FFF).any()
    assert (rounded != values).mean() > 0.9
    np.testing.assert_array_equal(nearest_tf32(rounded), rounded)
    assert set(np.unique(np.sign(np.abs(rounded) - np.abs(values))[np.isin(values, ties)])) == {-1, 1}  # to even


def test_infinities_stay_and_what_is_too_large_becomes_one() -> None:
    limit = np.finfo(np.float32).max
    values = np.array([np.inf, -np.inf, limit, -limit, np.float32(2.0**127 * (2 - 2.0**-10))], np.float32)
    np.testing.assert_array_equal(nearest_tf32(values), [np.inf, -np.inf, np.inf, -np.inf, values[-1]])


def test_every_nan_stays_one() -> None:
    values = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
    assert np.isnan(nearest_tf32(values)).all()


class HostArrays(CudaArrays):
    """Filters stay where they are."""

    def __init__(self, precision: str) -> None:
        self.precision, self.arithmetic = precision, PRECISIONS[precision]

    def _weights(self, array: np.ndarray) -> np.ndarray:
        return array


@pytest.mark.parametrize("precision", ["fp32", "fp32-tc", "tf32"])
def test_an_engine_rounds_filters_in_tf32_and_not_elsewhere(precision: str) -> None:
    weight = np.random.default_rng(1).standard_normal((8, 3, 3, 4))
    weight[0, 0, 0] = np.nan, np.inf, -np.inf, 0
    held = np.asarray(HostArrays(precision).filter(weight).weight)
    single = weight.astype(np.float32)
    expected = nearest(single[1:]) if precision == "tf32" else single[1:]
    np.testing.assert_array_equal(held[1:], expected)
    np.testing.assert_array_equal(held[0, 0, 0], single[0, 0, 0])
    assert held.dtype == np.float32
    assert held.flags.c_contiguous
