"""Convolution: the problem, the kernels that solve it, and the choice among them. Importing needs no CuPy."""

from .device import H100, Device
from .heuristics import Choice, check_kernel, choose
from .precision import PRECISIONS, Precision
from .problem import Conv2dPair, Conv2dProblem
from .shortcut_choice import choose_shortcut
from .variants import VARIANTS

__all__ = [
    "H100",
    "PRECISIONS",
    "VARIANTS",
    "Choice",
    "Conv2dPair",
    "Conv2dProblem",
    "Device",
    "Precision",
    "check_kernel",
    "choose",
    "choose_shortcut",
    "variant_names",
]


def variant_names() -> list[str]:
    """Names of the convolution kernels, the ladder from the bottom: what ``kernel=`` accepts besides ``"auto"``."""
    return list(VARIANTS)
