"""conv2d_stem_wgmma's own text on the host: every index, and who waits for whom (see `stem_wgmma_host`)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from stem_wgmma_host import Result, build, expected, host_source, numbers, run
from wgmma_host import COMPILER, Program, wrong_programs

from cupy_resnet.conv2d.stem_wgmma import _defines

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

Libraries = Callable[..., Program]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    @cache
    def library(precision: str = "fp16", element: str = "float", channels: int = 3, pixels: int = 64) -> Program:
        assert COMPILER is not None
        folder, defines = tmp_path_factory.mktemp("host"), _defines(precision, element, channels, pixels)
        return build(COMPILER, folder, host_source().text(), "stem", defines)

    return library


def to_bits(values: np.ndarray, precision: str) -> np.ndarray:
    """As bits of the precision; bfloat16 must hold the values."""
    if precision == "fp16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, precision: str) -> np.ndarray:
    if precision == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def weights(C: int, K: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(K, 7, 7, C) filter, the same as the kernel wants it, (K,) bias."""
    weight, bias = numbers((K, 7, 7, C), C), numbers((K,), K)
    cells = np.zeros((K, 7, 8, 4), np.float32)
    cells[:, :, :7, :C] = weight
    return weight, cells, bias


def assert_right(result: Result, want: np.ndarray, precision: str = "fp16") -> None:
    assert result.error is None
    assert (result.writes == 1).all(), "an output that is not written exactly once"
    np.testing.assert_array_equal(from_bits(result.y, precision), want)


@pytest.mark.parametrize(
    ("N", "H", "W", "K", "stripe_rows", "grid"),
    [
        (1, 20, 30, 64, 2, 3),
        (2, 33, 47, 64, 3, 2),  # odd numbers of rows and columns; stripes that do not divide the map
        (1, 9, 258, 128, 3, 2),  # three tiles, of which the last has one column of its own
        (1, 10, 127, 64, 1, 1),  # the map ends with the tile
        (3, 1, 1, 64, 1, 2),
        (1, 2, 130, 64, 1, 3),
        (1, 70, 8, 64, 18, 1),  # one long stripe: all places of the ring many times
    ],
)
def test_exact(libraries: Libraries, N: int, H: int, W: int, K: int, stripe_rows: int, grid: int) -> None:
    x = numbers((N, H, W, 3), H)
    weight, cells, bias = weights(3, K)
    result = run(libraries(), x, to_bits(cells, "fp16"), bias, stripe_rows=stripe_rows, grid=grid, seed=H)
    assert_right(result, expected(x, weight, bias))


@pytest.mark.parametrize("pixels", [80, 112])
def test_every_width_of_a_tile(libraries: Libraries, pixels: int) -> None:
    weight, cells, bias = weights(3, 64)
    for W in (224, 321):
        x = numbers((1, 13, W, 3), W)
        result = run(libraries(pixels=pixels), x, to_bits(cells, "fp16"), bias, stripe_rows=2, grid=2)
        assert_right(result, expected(x, weight, bias))


@pytest.mark.parametrize("C", [1, 2, 4])
def test_other_numbers_of_channels_in_bfloat16(libraries: Libraries, C: int) -> None:
    x = numbers((2, 11, 19, C), C)
    weight, cells, bias = weights(C, 64)
    result = run(
        libraries("bf16", "BFloat16", C), to_bits(x, "bf16"), to_bits(cells, "bf16"), bias, stripe_rows=2, grid=2
    )
    assert_right(result, expected(x, weight, bias), "bf16")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_no_bit_of_a_bias_is_lost(libraries: Libraries, precision: str) -> None:
    """Sums leave its last one: neither one nor two elements could hold it."""
    bias = np.full(64, 1024.5 + 2**-13, np.float32)
    x = np.ones((1, 9, 12, 3), np.float32)
    cells = np.zeros((64, 7, 8, 4), np.float32)
    cells[:, 3, 3, :2] = -1024, -0.5
    library = libraries(precision, "Half" if precision == "fp16" else "BFloat16")
    result = run(library, to_bits(x, precision), to_bits(cells, precision), bias, stripe_rows=2, grid=2)
    assert_right(result, np.full((1, 3, 3, 64), 2**-13), precision)


def test_a_bias_may_be_infinite(libraries: Libraries) -> None:
    """Or become so, since fp16 has none as large."""
    _, cells, _ = weights(3, 64)
    bias = np.resize(np.float32([np.inf, -np.inf, 1e30, -1e30]), 64)
    x = numbers((1, 9, 12, 3), 0)
    result = run(libraries(), x, to_bits(cells, "fp16"), bias, stripe_rows=2, grid=2)
    assert_right(result, np.broadcast_to(np.resize(np.float32([np.inf, 0]), 64), (1, 3, 3, 64)))


def test_bytes_of_any_layout_are_normalised_before_they_are_padded(libraries: Libraries) -> None:
    pixels = (np.random.default_rng(0).integers(0, 2, (2, 3, 18, 21)) * 255).astype(np.uint8)
    mean, std = np.float32([0.5, 0, 1]), np.float32([0.25, 1, 0.5])
    weight, cells, bias = weights(3, 64)
    for x in (pixels.transpose(0, 2, 3, 1), pixels.transpose(0, 2, 3, 1)[:, ::-1, 1::2, ::-1]):
        result = run(
            libraries(element="unsigned char"),
            x,
            to_bits(cells, "fp16"),
            bias,
            stripe_rows=2,
            grid=3,
            normalization=(mean, std),
        )
        assert_right(result, expected((x.astype(np.float32) / 255 - mean) / std, weight, bias))


