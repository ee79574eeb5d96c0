"""bfloat16 as bits: the same values as torch's, rounded once from either float type."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from cupy_resnet.engines.bfloat16 import from_bfloat16, to_bfloat16

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.3895314e38, 3.4e38, 1e-40, -1e-45]


def test_float32_rounds_as_in_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array(SPECIAL, np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = to_bfloat16(values)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(from_bfloat16(found), expected.float().numpy())
    signs = np.signbit(from_bfloat16(found)) == np.signbit(values)
    assert signs[~np.isnan(values)].all()


def test_every_bfloat16_survives_the_round_trip() -> None:
    bits = np.arange(2**16).astype(np.uint16)
    values = from_bfloat16(bits)
    np.testing.assert_array_equal(values, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy())
    again = to_bfloat16(values)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(again[finite], bits[finite])
    assert np.isnan(from_bfloat16(again[~finite])).all()
    np.testing.assert_array_equal(from_bfloat16(bits.view(np.int16)), values)


@pytest.mark.parametrize("offset", [-(2.0**-52), 0.0, 2.0**-52])
def test_float64_is_rounded_once_where_two_steps_go_wrong(offset: float) -> None:
    """Values that near a tie between two neighbours become that tie when they are rounded to float32 first."""
    bits = np.random.default_rng(1).integers(0x0080, 0x7F00, 500).astype(np.uint16)
    low, high = from_bfloat16(bits).astype(np.float64), from_bfloat16(bits + np.uint16(1)).astype(np.float64)
    values = (low + high) / 2 * (1 + offset)
    for value, below, above, even, found in zip(
        values, low, high, bits % 2 == 0, from_bfloat16(to_bfloat16(values)), strict=True
    ):
        left, right = Fraction(value) - Fraction(below), Fraction(above) - Fraction(value)
        nearest = below if left < right or (left == right and even) else above
        assert found == nearest
        assert from_bfloat16(to_bfloat16(np.array([-value])))[0] == -nearest


def test_float64_beyond_float32() -> None:
    values = np.array([1e300, -1e300, 1e-300, np.nan, 3.3895313892515355e38])
    np.testing.assert_array_equal(
        from_bfloat16(to_bfloat16(values)), np.float32([np.inf, -np.inf, 0, np.nan, 3.3895314e38])
    )


def test_shapes_and_strides() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1, ::2]
    np.testing.assert_array_equal(from_bfloat16(to_bfloat16(x)), x)
    assert from_bfloat16(to_bfloat16(x[:0])).shape == (0, 3, 2)
