"""The convolution kernels by name.

A variant is a rung of the ladder in kernels_cu/README.md. `VARIANTS` maps its name, which is what a user passes as
``kernel=``, to an object that answers `supports` without a GPU and launches with one.
"""

from .fp32_variants import Direct, Im2colSgemm, ImplicitGemm, Shared, Winograd
from .tensor_core_variants import Mma, MmaPatch, Wgmma, Wmma
from .variant import NULL, Filter, Operands, Shortcut, Support, Variant
from .wgmma_3xtf32 import Wgmma3xTf32
from .wgmma_patch import WgmmaPatch

__all__ = ["NULL", "VARIANTS", "Filter", "Operands", "Shortcut", "Support", "Variant"]

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Direct(),
        Shared(),
        Im2colSgemm(),
        ImplicitGemm(),
        Winograd(),
        Wmma(),
        Mma(),
        MmaPatch(),
        Wgmma(),
        WgmmaPatch(),
        Wgmma3xTf32(),
    )
}
"""The ladder, from the bottom."""
