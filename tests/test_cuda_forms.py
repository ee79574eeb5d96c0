"""The forms in which the engine's own kernels are compiled: those it can launch, no more and no fewer."""

import itertools

import numpy as np
import pytest

from cupy_resnet import jit
from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.conv2d.stem import INPUTS
from cupy_resnet.engines import checks
from cupy_resnet.engines.cuda import forms

ELEMENTS = ("float", "Half", "BFloat16")


def reachable() -> dict[str, list[forms.Form]]:
    """What the engine asks for, over many sizes."""
    sizes = range(1, 40)
    found: dict[str, list[forms.Form]] = {
        **{kernel: [forms.pointwise(e) for e in ELEMENTS] for kernel in forms.POINTWISE},
        **{
            kernel: [forms.channelwise(e, C) for e, C in itertools.product(ELEMENTS, sizes)]
            for kernel in forms.CHANNELWISE
        },
        **{
            kernel: [forms.pixels(e, np.dtype(d)) for e, d in itertools.product(ELEMENTS, checks.PIXEL_DTYPES)]
            for kernel in forms.PIXELS
        },
        "pad_channels": [forms.pad_channels(e, C, 8, 8)[0] for e, C in itertools.product(ELEMENTS, sizes)],
        "linear": [forms.linear(N, C) for N, C in itertools.product(range(1, 17), sizes)],
    }
    return found


@pytest.mark.parametrize("kernel", forms.SPECIALISATIONS)
def test_the_list_is_what_can_be_launched(kernel: str) -> None:
    def as_set(several) -> set:
        return {tuple(sorted(form.items())) for form in several}

    listed = forms.SPECIALISATIONS[kernel]
    assert as_set(listed) == as_set(reachable()[kernel])
    assert len(as_set(listed)) == len(listed)
    assert kernel in {source.name for source in jit.list_kernels()}


def test_element_types_are_those_of_the_precisions() -> None:
    assert {precision.element: precision.element_size for precision in PRECISIONS.values()} == forms.ELEMENT_SIZES
    assert tuple(forms.ELEMENT_SIZES) == ELEMENTS


def test_pixels_are_what_the_stem_reads_too() -> None:
    assert set(INPUTS) == set(checks.PIXEL_DTYPES)


@pytest.mark.parametrize(
    ("element", "channels", "vector"),
    [("float", 64, 4), ("float", 6, 1), ("Half", 64, 8), ("Half", 12, 1), ("BFloat16", 8, 8), ("BFloat16", 4, 1)],
)
def test_16_bytes_are_moved_where_the_channels_allow_it(element: str, channels: int, vector: int) -> None:
    assert forms.channelwise(element, channels) == {"ELEMENT": element, "VECTOR": vector}


def test_units_of_pad_channels() -> None:
    assert forms.pad_channels("float", 16, 8, 8) == ({"UNIT": "Chunk"}, 4)
    assert forms.pad_channels("Half", 16, 8, 8) == ({"UNIT": "Chunk"}, 8)
    assert forms.pad_channels("BFloat16", 16, 4, 12) == ({"UNIT": "Half"}, 1)
    assert forms.pad_channels("float", 3, 4, 4) == ({"UNIT": "float"}, 1)
