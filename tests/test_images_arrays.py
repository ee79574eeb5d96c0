"""Arrays and tensors: shapes, dtypes, memory layouts, channel order."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cupy_resnet.images import ImageError, decode, expand

RNG = np.random.default_rng(0)
HWC = RNG.integers(0, 256, (6, 5, 3), np.uint8)
GREY = HWC[..., 0]


def decoded(value, **options) -> list[np.ndarray]:
    return [np.asarray(decode(source, **options)) for source in expand(value)]


def refusal(value, **options) -> str:
    (source,) = expand(value)
    with pytest.raises(ImageError) as caught:
        decode(source, **options)
    assert str(caught.value).startswith("image 0: ")
    return str(caught.value)


def same(results: list[np.ndarray], *expected: np.ndarray) -> None:
    assert len(results) == len(expected)
    for result, image in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, np.dstack([image] * 3) if image.ndim == 2 else image)


def test_single_images() -> None:
    same(decoded(HWC), HWC)
    same(decoded(HWC.transpose(2, 0, 1)), HWC)
    same(decoded(GREY), GREY)
    same(decoded(GREY[..., None]), GREY)
    same(decoded(GREY[None]), GREY)


def test_batches() -> None:
    batch = RNG.integers(0, 256, (4, 6, 5, 3), np.uint8)
    same(decoded(batch), *batch)
    same(decoded(batch.transpose(0, 3, 1, 2)), *batch)
    same(decoded(batch[..., :1]), *batch[..., 0])
    same(decoded(batch[..., :1].transpose(0, 3, 1, 2)), *batch[..., 0])
    assert [source.index for source in expand([HWC, batch, HWC])] == list(range(6))


def test_a_batch_of_none_is_no_source() -> None:
    assert list(expand(np.zeros((0, 6, 5, 3), np.uint8))) == []
    same(decoded([np.zeros((0, 3, 6, 5), np.uint8), HWC]), HWC)


@pytest.mark.parametrize("first", [False, True])
def test_alpha_is_composited_on_white(first: bool) -> None:
    rgba = RNG.integers(0, 256, (6, 5, 4), np.uint8)
    rgba[0, :, 3], rgba[1, :, 3] = 0, 255
    (result,) = decoded(rgba.transpose(2, 0, 1) if first else rgba)
    assert (result[0] == 255).all()
    np.testing.assert_array_equal(result[1], rgba[1, :, :3])
    (blue_first,) = decoded(rgba[..., [2, 1, 0, 3]], channel_order="bgr")
    np.testing.assert_array_equal(blue_first, result)


def test_bgr_turns_arrays_and_nothing_else() -> None:
    same(decoded(HWC[..., ::-1], channel_order="bgr"), HWC)
    same(decoded(HWC[..., ::-1].transpose(2, 0, 1), channel_order="bgr"), HWC)
    same(decoded(GREY, channel_order="bgr"), GREY)
    same(decoded(Image.fromarray(HWC), channel_order="bgr"), HWC)


@pytest.mark.parametrize(
    "shape", [(3, 6, 3), (3, 3, 3), (1, 1, 3), (4, 9, 1), (1, 6, 4), (7, 3, 6, 3), (2, 1, 5, 4), (3, 3, 3, 3)]
)
def test_ambiguous_shapes_are_refused_by_name(shape: tuple[int, ...]) -> None:
    message = refusal(np.zeros(shape, np.uint8))
    assert f"shape {shape} may have its channels first or last" in message
    assert "pass PIL.Image.fromarray" in message


@pytest.mark.parametrize("shape", [(), (9,), (6, 5, 2), (6, 5, 7), (10, 28, 28), (2, 6, 5, 2), (1, 2, 6, 5, 3)])
def test_shapes_that_are_no_image_are_refused_by_name(shape: tuple[int, ...]) -> None:
    message = refusal(np.zeros(shape, np.float32))
    assert f"shape {shape} is not an image: accepted are (H, W)" in message
    assert ("array[..., None]" in message) == (len(shape) == 3)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 5, 3), (3, 5, 0), (2, 0, 5, 3)])
def test_images_without_pixels_are_refused_by_name(shape: tuple[int, ...]) -> None:
    assert f"shape {shape} has no pixels" in refusal(np.zeros(shape, np.uint8))


def test_a_files_bytes_in_an_array_are_recognised() -> None:
    assert "pass array.tobytes()" in refusal(np.frombuffer(b"\xff\xd8\xff\xe0", np.uint8))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", np.longdouble])
def test_floats_from_0_to_1_come_back_as_the_bytes_they_were(dtype) -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    same(decoded((values / 255).astype(dtype)), values)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint32, np.uint64, ">i4"])
def test_other_integers_hold_bytes(dtype) -> None:
    values = np.minimum(GREY, 127).astype(dtype)
    same(decoded(values), np.minimum(GREY, 127))
    if np.dtype(dtype).itemsize > 1:
        values[0, 0] = 256
        assert f"{np.dtype(dtype)} pixels must lie in 0–255, found" in refusal(values)
    if np.dtype(dtype).kind == "i":
        values[0, 0] = -1
        assert "found -1 to" in refusal(values)


def test_uint16_and_bool() -> None:
    deep = np.array([[0, 128, 129, 257, 65535]], np.uint16)
    same(decoded(deep), np.array([[0, 0, 1, 1, 255]], np.uint8))
    same(decoded(deep.astype(">u2")), np.array([[0, 0, 1, 1, 255]], np.uint8))
    same(decoded(GREY > 127), np.where(GREY > 127, np.uint8(255), np.uint8(0)))


@pytest.mark.parametrize(
    ("worst", "advice"),
    [
        (254.0, "divide by 255, or pass uint8"),
        (-2.1, "before normalisation"),
        (1.0001, "clip"),
        (-0.1, "clip"),
        (np.inf, "before"),
    ],
)
def test_floats_out_of_range_are_an_error_that_says_so(worst: float, advice: str) -> None:
    pixels = np.full((6, 5, 3), 0.5, np.float32)
    pixels[1, 2, 0] = worst
    message = refusal(pixels)
    assert "float32 pixels must lie in 0–1, found" in message
    assert f"{worst:g}" in message
    assert advice in message


def test_nan_is_an_error_that_names_it() -> None:
    pixels = np.zeros((6, 5, 3), np.float32)
    pixels[1, 2, 0] = np.nan
    assert "float32 pixels contain NaN, the first at (1, 2, 0) of shape (6, 5, 3)" in refusal(pixels)


@pytest.mark.parametrize("dtype", [np.complex64, object, "M8[s]", "S3"])
def test_other_dtypes_are_refused_by_name(dtype) -> None:
    assert f"{np.dtype(dtype)} pixels are not understood" in refusal(np.zeros((6, 5, 3), dtype))


@given(st.data())
def test_any_strides_are_read_right(data: st.DataObject) -> None:
    base = np.random.default_rng(3).integers(0, 256, (20, 18, 3), np.uint8)
    step = st.sampled_from([1, 2, 3, -1, -2])
    view = base[:: data.draw(step), :: data.draw(step), :: data.draw(st.sampled_from([1, -1]))]
    view = data.draw(st.sampled_from([lambda a: a, np.asfortranarray, lambda a: a.transpose(1, 0, 2)]))(view)
    view.setflags(write=False)
    same(decoded(view), np.array(view))
    same(decoded(view.transpose(2, 0, 1)), np.array(view))


def test_broadcast_arrays_and_views_of_batches() -> None:
    same(decoded(np.broadcast_to(np.uint8(7), (6, 5))), np.full((6, 5), 7, np.uint8))
    batch = RNG.integers(0, 256, (8, 6, 5, 3), np.uint8)
    same(decoded(batch[::-2]), *batch[::-2])


def test_arrays_are_not_changed() -> None:
    for value in (HWC.copy(), HWC.astype(np.float32) / 255, HWC.astype(np.uint16)):
        before = value.copy()
        decoded(value, channel_order="bgr")
        np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_tensors(dtype: torch.dtype) -> None:
    chw = torch.from_numpy((HWC > 127).astype(np.uint8)).permute(2, 0, 1)
    tensor = chw * 255 if dtype == torch.uint8 else chw.to(dtype).requires_grad_()
    expected = np.where(HWC > 127, np.uint8(255), np.uint8(0))
    same(decoded(tensor), expected)
    same(decoded(torch.stack([tensor, tensor.flip(1)])), expected, expected[::-1])
    same(decoded([tensor.permute(1, 2, 0)]), expected)


def test_torch_subclasses_and_tensors_without_memory() -> None:
    from torchvision import tv_tensors

    same(decoded(tv_tensors.Image(torch.from_numpy(HWC.transpose(2, 0, 1).copy()))), HWC)
    same(decoded(torch.nn.Parameter(torch.zeros(3, 6, 5))), np.zeros((6, 5), np.uint8))
    assert "the Tensor cannot be read as an array" in refusal(torch.zeros(3, 6, 5, device="meta"))


def test_arrays_of_other_libraries() -> None:
    class OnTheDevice:  # what CuPy's arrays look like from here
        __cuda_array_interface__ = None

        def get(self) -> np.ndarray:
            return HWC

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    class Foreign:
        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            return HWC

    class Broken:
        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            raise RuntimeError("lost")

    same(decoded(OnTheDevice()), HWC)
    same(decoded(Foreign()), HWC)
    assert "the Broken cannot be read as an array: lost" in refusal(Broken())


def test_nothing_of_torch_or_cupy_is_imported() -> None:
    program = (
        "import sys, numpy, cupy_resnet.images as i; list(map(i.decode, i.expand(numpy.zeros((2, 9, 9, 3), 'u1'))));"
        "sys.exit(bool({'torch', 'cupy', 'torchvision'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.gpu
def test_tensors_on_the_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    same(decoded(cupy.asarray(HWC)), HWC)
    if torch.cuda.is_available():
        same(decoded(torch.from_numpy(HWC).cuda()), HWC)
