"""conv2d_stem_wgmma_tf32's own text on the host: every index, and who waits for whom (see `stem_wgmma_host`)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from stem_wgmma_host import build, expected, host_source, numbers, run
from wgmma_host import COMPILER, Program, wrong_programs

from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.conv2d.stem_wgmma_tf32 import PRECISION_NAMES, SOURCE, _defines, in_steps

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

Libraries = Callable[..., Program]

MEAN, STD = np.float32([0.5, 0, 1, 0]), np.float32([0.25, 1, 0.5, 1])
"""They turn integers into integers."""


def defines(precision: str, element: str, channels: int, pixels: int) -> dict[str, int | str]:
    return _defines(precision, element, channels, pixels) | {"ELEMENT": "float"}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    @cache
    def library(element: str = "float", channels: int = 3, pixels: int = 64, precision: str = "tf32") -> Program:
        assert COMPILER is not None
        folder = tmp_path_factory.mktemp("host")
        return build(
            COMPILER, folder, host_source(SOURCE).text(), "stem", defines(precision, element, channels, pixels)
        )

    return library


def weights(C: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """(K, 7, 7, C) filter, (K,) bias."""
    return numbers((K, 7, 7, C), C), numbers((K,), K)


def compute(
    library: Program, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, products: int = 1, **options: Any
) -> np.ndarray | str:
    """The pooled map, or what went wrong."""
    result = run(library, x, in_steps(weight, products, np), bias, **options)
    if result.error is None and not (result.writes == 1).all():
        return "an output that is not written exactly once"
    return result.error or result.y.view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """To the nearest TF32, ties away from zero."""
    bits = values.view(np.uint32)
    return (bits + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("precision", PRECISION_NAMES)
@pytest.mark.parametrize(
    ("N", "H", "W", "K", "stripe_rows", "grid"),
    [
        (1, 20, 30, 64, 2, 3),
        (2, 33, 47, 64, 3, 2),  # odd numbers of rows and columns; stripes that do not divide the map
        (1, 9, 258, 128, 3, 2),  # three tiles, of which the last has one column of its own
        (1, 10, 127, 64, 1, 1),  # the map ends with the tile
        (1, 7, 66, 64, 2, 1),  # with the first output of a group
        (1, 7, 63, 64, 2, 1),  # with the last output of one
        (3, 1, 1, 64, 1, 2),
        (9, 2, 5, 64, 1, 1),  # units of one row: consumers pass by pairs that they do not read
        (1, 2, 130, 64, 1, 3),  # a block without work
        (1, 70, 8, 64, 18, 1),  # one long stripe: all places of the rings many times
        (2, 21, 72, 64, 1, 1),  # many short units of one block, of which the last of an image is two rows
    ],
)
def test_exact(
    libraries: Libraries, precision: str, N: int, H: int, W: int, K: int, stripe_rows: int, grid: int
) -> None:
    x = numbers((N, H, W, 3), H)
    weight, bias = weights(3, K)
    options = {"products": PRECISIONS[precision].products, "stripe_rows": stripe_rows, "grid": grid, "seed": H}
    y = compute(libraries(precision=precision), x, weight, bias, **options)
    np.testing.assert_array_equal(y, expected(x, weight, bias))


@pytest.mark.parametrize("W", [*range(27, 36), *range(59, 68), *range(121, 132)])
def test_wherever_the_map_ends(libraries: Libraries, W: int) -> None:
    """About the border between groups, and between tiles."""
    x = numbers((1, 6, W, 3), W)
    weight, bias = weights(3, 64)
    y = compute(libraries(), x, weight, bias, stripe_rows=2, grid=1, seed=W)
    np.testing.assert_array_equal(y, expected(x, weight, bias))


@pytest.mark.parametrize("pixels", [80, 112])
def test_every_width_of_a_tile(libraries: Libraries, pixels: int) -> None:
    weight, bias = weights(3, 64)
    for W in (224, 321):
        x = numbers((1, 13, W, 3), W)
        y = compute(libraries(pixels=pixels), x, weight, bias, stripe_rows=2, grid=2)
        np.testing.assert_array_equal(y, expected(x, weight, bias))


@pytest.mark.parametrize(
    ("element", "C"),
    [("float", 1), ("float", 2), ("float", 3), ("float", 4), ("Half", 3), ("BFloat16", 3)]
    + [("unsigned char", C) for C in (1, 3, 4)],
)
def test_every_type_and_number_of_channels(libraries: Libraries, element: str, C: int) -> None:
    """Of any layout; normalised before they are padded, or not at all."""
    weight, bias = weights(C, 64)
    for W in (64, 61):  # rows that are fetched, and not
        for layout in range(3):
            values = np.abs(numbers((2, C, 13, W), W) if layout == 1 else numbers((2, 13, W, C), W))
            values = values.transpose(0, 2, 3, 1) if layout == 1 else values
            pixels = {
                "float": values,
                "Half": values.astype(np.float16),
                "BFloat16": (values.view(np.uint32) >> 16).astype(np.uint16),
                "unsigned char": (values * 255).astype(np.uint8),
            }[element]
            if layout == 2:
                pixels, values = (array[:, ::-1, 1::2, ::-1] for array in (pixels, values))
            for normalization in (None, (MEAN[:C], STD[:C])):
                x = values if normalization is None else (values - MEAN[:C]) / STD[:C]
                options: dict[str, Any] = {"stripe_rows": 2, "grid": 3, "normalization": normalization, "seed": layout}
                y = compute(libraries(element, C), pixels, weight, bias, **options)
                np.testing.assert_array_equal(y, expected(x, weight, bias))


@pytest.mark.parametrize("planes", [False, True])
def test_rows_are_fetched_where_they_are_aligned(libraries: Libraries, planes: bool) -> None:
    """The second tile begins amid 16 bytes."""
    weight, bias = weights(3, 64)
    for W in (140, 141):
        x = numbers((2, 3, 13, W), W).transpose(0, 2, 3, 1) if planes else numbers((2, 13, W, 3), W)
        result = run(libraries(), x, in_steps(weight, 1, np), bias, stripe_rows=2, grid=3, seed=W)
        assert result.error is None
        np.testing.assert_array_equal(result.y.view(np.float32), expected(x, weight, bias))
        assert (result.fetched > 0) == (W % 4 == 0)


def test_three_products_are_as_accurate_as_fp32(libraries: Libraries) -> None:
    """Where one product errs by about 3e-4. All numbers of channels, of which 4 leave shared memory little room."""
    random = np.random.default_rng(1)
    for C in (1, 2, 3, 4):
        x = random.standard_normal((1, 13, 70, C)).astype(np.float32)
        weight, bias = random.standard_normal((64, 7, 7, C)).astype(np.float32), np.zeros(64, np.float32)
        library = libraries(channels=C, precision="fp32-tc", pixels=112 if C == 4 else 64)
        y = compute(library, x, weight, bias, products=3, stripe_rows=2, grid=2, seed=C)
        want = expected(x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64))
        assert not isinstance(y, str), y
        assert np.linalg.norm(y - want) < 1e-6 * np.linalg.norm(want)


def test_pixels_and_filters_are_rounded_to_nearest(libraries: Libraries) -> None:
    random = np.random.default_rng(0)
    weight, bias = weights(3, 64)
    x = numbers((1, 12, 70, 3), 1)
    for of_pixels in (True, False):
        shape = x.shape if of_pixels else weight.shape
        fractions = (random.integers(1 << 12, 2 << 12, shape) / 4096).astype(np.float32)
        fine = (fractions, weight) if of_pixels else (x, fractions)
        assert (rounded(fractions) != fractions).any()
        coarse = rounded(fine[0]), rounded(fine[1])
        y = compute(libraries(), *fine, bias, stripe_rows=2, grid=1)
        np.testing.assert_array_equal(y, expected(*coarse, bias))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_pixel_reaches_exactly_its_receptive_field(libraries: Libraries, value: float) -> None:
    weight, bias = weights(3, 64)
    for h, w in ((0, 0), (10, 20), (11, 21), (16, 139), (9, 63), (9, 64), (9, 66), (9, 124), (9, 127)):
        x = numbers((1, 17, 140, 3), 1)
        x[0, h, w, 1] = value
        y = compute(libraries(), x, weight, bias, stripe_rows=2, grid=1)
        np.testing.assert_array_equal(y, expected(x, weight, bias))


def test_a_non_finite_filter_reaches_exactly_its_outputs(libraries: Libraries) -> None:
    x = numbers((1, 17, 70, 3), 1)
    weight, bias = weights(3, 64)
    weight[5, 6, 5, 2], weight[20, 0, 0, 0], bias[33] = np.inf, np.nan, np.nan
    y = compute(libraries(), x, weight, bias, stripe_rows=2, grid=1)
    want = expected(x, weight, bias)
    assert np.isfinite(want).all(axis=(0, 1, 2)).sum() == 61
    np.testing.assert_array_equal(y, want)


MISTAKES = {
    "a pair is given back too early": ("empty[given_back % PAIRS]", "empty[(given_back + 1) % PAIRS]"),
    "a pair is passed by before it is there": ("            wait_for_pairs(given_back + 1);\n", ""),
    "a pair is not waited for": ("(group.pair + PAIRS_READ)", "(group.pair + PAIRS_READ - 1)"),
    "the place is not waited for": ("~(number / PAIRS) & 1", "number / PAIRS & 1"),
    "a place is free when one consumer has read it": ("empty[i]), CONSUMERS * WARPS", "empty[i]), WARPS"),
    "a stage is not waited for": ("number / STAGES & 1", "~(number / STAGES) & 1"),
    "a stage is overwritten too early": ("if (number > 0) barrier_wait", "if (number > 99) barrier_wait"),
    "filters are not waited for": ("barrier_wait(shared_address(&barriers.filters[c]), 0);", ";"),
    "sums are read too early": ("            warpgroup_wait<0>();", "            warpgroup_wait<1>();"),
    "products are added too early": ("warpgroup_wait<1>();", "warpgroup_wait<2>();"),
    "the last product is added too early": (
        "        warpgroup_wait<0>();\n        add(STEPS - 1);",
        "        warpgroup_wait<1>();\n        add(STEPS - 1);",
    ),
    "an eighth row of the filter": ("t == 3 ? 0 : ~0u", "~0u"),
    "a row is overwritten before it is pooled": (
        "barriers.pooled[row % ROWS]), ~(row",
        "barriers.pooled[row % ROWS]), (row",
    ),
    "a row is pooled before it is there": (
        "number % ROWS]), number / ROWS & 1",
        "number % ROWS]), ~(number / ROWS) & 1",
    ),
    "a row that ends in the unit above is stored": ("ends && (p > unit.first || p % 2 == 0);", "ends;"),
    "columns outside of the map": ("odd = odd_exists ? odd : even;", ""),
    "the border is forgotten": ("(i > 0 ? added : own)", "own"),
    "y before earlier kernels have ended": ("wait_for_earlier_kernels();  // they may", "// they may"),
}
"""What is wrong → correct text, wrong text."""


def source() -> Any:
    return host_source(SOURCE)


def precision_of(mistake: str) -> str:
    return "fp32-tc" if "added" in mistake else "tf32"


wrong = wrong_programs(source, MISTAKES, lambda mistake: defines(precision_of(mistake), "float", 4, 64), build)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(wrong: Callable[[str], Program], mistake: str) -> None:
    """Of the kernel's own text, by the runs above."""
    library = wrong(mistake)
    weight, bias = weights(4, 64)
    products = PRECISIONS[precision_of(mistake)].products

    def noticed(library: Program, seed: int) -> bool:
        x = numbers((1, 37, 85, 4), 1) - 3  # all outputs where the padding is not are negative or large
        x[0, 22, 14, 1] = np.nan
        y = compute(library, x, weight, bias, products=products, stripe_rows=5, grid=1, seed=seed)
        return isinstance(y, str) or not np.array_equal(y, expected(x, weight, bias), equal_nan=True)

    assert not noticed(library.without_mistake, 0)
    assert any(noticed(library, seed) for seed in range(12))
