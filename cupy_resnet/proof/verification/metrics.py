"""How far two arrays are apart, in the numbers that tell a rounding error from a mistake."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .tolerances import Tolerance

_CHUNK = 1 << 20
"""Values brought to float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One checkpoint, computed twice: `a` by what is verified, `b` by the reference.

    Norms, cosine and differences are taken in float64 over the values that are finite on both sides.

    Attributes:
        name: the checkpoint's.
        shape: (N, C, H, W), or (N, C).
        depth: convolutions and matrix products in series, from where both sides had the same values.
        max_abs: the largest ``|a − b|``.
        relative_l2: ``‖a − b‖ / ‖b‖``; infinite if only the denominator is zero.
        cosine: of the angle between `a` and `b`.
        atol, rtol: a value may differ by ``atol + rtol · |b|``, see `tolerances`.
        value_share: the largest share of that which a value uses.
        norm_share: of the tolerance for the tensor as a whole, the share used.
        worst: where in the array `value_share` is reached; None if no value is finite.
        worst_ours, worst_reference: the two values there.
        not_finite_ours, not_finite_reference: NaNs and infinities on either side.
        not_finite_differ: places where one side has one and the other has not the same.
    """

    name: str
    shape: tuple[int, ...]
    depth: int
    max_abs: float
    relative_l2: float
    cosine: float
    atol: float
    rtol: float
    value_share: float
    norm_share: float
    worst: tuple[int, ...] | None
    worst_ours: float | None
    worst_reference: float | None
    not_finite_ours: int
    not_finite_reference: int
    not_finite_differ: int

    @property
    def share(self) -> float:
        """The share of the tolerance that is used, by the stricter of the two rules; infinite if NaNs differ."""
        return math.inf if self.not_finite_differ or self.worst is None else max(self.value_share, self.norm_share)

    @property
    def passed(self) -> bool:
        """Whether the tolerance is kept; not if there is nothing finite to compare."""
        return self.share <= 1

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as values that JSON can hold; what is infinite becomes None."""
        values = asdict(self) | {"share": self.share, "passed": self.passed}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def compare(name: str, ours: np.ndarray, reference: np.ndarray, tolerance: Tolerance, depth: int) -> Comparison:
    """Compares two arrays of floating-point numbers.

    Args:
        name: the checkpoint's.
        ours: what is verified.
        reference: of the same shape.
        tolerance: of one operation in the coarser of the two precisions.
        depth: operations in series, at least 1.

    Raises:
        ValueError: the shapes differ, or the arrays are empty.
    """
    if ours.shape != reference.shape:
        raise ValueError(f"{name}: shapes differ, {ours.shape} and {reference.shape} in the reference")
    if not ours.size:
        raise ValueError(f"{name}: there is nothing to compare in shape {ours.shape}")
    largest = max(float(np.abs(b[finite]).max(initial=0)) for _, _, b, finite in _chunks(ours, reference))
    atol, rtol = depth * (tolerance.atol + tolerance.rtol * largest), depth * tolerance.rtol
    max_abs = value_share = worst_ours = worst_reference = 0.0
    norms = np.zeros(3)  # squared, of a, b and a − b
    not_finite = np.zeros(3, np.int64)
    place = -1
    for start, a, b, finite in _chunks(ours, reference):
        same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
        not_finite += [np.sum(~np.isfinite(a)), np.sum(~np.isfinite(b)), np.sum(~same)]
        if not finite.any():
            continue
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        difference = np.abs(a - b)
        norms += [a @ a, b @ b, difference @ difference]
        max_abs = max(max_abs, float(difference.max()))
        shares = np.where(finite, difference / (atol + rtol * np.abs(b)), -1.0)
        index = int(shares.argmax())
        if place < 0 or shares[index] > value_share:
            place, value_share = start + index, float(shares[index])
            worst_ours, worst_reference = float(a[index]), float(b[index])
    norm_a, norm_b, norm_difference = (float(norm) for norm in np.sqrt(norms))
    relative_l2 = norm_difference / norm_b if norm_b else (math.inf if norm_difference else 0.0)
    found = place >= 0
    return Comparison(
        name=name,
        shape=ours.shape,
        depth=depth,
        max_abs=max_abs,
        relative_l2=relative_l2,
        cosine=_cosine(norm_a, norm_b, norm_difference),
        atol=atol,
        rtol=rtol,
        value_share=value_share,
        norm_share=relative_l2 / (math.sqrt(depth) * tolerance.rtol),
        worst=tuple(int(i) for i in np.unravel_index(place, ours.shape)) if found else None,
        worst_ours=worst_ours if found else None,
        worst_reference=worst_reference if found else None,
        not_finite_ours=int(not_finite[0]),
        not_finite_reference=int(not_finite[1]),
        not_finite_differ=int(not_finite[2]),
    )


def _cosine(norm_a: float, norm_b: float, norm_difference: float) -> float:
    """From the three sides of a triangle, which keeps the digits that a scalar product near one would lose."""
    if not (norm_a and norm_b):
        return 1.0 if norm_a == norm_b else 0.0
    return 1 - (norm_difference**2 - (norm_a - norm_b) ** 2) / (2 * norm_a * norm_b)


def _chunks(ours: np.ndarray, reference: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (start, a, b, where both are finite): float64 pieces of the flattened arrays."""
    a, b = ours.reshape(-1), reference.reshape(-1)
    for start in range(0, a.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        left, right = a[piece].astype(np.float64), b[piece].astype(np.float64)
        yield start, left, right, np.isfinite(left) & np.isfinite(right)
