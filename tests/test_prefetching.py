"""`Prefetch` without a GPU: what the kernel is told, and what it does with that."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet.conv2d.variants import Filter
from cupy_resnet.engines.cuda import prefetching
from cupy_resnet.engines.cuda.arrays import THREADS
from cupy_resnet.engines.cuda.convolution import Convolutions
from cupy_resnet.jit.sources import find_kernel, load_program


def array(address: int, nbytes: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address), nbytes=nbytes)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    jit = SimpleNamespace(
        get_function=lambda name: name, launch=lambda *arguments, **options: made.append((*arguments, options))
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asarray=np.array))
    monkeypatch.setattr(prefetching, "jit", jit)
    return made


def test_filters_are_brought_in_their_order(launches: list[tuple[Any, ...]]) -> None:
    weights = [array(0x7F12_3456_0000, 128 * 300), array(512, 2**33), array(1024, 100)]
    prefetch = Convolutions().prefetch([Filter(weight) for weight in weights])
    assert prefetch.nbytes == 128 * 300 + 2**33 + 100
    assert launches == []
    for _ in range(2):
        prefetch()
    for kernel, grid, block, arguments, options in launches:
        assert (kernel, grid, block, options) == ("prefetch", (prefetching.BLOCKS,), (THREADS,), {})
        starts, lines, count = arguments
        assert (starts.dtype, lines.dtype, type(count)) == (np.uint64, np.int32, np.int32)
        assert starts.tolist() == [0x7F12_3456_0000, 512, 1024]
        assert lines.tolist() == [300, 2**26, 0]  # nothing beyond an array's end
        assert count == 3
    assert len(launches) == 2


def test_a_network_without_blocks_has_nothing_to_bring(launches: list[tuple[Any, ...]]) -> None:
    prefetch = Convolutions().prefetch([])
    prefetch()
    ((_, _, _, (starts, lines, count), _),) = launches
    assert (prefetch.nbytes, starts.size, lines.size, count) == (0, 0, 0, 0)


def test_the_launch_agrees_with_the_kernel() -> None:
    text = load_program(find_kernel("prefetch")).text
    assert re.findall(r"constexpr int LINE = (\d+);", text) == [str(prefetching.LINE)]
    assert re.findall(r"__launch_bounds__\((\d+)\)", text) == [str(THREADS)]
    (signature,) = re.findall(r"\sprefetch\((.*?)\) \{", text)
    assert signature == "const unsigned long long* __restrict__ starts, const int* __restrict__ lines, int count"
