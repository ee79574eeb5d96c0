"""`expand` on generators: inputs are taken one by one, not kept, and not shared with their maker."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from cupy_resnet.images import Source, decode, expand


def color(source: Source) -> tuple[int, ...]:
    return decode(source).getpixel((0, 0))


def test_a_generator_may_reuse_its_buffer() -> None:
    def frames() -> Iterator[np.ndarray]:
        buffer = np.zeros((5, 6, 3), np.uint8)
        for value in range(4):
            buffer[:] = value
            yield buffer

    def canvases() -> Iterator[Image.Image]:
        canvas = Image.new("RGB", (4, 4))
        for value in range(4):
            canvas.paste((value, value, value), (0, 0, 4, 4))
            yield canvas

    for generator in (frames(), canvases()):
        assert [color(source)[0] for source in list(expand(generator))] == [0, 1, 2, 3]


def test_lists_arrays_and_files_are_not_copied() -> None:
    array = np.zeros((3, 5, 6, 3), np.uint8)
    for source in expand([array]):
        assert np.shares_memory(source.payload, array)


def test_what_a_generator_raises_comes_through() -> None:
    def broken() -> Iterator[bytes]:
        yield b"x"
        raise RuntimeError("the camera is gone")

    sources = expand(broken())
    assert next(sources).payload == b"x"
    with pytest.raises(RuntimeError, match="the camera is gone"):
        next(sources)


def test_inputs_are_consumed_one_by_one() -> None:
    taken = []

    def counted() -> Iterator[bytes]:
        for number in range(1_000_000):
            taken.append(number)
            yield b"x"

    sources = expand(counted())
    for _ in range(3):
        next(sources)
    assert taken == [0, 1, 2]
    sources.close()


def test_memory_stays_flat_on_a_long_generator() -> None:
    def images() -> Iterator[np.ndarray]:
        for number in range(3000):
            yield np.full((100, 100, 3), number % 256, np.uint8)  # 90 MB in all

    tracemalloc.start()
    try:
        for source in expand(images()):
            assert color(source)[0] == source.index % 256
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
