"""Tensor maps: what the driver is told, argument by argument; with a stand-in for the driver, whose functions have the
prototypes of cuda.h, so that an argument of another C type is an error."""

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_int, c_uint32, c_uint64, c_void_p
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet.conv2d import PRECISIONS, Conv2dProblem, tensor_maps
from cupy_resnet.errors import EngineUnavailableError
from cupy_resnet.jit import headers

TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "tf32": "TFLOAT32", "fp32-tc": "FLOAT32"}
"""CU_TENSOR_MAP_DATA_TYPE_… of a precision."""

NUMBERS = {
    "CU_TENSOR_MAP_DATA_TYPE_FLOAT16": 6,
    "CU_TENSOR_MAP_DATA_TYPE_FLOAT32": 7,
    "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": 9,
    "CU_TENSOR_MAP_DATA_TYPE_TFLOAT32": 11,
    "CU_TENSOR_MAP_INTERLEAVE_NONE": 0,
    "CU_TENSOR_MAP_SWIZZLE_128B": 3,
    "CU_TENSOR_MAP_L2_PROMOTION_L2_256B": 3,
    "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0,
}
"""Of cuda.h; enumerations are ints to a C compiler."""

_FRONT = c_int, c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64)
_ENUMS = c_int, c_int, c_int, c_int
TILED = ctypes.CFUNCTYPE(*_FRONT, POINTER(c_uint32), POINTER(c_uint32), *_ENUMS)
IM2COL = ctypes.CFUNCTYPE(*_FRONT, POINTER(c_int), POINTER(c_int), c_uint32, c_uint32, POINTER(c_uint32), *_ENUMS)

ADDRESS = 0x7F12_3456_7890
ENCODED = bytes(range(100, 228))
"""What the stand-in writes into a map."""