@pytest.mark.parametrize(
    ("element", "C", "W", "planes"),
    [
        ("float", 3, 140, False),  # two tiles, of which the second begins amid 16 bytes
        ("float", 3, 140, True),
        ("float", 3, 141, True),
        ("float", 4, 141, False),
        ("Half", 3, 272, False),
        ("Half", 3, 272, True),
        ("Half", 1, 136, False),
        ("Half", 3, 140, False),
        ("unsigned char", 3, 144, False),
        ("unsigned char", 3, 144, True),
        ("unsigned char", 3, 136, False),
    ],
)
def test_rows_are_fetched_where_they_are_aligned(
    libraries: Libraries, element: str, C: int, W: int, planes: bool
) -> None:
    x = np.abs(numbers((2, C, 13, W) if planes else (2, 13, W, C), W))
    x = x.transpose(0, 2, 3, 1) if planes else x
    weight, cells, bias = weights(C, 64)
    pixels = {"float": x, "Half": x.astype(np.float16), "unsigned char": (x * 255).astype(np.uint8)}[element]
    result = run(
        libraries(element=element, channels=C), pixels, to_bits(cells, "fp16"), bias, stripe_rows=2, grid=3, seed=W
    )
    assert_right(result, expected(x, weight, bias))
    assert (result.fetched > 0) == (W * (1 if planes else C) * pixels.itemsize % 16 == 0)


@pytest.mark.parametrize("element", ["float", "Half"])
def test_values_are_normalised_wherever_they_come_from(libraries: Libraries, element: str) -> None:
    mean, std = np.array([0.5, 0, 1], np.float32), np.array([0.25, 1, 0.5], np.float32)
    weight, cells, bias = weights(3, 64)
    for W in (48, 49):
        x = np.abs(numbers((1, 13, W, 3), W))
        pixels = x.astype(np.float16 if element == "Half" else np.float32)
        result = run(
            libraries(element=element),
            pixels,
            to_bits(cells, "fp16"),
            bias,
            stripe_rows=3,
            grid=1,
            normalization=(mean, std),
        )
        assert_right(result, expected((x - mean) / std, weight, bias))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_pixel_reaches_exactly_its_receptive_field(libraries: Libraries, value: float) -> None:
    weight, cells, bias = weights(3, 64)
    for h, w in ((10, 20), (11, 21), (16, 139), (9, 124), (9, 127)):
        x = numbers((1, 17, 140, 3), 1)
        x[0, h, w, 1] = value
        result = run(libraries(), x, to_bits(cells, "fp16"), bias, stripe_rows=2, grid=1)
        assert_right(result, expected(x, weight, bias))


MISTAKES = {
    "a pair is given back too early": ("barriers.empty[pair % PAIRS]", "barriers.empty[(pair + 1) % PAIRS]"),
    "a pair is not waited for": ("wait_for_pairs(next + PAIRS_READ);", "wait_for_pairs(next + PAIRS_READ - 1);"),
    "the place is not waited for": ("~(number / PAIRS) & 1", "number / PAIRS & 1"),
    "a stage is not waited for": ("number / STAGES & 1", "~(number / STAGES) & 1"),
    "a stage is overwritten too early": ("if (number > 0) barrier_wait", "if (number > 99) barrier_wait"),
    "stores without a fence": ("written_for_storing();  // the tensor", "// the tensor"),
    "sums are read too early": (
        "        end_row(sums);\n        pack();\n",
        "        pack();\n        end_row(sums);\n",
    ),
    "a row that ends in the unit above is stored": ("? 0 : target.behind", "? target.behind : target.behind"),
    "the bias in other filters": ("bias[warp * 16 + lane / 4 + 8]", "bias[warp * 16 + lane / 4]"),
    "zeros beside the last column": ("pack_pair(1, 1, ELEMENT{})", "pack_pair(0, 1, ELEMENT{})"),
    "no copy of the last column": ("(CELLS - 2) * CELL_BYTES / 16;", "CELL_BYTES / 16;"),
    "columns outside of the map": ("past % 2 == 1) leave_out", "past % 2 == 2) leave_out"),
    "y before earlier kernels have ended": ("wait_for_earlier_kernels();  // they may", "// they may"),
}
"""What is wrong → correct text, wrong text."""


wrong = wrong_programs(host_source, MISTAKES, lambda _: _defines("fp16", "float", 4, 64), build)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(wrong: Callable[[str], Program], mistake: str) -> None:
    """Of the kernel's own text, by the runs above."""
    library = wrong(mistake)
    weight, cells, bias = weights(4, 64)

    def noticed(library: Program, seed: int) -> bool:
        x = numbers((1, 37, 21, 4), 1) - 3  # all outputs where the padding is not are negative or large
        x[0, 20, 14, 1] = np.nan
        options: dict[str, Any] = {"stripe_rows": 5, "grid": 1, "seed": seed}
        result = run(library, x, to_bits(cells, "fp16"), bias, **options)
        want = expected(x, weight, bias)
        return result.error is not None or not np.array_equal(from_bits(result.y, "fp16"), want, equal_nan=True)

    assert not noticed(library.without_mistake, 0)
    assert any(noticed(library, seed) for seed in range(12))
