"""How far two computations of one network may be apart, and why no further.

Two rules, both built from torch's own numbers for the precision (`TOLERANCES`) and from the depth ``d`` of a
checkpoint: the number of convolutions and matrix products in series between the input of the comparison and it.

- The tensor as a whole: ``‖a − b‖ ≤ √d · rtol · ‖b‖``. Rounding errors of successive layers are independent, so their
  squares add up: a root, not a multiple (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis",
  SIAM J. Sci. Comput. 41(5), 2019). Nothing is added for values near zero, a norm being no such value. This finds what
  is slightly wrong everywhere.
- Each value: ``|a − b| ≤ d · (atol + rtol · (|b| + max |b|))``. The error of a sum of products is relative to its
  terms, which may cancel, and not to its value (Higham, "Accuracy and Stability of Numerical Algorithms", §3.1), so
  that the tensor's largest value stands beside the value's own. The worst of a million values is not the typical one,
  hence the bound of a sum, ``d``, in place of the root. This finds what is plainly wrong in a few places.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ..._names import unknown_name
from ...networks import Network


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What one operation may be off by.

    Attributes:
        precision: as in `cupy_resnet.load`.
        rtol: relative, of the size of the values.
        atol: absolute, for values of order one.
        source: where the numbers come from.
    """

    precision: str
    rtol: float
    atol: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as values that JSON can hold."""
        return asdict(self)


_DEFAULTS = "torch.testing.assert_close's defaults for {}"

TOLERANCES = {
    tolerance.precision: tolerance
    for tolerance in (
        Tolerance(precision="fp32", rtol=1.3e-6, atol=1e-5, source=_DEFAULTS.format("float32")),
        Tolerance(
            precision="fp32-tc",
            rtol=1.3e-6,
            atol=1e-5,
            source=_DEFAULTS.format("float32") + ", whose accuracy this precision claims",
        ),
        Tolerance(
            precision="tf32",
            rtol=1e-3,
            atol=1e-5,
            source=_DEFAULTS.format("float16") + ", whose 10 bits of fraction TF32 has; it has none of its own",
        ),
        Tolerance(precision="fp16", rtol=1e-3, atol=1e-5, source=_DEFAULTS.format("float16")),
        Tolerance(precision="bf16", rtol=1.6e-2, atol=1e-5, source=_DEFAULTS.format("bfloat16")),
    )
}
"""By precision. A reference is float32 or better, so that the precision is that of what is verified."""


def tolerance_for(*precisions: str) -> Tolerance:
    """Returns the tolerance of the coarsest of these precisions.

    Raises:
        ValueError: a precision that `TOLERANCES` does not know.
    """
    for precision in precisions:
        if precision not in TOLERANCES:
            raise ValueError(unknown_name("precision", precision, TOLERANCES))
    return max((TOLERANCES[precision] for precision in precisions), key=lambda tolerance: tolerance.rtol)


def depths(network: Network, *, step: bool = False) -> dict[str, int]:
    """Returns by checkpoint the number of convolutions and matrix products in series before it.

    Args:
        network: a description or a bound network.
        step: whether each part starts from the reference's values, so that only its own operations count.
    """
    own = {"stem": 1}
    for name, block in network.blocks:
        own[name] = sum(".downsample." not in conv.name for conv in block.convolutions())  # the shortcut is in parallel
    own |= {"gap": 0, "logits": 1}
    if step:
        return {name: max(1, count) for name, count in own.items()}
    total = 0
    return {name: (total := total + count) for name, count in own.items()}
