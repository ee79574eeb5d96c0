"""A convolution with a shortcut on the GPU: exact on small integers against both parts in float64, in every form."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import jit
from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, choose
from cupy_resnet.conv2d.configs import WGMMA, WGMMA_SPLIT_K
from cupy_resnet.conv2d.variants import Filter, Operands, Shortcut
from cupy_resnet.engines.cuda import convolution
from cupy_resnet.engines.cuda_engine import CudaEngine, describe_device
from cupy_resnet.errors import UnsupportedProblemError
from gpu.reference import EXACT_UP_TO, conv2d_float64, integer_case, loaded, poisoned, stored

pytestmark = pytest.mark.gpu

VARIANT = VARIANTS["conv2d_wgmma"]
PLAIN = Conv2dProblem(N=3, H=9, W=7, C=128, K=72, R=3, S=3, pad_h=1, pad_w=1)
POINTWISE = replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0)
SHAPES = {
    # of a convolution with a shortcut, and the height and width of its second input
    "stride 2, odd": (replace(PLAIN, shortcut_channels=64, shortcut_stride=2), (17, 13)),
    "stride 2, even": (replace(PLAIN, shortcut_channels=64, shortcut_stride=2), (18, 14)),
    "stride 1": (replace(PLAIN, shortcut_channels=192), (9, 7)),
    "stride 3": (replace(PLAIN, shortcut_channels=64, shortcut_stride=3), (27, 20)),
    "both stride": (
        replace(PLAIN, N=9, K=8, stride_h=2, stride_w=2, shortcut_channels=64, shortcut_stride=2),
        (9, 8),
    ),
    "1×1, stride 1": (replace(POINTWISE, N=5, C=64, K=256, shortcut_channels=64), (9, 7)),
    "1×1, stride 2": (replace(POINTWISE, N=2, K=520, shortcut_channels=256, shortcut_stride=2), (18, 13)),
    "one pixel": (replace(PLAIN, N=1, H=1, W=1, C=320, K=64, shortcut_channels=576, shortcut_stride=2), (2, 1)),
    "an image more than a tile": (replace(POINTWISE, N=3, H=28, W=28, C=64, shortcut_channels=64), (28, 28)),
    "deep": (replace(PLAIN, N=8, H=7, W=7, C=512, K=512, shortcut_channels=256, shortcut_stride=2), (14, 14)),
}


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")


class Case:
    """Small integers in a precision's storage, and the exact result."""

    def __init__(self, name: str, precision: str) -> None:
        shape, (height, width) = SHAPES[name]
        self.problem = replace(shape, precision=precision)
        N, _, _, C = self.problem.shortcut_shape
        assert self.problem.has_shortcut_of((N, height, width, C))
        self.alone = self.problem.shortcut_alone((N, height, width, C))
        bound = EXACT_UP_TO[precision] // 2
        first = integer_case(self.problem.without_shortcut(), bound)
        second = integer_case(self.alone, bound, seed=1)
        self.x, self.x0 = stored(first.x, precision), stored(second.x, precision)
        self.filter, self.filter0 = (Filter(stored(case.weight, precision)) for case in (first, second))
        self.bias = first.bias
        self.sums = first.exact + second.exact

    def expected(self, *, bias: bool, relu: bool) -> Any:
        import cupy

        y = self.sums + self.bias if bias else self.sums
        return cupy.maximum(y, 0) if relu else y

    def operands(self, y: Any, *, bias: bool = True, relu: bool = True) -> Operands:
        added = self.bias if bias else None
        return Operands(self.x, self.filter, added, None, y, relu, Shortcut(self.x0, self.filter0))


@pytest.mark.parametrize("precision", VARIANT.precisions)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_exact_on_integers(name: str, precision: str) -> None:
    case = Case(name, precision)
    assert VARIANT.supports(case.problem, H100) == (True, "")
    for number, config in enumerate(VARIANT.candidates(case.problem, H100)):
        epilogue = {"bias": number % 3 > 0, "relu": number % 2 > 0}
        y = poisoned(case.problem.output_shape, precision)
        VARIANT.launch(case.problem, case.operands(y, **epilogue), config)
        wrong = int((~(loaded(y) == case.expected(**epilogue))).sum())
        assert not wrong, f"{config}: {wrong} of {y.size} outputs are wrong with {epilogue}"


