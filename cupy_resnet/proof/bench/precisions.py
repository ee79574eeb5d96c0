"""What each precision means for a comparison: the tensors, torch's switches, and how far a result may be off."""

from dataclasses import dataclass

from ..._names import unknown_name
from ...loading import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one precision.

    Args:
        dtype: of the input and of the rivals' weights: torch's name of a type.
        tf32: whether torch may use TF32 inside its float32 convolutions and products.
        error_factor: how many times the error of torch's own eager run in this precision ours may have, both against
            float64. A precision that claims to be as accurate as float32 gets next to nothing.
    """

    dtype: str = "float32"
    tf32: bool = False
    error_factor: float = 2.0


RULES = {
    "fp32": Rules(),
    "fp32-tc": Rules(error_factor=1.1),
    "tf32": Rules(tf32=True),
    "fp16": Rules(dtype="float16"),
    "bf16": Rules(dtype="bfloat16"),
}
"""Every precision that a comparison knows; ``"auto"`` is none, since a measurement has to say what it measured."""

RIVAL_ERROR_FACTOR = 10.0
"""The same for a rival, wider: leaving one out by mistake would flatter us."""


def check_precision(name: str) -> Rules:
    """Returns the rules of a precision that `cupy_resnet.load` knows.

    Raises:
        ValueError: it is none, or it is ``"auto"``.
    """
    valid = [precision for precision in PRECISIONS if precision in RULES]
    if name not in valid:
        raise ValueError(unknown_name("precision to measure", name, valid))
    return RULES[name]
