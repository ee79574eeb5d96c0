"""Every form in which a kernel file is compiled: what ``cupy-resnet kernels --compile`` and the tests go through."""

from .conv2d import VARIANTS, back_to_back, stem, stem_wgmma, stem_wgmma_tf32
from .engines.cuda_engine import SPECIALISATIONS


def configurations(source: str) -> list[dict[str, int | str]]:
    """Returns every set of ``#define``s for the kernel file `source`; ``[{}]`` for one with a single form."""
    forms: list[dict[str, int | str]] = [dict(defines) for defines in SPECIALISATIONS.get(source, ())]
    for module in (stem, stem_wgmma, stem_wgmma_tf32):
        if source == module.SOURCE:
            forms += module.configurations()
    if source == back_to_back.name:
        forms += [config.defines() for config in back_to_back.configurations()]
    for variant in VARIANTS.values():
        forms += [dict(c.defines()) for c in variant.configurations() if source in variant.sources_of(c)]
    return forms or [{}]
