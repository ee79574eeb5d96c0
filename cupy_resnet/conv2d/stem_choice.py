"""Which kernel computes a whole stem. Imports no CuPy: usable anywhere."""

from .device import Device
from .precision import Precision
from .stem import SOURCE, launch_stem, supports_stem
from .stem_wgmma import SOURCE as WGMMA_SOURCE
from .stem_wgmma import launch_stem_wgmma, supports_stem_wgmma
from .variant import Support

STEM_LAUNCHES = {WGMMA_SOURCE: launch_stem_wgmma, SOURCE: launch_stem}
"""Kernel → what enqueues it, the fastest first."""

_SUPPORT = {WGMMA_SOURCE: supports_stem_wgmma, SOURCE: supports_stem}


def choose_stem(
    precision: Precision, x_shape: tuple[int, ...], filter_shape: tuple[int, ...], device: Device
) -> tuple[str | None, str]:
    """Returns the kernel that computes a stem on `device`, and where there is none, None and why.

    Args:
        precision: the network's.
        x_shape: (N, H, W, C).
        filter_shape: (K, R, S, C).
        device: the GPU.
    """
    support: Support = (False, "")
    for name, supports in _SUPPORT.items():
        support = supports(precision, x_shape, filter_shape, device)
        if support[0]:
            return name, ""
    return None, support[1]