def test_every_form_is_run_by_the_test_above() -> None:
    problems = [replace(shape, precision=p) for shape, _ in SHAPES.values() for p in VARIANT.precisions]
    assert {config for problem in problems for config in VARIANT.candidates(problem, H100)} == {*WGMMA, *WGMMA_SPLIT_K}


@pytest.mark.parametrize("precision", VARIANT.precisions)
def test_in_a_graph_where_kernels_overlap(precision: str) -> None:
    """Its first input is the kernel's before it, and whatever that reads may be overwritten by the one after it."""
    import cupy

    case = Case("stride 2, odd", precision)
    problem = replace(case.problem, K=128)  # as many as C, so that it can be its own input
    random = cupy.random.RandomState(3)

    def draw(shape: tuple[int, ...]) -> Any:
        few = random.randint(-1, 2, shape) * (random.rand(*shape) < 1 / 128)
        return stored(few.astype(cupy.float32), precision)

    filters = [(Filter(draw(problem.filter_shape)), Filter(draw(problem.shortcut_filter_shape))) for _ in range(3)]
    alone = case.alone
    expected = loaded(case.x)
    for filter, filter0 in filters:
        sums = conv2d_float64(problem, expected, loaded(filter.weight))
        sums += conv2d_float64(replace(alone, K=128), loaded(case.x0), loaded(filter0.weight))
        expected = cupy.maximum(sums, 0).astype(cupy.float32)
    assert float(expected.max()) <= EXACT_UP_TO[precision]
    ys = [cupy.empty(problem.output_shape, problem.arithmetic.storage) for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for config in VARIANT.candidates(problem, H100):
        with stream:
            for y in ys:
                y.data.memset_async(0xFF, y.nbytes, stream)
            _chain(problem, case, filters, ys, config)  # compiles and loads
            stream.begin_capture()
            try:
                with jit.overlapping():
                    last = _chain(problem, case, filters, ys, config)
            finally:
                graph = stream.end_capture()
            for _ in range(3):
                for y in ys:
                    y.data.memset_async(0xFF, y.nbytes, stream)
                graph.launch(stream)
                assert cupy.array_equal(loaded(last), expected), config
    stream.synchronize()


def _chain(problem: Conv2dProblem, case: Case, filters: list[tuple[Filter, Filter]], ys: list[Any], config: Any) -> Any:
    x = case.x
    for number, (filter, filter0) in enumerate(filters):
        y = ys[number % 2]
        operands = Operands(x, filter, None, None, y, True, Shortcut(case.x0, filter0))
        VARIANT.launch(problem, operands, config)
        x = y
    return x


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32-tc", "fp32"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_engine_does_it_either_way(monkeypatch: pytest.MonkeyPatch, fused: bool, precision: str) -> None:
    import cupy

    case = Case("1×1, stride 2", precision)
    engine = CudaEngine(precision=precision)
    monkeypatch.setattr(convolution, "choose_shortcut", lambda *_, **__: (fused, ""))
    shortcut = case.x0, case.filter0, 2
    if fused and precision not in VARIANT.precisions:
        with pytest.raises(UnsupportedProblemError):  # no kernel does both, which the real choice knows
            engine.conv2d(case.x, case.filter, case.bias, shortcut=shortcut, relu=True)
        return
    with jit.recording() as launched:
        y = engine.conv2d(case.x, case.filter, case.bias, shortcut=shortcut, relu=True)
    if precision != "fp32":  # whose kernels are not all recorded
        assert len(launched) == (1 if fused else 2)
    assert cupy.array_equal(loaded(y), case.expected(bias=True, relu=True))
    assert not fused or choose(case.problem, describe_device(0)).variant == VARIANT.name


def test_a_nan_reaches_the_outputs_that_read_it() -> None:
    import cupy

    case = Case("stride 2, odd", "fp16")
    case.x0[1, 4, 6, 5] = np.nan  # read by output pixel (2, 3)
    case.x0[2, 5, 6, 5] = np.nan  # by none
    for config in VARIANT.candidates(case.problem, H100):
        y = poisoned(case.problem.output_shape, "fp16")
        VARIANT.launch(case.problem, case.operands(y), config)
        nan = cupy.isnan(y)
        assert bool(nan[1, 2, 3].all()), config
        assert int(nan.sum()) == case.problem.K, config