PLAIN = Conv2dProblem(N=2, H=14, W=15, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")


class Driver:
    """Writes down what it is asked to encode, by the names of cuda.h, and where to."""

    def __init__(self) -> None:
        self.status = 0
        self.asked: list[dict[str, Any]] = []
        self.destinations: list[int] = []
        self.cuTensorMapEncodeTiled = TILED(self._tiled)
        self.cuTensorMapEncodeIm2col = IM2COL(self._im2col)

    def _tiled(self, destination: int, kind: int, rank: int, *arguments: Any) -> int:
        address, dims, strides, box, steps, *enums = arguments
        boxes = {"boxDim": tuple(box[:rank]), "elementStrides": tuple(steps[:rank])}
        return self._encode("tiled", destination, kind, rank, address, dims, strides, boxes, enums)

    def _im2col(self, destination: int, kind: int, rank: int, *arguments: Any) -> int:
        address, dims, strides, lower, upper, channels, pixels, steps, *enums = arguments
        boxes = {
            "pixelBoxLowerCorner": tuple(lower[: rank - 2]),
            "pixelBoxUpperCorner": tuple(upper[: rank - 2]),
            "channelsPerPixel": channels,
            "pixelsPerColumn": pixels,
            "elementStrides": tuple(steps[:rank]),
        }
        return self._encode("im2col", destination, kind, rank, address, dims, strides, boxes, enums)

    def _encode(
        self,
        function: str,
        destination: int,
        kind: int,
        rank: int,
        address: int,
        dims: Any,
        strides: Any,
        boxes: dict[str, Any],
        enums: Sequence[int],
    ) -> int:
        names = ("interleave", "swizzle", "l2Promotion", "oobFill")
        self.asked.append(
            {
                "function": function,
                "tensorDataType": kind,
                "globalAddress": address,
                "globalDim": tuple(dims[:rank]),
                "globalStrides": tuple(strides[: rank - 1]),
                **boxes,
                **dict(zip(names, enums, strict=True)),
            }
        )
        self.destinations.append(destination)
        if not self.status:
            ctypes.memmove(destination, ENCODED, len(ENCODED))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(tensor_maps, "_driver", lambda: fake)
    return fake


def gpu_array(shape: tuple[int, ...], precision: str, address: int = ADDRESS) -> Any:
    """A CuPy array, as far as a map's maker looks at it."""
    size = int(np.prod(shape, dtype=np.int64))
    return SimpleNamespace(
        shape=shape, size=size, dtype=PRECISIONS[precision].storage, data=SimpleNamespace(ptr=address)
    )


def common(precision: str) -> dict[str, int]:
    """What every map is told."""
    return {
        "tensorDataType": NUMBERS[f"CU_TENSOR_MAP_DATA_TYPE_{TYPES[precision]}"],
        "globalAddress": ADDRESS,
        "interleave": NUMBERS["CU_TENSOR_MAP_INTERLEAVE_NONE"],
        "swizzle": NUMBERS["CU_TENSOR_MAP_SWIZZLE_128B"],
        "l2Promotion": NUMBERS["CU_TENSOR_MAP_L2_PROMOTION_L2_256B"],
        "oobFill": NUMBERS["CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"],
    }


def test_the_numbers_are_those_of_cuda_h() -> None:
    pytest.importorskip("cupy")
    files = [folder / "cuda.h" for folder in headers.find_headers().folders if (folder / "cuda.h").is_file()]
    if not files:
        pytest.skip("no cuda.h beside the toolkit's headers")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", files[0].read_text(encoding="utf-8"), flags=re.DOTALL)
    found = {}
    for body in re.findall(r"typedef enum CUtensorMap\w+ \{(.*?)\}", text, re.DOTALL):
        value = -1
        for member in filter(None, map(str.strip, body.split(","))):
            name, _, given = (part.strip() for part in member.partition("="))
            value = int(given, 0) if given else value + 1
            found[name] = value
    assert {name: found[name] for name in NUMBERS} == NUMBERS
    assert f"#define CU_TENSOR_MAP_NUM_QWORDS {tensor_maps.BYTES // 8}\n" in text


# Columns of pixels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "lower", "upper", "steps"),
    [
        # (w, h) each: of the first window's corner from the image's, of the last one's from its end, between windows
        ({}, (-1, -1), (-1, -1), (1, 1)),
        ({"R": 1, "S": 1, "pad_h": 0, "pad_w": 0}, (0, 0), (0, 0), (1, 1)),
        ({"pad_h": 0, "pad_w": 0}, (0, 0), (-2, -2), (1, 1)),
        ({"pad_h": 5, "pad_w": 4}, (-4, -5), (2, 3), (1, 1)),  # beyond the image
        ({"R": 1, "pad_h": 0}, (-1, 0), (-1, 0), (1, 1)),
        ({"R": 5, "S": 2, "pad_h": 2, "pad_w": 1}, (-1, -2), (0, -2), (1, 1)),
        ({"stride_h": 2, "stride_w": 3}, (-1, -1), (-1, -1), (3, 2)),
        ({"stride_w": 8}, (-1, -1), (-1, -1), (8, 1)),
        ({"dilation_h": 2, "dilation_w": 3}, (-1, -1), (-5, -3), (1, 1)),
        ({"R": 2, "S": 4, "dilation_h": 5, "dilation_w": 2, "pad_h": 3, "pad_w": 6}, (-6, -3), (0, -2), (1, 1)),
        (
            {"H": 300, "W": 299, "R": 128, "S": 2, "dilation_w": 127, "pad_h": 0, "pad_w": 127},
            (-127, 0),
            (0, -127),
            (1, 1),
        ),
    ],
)
@pytest.mark.parametrize("precision", TYPES)
def test_columns_of_an_input(
    driver: Driver,
    precision: str,
    changes: dict[str, int],
    lower: tuple[int, int],
    upper: tuple[int, int],
    steps: tuple[int, int],
) -> None:
    problem = replace(PLAIN, C=192, precision=precision, **changes)
    encoded = tensor_maps.im2col_map(problem, gpu_array(problem.input_shape, precision), 128)
    size = PRECISIONS[precision].element_size
    H, W = problem.H, problem.W
    (asked,) = driver.asked
    assert asked == {
        "function": "im2col",
        **common(precision),
        "globalDim": (192, W, H, 2),
        "globalStrides": (192 * size, W * 192 * size, H * W * 192 * size),
        "pixelBoxLowerCorner": lower,
        "pixelBoxUpperCorner": upper,
        "channelsPerPixel": 128 // size,
        "pixelsPerColumn": 128,
        "elementStrides": (1, *steps, 1),
    }
    assert encoded.tobytes() == ENCODED
    # The hardware's way to count the windows in a row and in a column is the problem's.
    assert -(-(W + upper[0] - lower[0]) // steps[0]) == problem.Q
    assert -(-(H + upper[1] - lower[1]) // steps[1]) == problem.P


def test_columns_have_as_many_pixels_as_asked_for_and_sizes_may_pass_32_bits(driver: Driver) -> None:
    problem = replace(PLAIN, N=2**17, H=256, W=255)
    tensor_maps.im2col_map(problem, gpu_array(problem.input_shape, "fp16"), 64)
    (asked,) = driver.asked
    assert asked["pixelsPerColumn"] == 64
    assert asked["globalDim"] == (64, 255, 256, 2**17)
    assert asked["globalStrides"] == (128, 255 * 128, 256 * 255 * 128)
    large = replace(PLAIN, N=1, H=2**13, W=2**12, C=64, precision="tf32")
    tensor_maps.im2col_map(large, gpu_array(large.input_shape, "tf32", address=0xFFFF_FFFF_FFF0), 64)
    assert driver.asked[-1]["globalStrides"] == (256, 2**20, 2**33)
    assert driver.asked[-1]["globalAddress"] == 0xFFFF_FFFF_FFF0


# Matrices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    ("shape", "columns", "rows", "dims"),
    [
        ((72, 3, 3, 64), 576, 256, (576, 72)),  # a filter, (K, R, S, C)
        ((2, 14, 15, 72), 72, 128, (72, 420)),  # an output, (N, P, Q, K)
        ((1, 1, 1, 8), 8, 64, (8, 1)),
        ((2**16, 128, 128, 256), 256, 64, (256, 2**30)),
    ],
)
def test_a_matrix(
    driver: Driver, precision: str, shape: tuple[int, ...], columns: int, rows: int, dims: tuple[int, int]
) -> None:
    problem = replace(PLAIN, precision=precision)
    encoded = tensor_maps.matrix_map(problem, gpu_array(shape, precision), columns, rows)
    size = PRECISIONS[precision].element_size
    (asked,) = driver.asked
    assert asked == {
        "function": "tiled",
        **common(precision),
        "globalDim": dims,
        "globalStrides": (columns * size,),
        "boxDim": (128 // size, rows),
        "elementStrides": (1, 1),
    }
    assert encoded.tobytes() == ENCODED


@pytest.mark.parametrize("precision", TYPES)
def test_what_is_not_multiplied_is_not_rounded(driver: Driver, precision: str) -> None:
    y = gpu_array((2, 14, 15, 72), precision)
    tensor_maps.matrix_map(replace(PLAIN, precision=precision), y, 72, 128, factor=False)
    kept = {"tf32": "FLOAT32"}.get(precision, TYPES[precision])
    (asked,) = driver.asked
    assert asked["tensorDataType"] == NUMBERS[f"CU_TENSOR_MAP_DATA_TYPE_{kept}"]


# Images -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((2, 14, 15, 64), (16, 16, 1)),  # wider and higher than the image: zeros around it
        ((2, 14, 15, 72), (16, 4, 1)),
        ((9, 7, 7, 512), (8, 8, 4)),
        ((1, 1, 1, 8), (1, 1, 1)),
        ((2**17, 256, 255, 64), (256, 3, 1)),  # more than 2^32 elements
    ],
)
def test_boxes_of_images(
    driver: Driver, precision: str, shape: tuple[int, int, int, int], box: tuple[int, int, int]
) -> None:
    encoded = tensor_maps.tensor_map(replace(PLAIN, precision=precision), gpu_array(shape, precision), box)
    N, H, W, C = shape
    (asked,) = driver.asked
    assert asked == {
        "function": "tiled",
        **common(precision),
        "globalDim": (C, W, H, N),
        "globalStrides": (2 * C, 2 * C * W, 2 * C * W * H),
        "boxDim": (64, *box),
        "elementStrides": (1, 1, 1, 1),
    }
    assert encoded.tobytes() == ENCODED


