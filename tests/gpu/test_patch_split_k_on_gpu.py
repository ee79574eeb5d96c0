"""conv2d_wgmma_patch_split_k on the GPU: exact on small integers in every form, the same every time and everywhere."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import jit
from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_PATCH_SPLIT_K, WgmmaPatchConfig
from cupy_resnet.conv2d.variants import Filter, Operands
from cupy_resnet.conv2d.wgmma_patch import patch_tile
from gpu.reference import EXACT_UP_TO, integer_case, loaded, stored

pytestmark = pytest.mark.gpu

VARIANT = VARIANTS["conv2d_wgmma_patch"]
PLAIN = Conv2dProblem(N=9, H=7, W=7, C=512, K=72, R=3, S=3, pad_h=1, pad_w=1)
SHAPES = {
    "several images a tile": PLAIN,
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, C=1088, K=64),
    "5×5": replace(PLAIN, R=5, S=5, pad_h=2, pad_w=2, N=3, H=9, W=6, K=128),
    "7×1": replace(PLAIN, R=7, S=1, pad_h=3, pad_w=0, N=3, H=9, W=6),
    "an image as a tile": replace(PLAIN, N=2, H=14, W=14, K=256),
    "an image larger than a tile": replace(PLAIN, N=2, H=23, W=28, K=8),
    "1×1, larger than a tile": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0, N=2, H=23, W=29, C=576),
    "rows as long as the narrowest tile": replace(PLAIN, N=1, H=5, W=64, K=16),
    "one pixel": replace(PLAIN, N=1, H=1, W=1, C=704),
    "shallow": replace(PLAIN, C=64),
    "a slice of channels more than blocks": replace(PLAIN, C=192, N=4),
}
EPILOGUES = list(itertools.product((False, True), repeat=3))


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")


def forms(problem: Conv2dProblem) -> Iterator[WgmmaPatchConfig]:
    """Every form that can compute a problem, whether or not it is among the candidates."""
    for config in WGMMA_PATCH_SPLIT_K:
        deep = config.split_k_slices <= problem.C // config.CHANNELS
        if config.precision == problem.precision and deep:
            tile = patch_tile(problem, config.pixels, H100.shared_memory_per_block, config.split_k_slices)
            if tile is not None:
                yield config


def test_every_form_is_launched_below() -> None:
    for precision in VARIANT.precisions:
        launched = {config for shape in SHAPES.values() for config in forms(replace(shape, precision=precision))}
        assert launched == {config for config in WGMMA_PATCH_SPLIT_K if config.precision == precision}


class Case:
    """Small integers in a precision's storage, guarded, and a guarded place for results."""

    def __init__(self, guarded: Any, problem: Conv2dProblem) -> None:
        self.problem, precision = problem, problem.precision
        self.integers = integer_case(problem, EXACT_UP_TO[precision])
        storage = problem.arithmetic.storage
        self.x, self.weight, self.residual = (
            guarded(values.shape, stored(values, precision), storage)
            for values in (self.integers.x, self.integers.weight, self.integers.residual)
        )
        self.filter = Filter(self.weight.array)
        self.y = guarded(problem.output_shape, dtype=storage)

    def operands(self, *, bias: bool, residual: Any, relu: bool) -> Operands:
        return Operands(self.x.array, self.filter, self.integers.bias if bias else None, residual, self.y.array, relu)

    def right(self, *, bias: bool, residual: bool, relu: bool) -> bool:
        import cupy

        expected = self.integers.expected(bias=bias, residual=residual, relu=relu)
        return bool(cupy.array_equal(loaded(self.y.array), expected)) and self.y.margins_intact()


@pytest.mark.parametrize("precision", VARIANT.precisions)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_exact_on_integers(name: str, precision: str, guarded: Any) -> None:
    problem = replace(SHAPES[name], precision=precision)
    case = Case(guarded, problem)
    wrong = []
    for config in forms(problem):
        for bias, residual, relu in EPILOGUES:
            case.y.poison()
            added = case.residual.array if residual else None
            VARIANT.launch(problem, case.operands(bias=bias, residual=added, relu=relu), config)
            if not case.right(bias=bias, residual=residual, relu=relu):
                wrong.append(f"{config}: bias={bias} residual={residual} relu={relu}")
        case.y.poison()
        case.y.array[...] = case.residual.array
        VARIANT.launch(problem, case.operands(bias=True, residual=case.y.array, relu=True), config)
        if not case.right(bias=True, residual=True, relu=True):
            wrong.append(f"{config}: in the residual's place")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_launches_that_overlap_in_a_replayed_graph(precision: str, guarded: Any) -> None:
    """The second overwrites what the first reads, and reads what the first writes, as its residual and as its input."""
    import cupy

    problem = replace(PLAIN, K=512, precision=precision)
    integers, storage = integer_case(problem, 32), problem.arithmetic.storage
    filter = Filter(stored(integers.weight, precision))
    nothing = Filter(cupy.zeros_like(filter.weight))
    given = stored(integers.x, precision)
    first = integers.expected(bias=True, residual=False, relu=False)
    x, y = guarded(problem.input_shape, dtype=storage), guarded(problem.output_shape, dtype=storage)
    stream = cupy.cuda.Stream(non_blocking=True)
    for config in forms(problem):
        forward = Operands(x.array, filter, integers.bias, None, y.array, False)
        back = Operands(y.array, nothing, None, y.array, x.array, True)
        x.array[...] = given
        VARIANT.launch(problem, forward, config)  # compiles
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            with jit.overlapping():
                VARIANT.launch(problem, forward, config)
                VARIANT.launch(problem, back, config)
            graph = stream.end_capture()
        for _ in range(3):
            y.poison()
            x.poison()
            x.array[...] = given
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert cupy.array_equal(loaded(y.array), first), config
            assert cupy.array_equal(loaded(x.array), cupy.maximum(first, 0)), config
            assert x.margins_intact(), config
            assert y.margins_intact(), config


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_an_image_has_the_same_answer_at_every_place_and_every_time(precision: str) -> None:
    """Bit for bit, of numbers that are not exact: parts are added in the order of the depth."""
    import cupy

    for shape in (PLAIN, replace(PLAIN, N=7, H=13, W=15)):
        problem = replace(shape, precision=precision)
        random = cupy.random.RandomState(0)
        x = random.standard_normal(problem.input_shape).astype(cupy.float32)
        weight = random.standard_normal(problem.filter_shape).astype(cupy.float32) / 64
        x[3] = x[6] = x[0]
        pixels, filter = stored(x, precision), Filter(stored(weight, precision))
        for config in forms(problem):
            results = []
            for _ in range(3):
                y = cupy.empty(problem.output_shape, problem.arithmetic.storage)
                VARIANT.launch(problem, Operands(pixels, filter, None, None, y, False), config)
                results.append(y.view(np.uint8))
            for y in results:
                assert cupy.array_equal(y, results[0]), config
                assert cupy.array_equal(y[0], y[3]), f"{config}: at place 3"
                assert cupy.array_equal(y[0], y[6]), f"{config}: at place 6"
