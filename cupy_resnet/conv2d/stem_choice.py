"""Which kernel computes a whole stem. Imports no CuPy: usable anywhere."""

from collections.abc import Callable
from math import prod

from .device import Device
from .precision import Precision
from .stem import SOURCE, launch_stem, pooled_shape, supports_stem
from .stem_wgmma import SOURCE as WGMMA_SOURCE
from .stem_wgmma import launch_stem_wgmma, supports_stem_wgmma
from .stem_wgmma_tf32 import SOURCE as WGMMA_TF32_SOURCE
from .stem_wgmma_tf32 import launch_stem_wgmma_tf32, supports_stem_wgmma_tf32
from .variant import Support

STEM_LAUNCHES = {
    WGMMA_SOURCE: launch_stem_wgmma,
    WGMMA_TF32_SOURCE: launch_stem_wgmma_tf32,
    SOURCE: launch_stem,
}
"""Kernel → what enqueues it."""

STEM_SUPPORTS: dict[str, Callable[[Precision, tuple[int, ...], tuple[int, ...], Device], Support]] = {
    WGMMA_SOURCE: supports_stem_wgmma,
    WGMMA_TF32_SOURCE: supports_stem_wgmma_tf32,
    SOURCE: supports_stem,
}
"""Kernel → whether it computes a stem, and if not, why. Of those that do the first is the fastest for many outputs."""

FEW_OUTPUTS = 16 * 56 * 56 * 64
"""Outputs up to which conv2d_stem is chosen in place of conv2d_stem_wgmma.

A block of that has filters to bring to its registers and a ring of rows to fill before its first product. Measured on
an H200 in fp16 with images of 224 × 224: conv2d_stem takes 4.4 µs against 7.0 for one image, 11.8 against 12.9 for 8,
but 36.5 against 29.3 for 32. conv2d_stem_wgmma_tf32 is chosen for any number: for a few images it takes about as long
in TF32, otherwise less (kernels_cu/README.md has the figures).
"""


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
    supported, reason = supports_stem(precision, x_shape, filter_shape, device)
    if not supported:
        return None, reason
    few = prod(pooled_shape(x_shape, filter_shape[0])) <= FEW_OUTPUTS
    able = (name for name, supports in STEM_SUPPORTS.items() if supports(precision, x_shape, filter_shape, device)[0])
    return next(name for name in able if not (few and name == WGMMA_SOURCE)), ""