# The map itself -----------------------------------------------------------------------------------------------------


def one_of_each(precision: str = "fp16") -> Iterator[np.ndarray]:
    problem = replace(PLAIN, precision=precision)
    yield tensor_maps.im2col_map(problem, gpu_array(problem.input_shape, precision), 128)
    yield tensor_maps.matrix_map(problem, gpu_array(problem.filter_shape, precision), problem.gemm_k, 64)
    yield tensor_maps.tensor_map(problem, gpu_array(problem.input_shape, precision), (16, 16, 1))


def test_a_map_is_128_bytes_at_a_multiple_of_64_and_keeps_them(driver: Driver) -> None:
    kept = [encoded for _ in range(40) for encoded in one_of_each()]
    assert len(set(driver.destinations)) == len(kept) == 120
    assert all(destination % 64 == 0 for destination in driver.destinations)
    for encoded, destination in zip(kept, driver.destinations, strict=True):
        assert encoded.ctypes.data == destination
        assert (encoded.shape, encoded.nbytes, encoded.dtype) == ((1,), 128, tensor_maps.NONE.dtype)
        assert encoded.tobytes() == ENCODED


def test_no_map_is_as_large_as_a_map() -> None:
    assert tensor_maps.NONE.shape == (1,)
    assert tensor_maps.NONE.tobytes() == bytes(128)


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [1, 201])
def test_what_the_driver_refuses_is_an_error_that_names_function_problem_and_status(
    driver: Driver, status: int
) -> None:
    driver.status = status
    maps = one_of_each()
    with pytest.raises(EngineUnavailableError) as caught:
        next(maps)
    assert str(caught.value) == (
        f"the driver refuses a tensor map for {PLAIN}: cuTensorMapEncodeIm2col gives error {status}"
    )
    with pytest.raises(EngineUnavailableError, match=rf": cuTensorMapEncodeTiled gives error {status}$"):
        tensor_maps.matrix_map(PLAIN, gpu_array(PLAIN.output_shape, "fp16"), PLAIN.K, 128)


@pytest.fixture
def fresh_driver() -> Iterator[None]:
    """No driver has been loaded before or after."""
    tensor_maps._driver.cache_clear()
    yield
    tensor_maps._driver.cache_clear()


def old_driver(name: str) -> Any:
    class OldDriver:
        def __getattr__(self, function: str) -> Any:
            raise AttributeError(f"/lib/{name}: undefined symbol: {function}")

    return OldDriver()


def no_driver(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


@pytest.mark.usefixtures("fresh_driver")
@pytest.mark.parametrize(
    ("load", "why"),
    [
        (no_driver, "libcuda.so.1: cannot open shared object file: No such file or directory"),
        (old_driver, "/lib/libcuda.so.1: undefined symbol: cuTensorMapEncodeIm2col"),
    ],
)
def test_a_missing_or_old_driver_is_an_error_that_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, load: Any, why: str
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", load)
    for _ in range(2):  # it may have been installed meanwhile, so that it is looked for again
        with pytest.raises(EngineUnavailableError) as caught:
            next(one_of_each())
        assert str(caught.value) == f"tensor maps need a CUDA driver of version 12 or newer: {why}"
        assert isinstance(caught.value.__cause__, OSError | AttributeError)
    fake = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert [encoded.tobytes() for encoded in one_of_each()] == [ENCODED] * 3


@pytest.mark.usefixtures("fresh_driver")
@pytest.mark.parametrize(("platform", "library"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_the_driver_is_loaded_once_under_its_platforms_name(
    monkeypatch: pytest.MonkeyPatch, platform: str, library: str
) -> None:
    loaded: list[str] = []

    def load(name: str) -> Driver:
        loaded.append(name)
        return Driver()

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        patch.setattr(ctypes, "CDLL", load)
        assert len([*one_of_each(), *one_of_each("tf32")]) == 6
    assert loaded == [library]
