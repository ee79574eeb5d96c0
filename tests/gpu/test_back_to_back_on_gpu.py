"""conv2d_wgmma_b2b on a GPU: exact on integers, in place, in a graph, and no less accurate than two launches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import jit
from cupy_resnet.conv2d import VARIANTS, Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import (
    BackToBackConfig,
    BackToBackOperands,
    back_to_back_candidates,
    launch_back_to_back,
    supports_back_to_back,
)
from cupy_resnet.conv2d.variants import Filter, Operands
from cupy_resnet.engines.cuda_engine import describe_device
from gpu.reference import conv2d_float64, loaded, poisoned, stored, to_tf32

pytestmark = pytest.mark.gpu

PLAIN = Conv2dProblem(N=2, H=7, W=9, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="fp16")
PROBLEMS = {
    "few pixels": (PLAIN, 256),
    "few columns": (PLAIN, 128),
    "one pixel": (replace(PLAIN, N=1, H=1, W=1), 256),
    "stride 2": (replace(PLAIN, N=3, H=15, W=13, stride_h=2, stride_w=2), 256),
    "uneven strides": (replace(PLAIN, N=5, H=15, W=13, stride_h=2, stride_w=3), 384),
    "dilation": (replace(PLAIN, dilation_h=2, dilation_w=2, pad_h=2, pad_w=2), 256),
    "1×1": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0), 256),
    "5×1": (replace(PLAIN, R=5, S=1, pad_h=2, pad_w=0, C=128), 256),
    "deep": (replace(PLAIN, C=192, N=9), 512),
    "many tiles": (replace(PLAIN, N=61, H=29, W=27), 256),
    "wide": (replace(PLAIN, N=3), 2048),
    "128 channels": (replace(PLAIN, C=128, K=128, N=9), 512),
    "128 channels, stride 2": (replace(PLAIN, C=128, K=128, N=15, H=56, W=56, stride_h=2, stride_w=2), 512),
    "256 channels": (replace(PLAIN, C=256, K=256, N=9), 1024),
    "256 channels, many tiles": (replace(PLAIN, C=256, K=256, N=127, H=14, W=14), 1024),
    "256 channels, stride 2": (replace(PLAIN, C=256, K=256, N=33, H=28, W=28, stride_h=2, stride_w=2), 1024),
    "256 channels, wide": (replace(PLAIN, K=256, N=3, H=13, W=11), 2048),
}

RELUS = [(True, True), (False, True), (True, False), (False, False)]


class Case:
    """A bottleneck's end on small integers; of bfloat16's second filter few, so that sums have few bits."""

    def __init__(self, first: Conv2dProblem, K: int) -> None:
        import cupy

        self.pair = Conv2dPair(first, K)
        self.first, self.second = self.pair.parts
        supported, why_not = supports_back_to_back(self.pair, describe_device(0))
        if not supported:
            pytest.skip(why_not)
        random = np.random.default_rng(0)

        def integers(most: int, shape: tuple[int, ...], share: float = 1.0) -> Any:
            values = random.integers(-most, most + 1, shape) * (random.random(shape) < share)
            return stored(cupy.asarray(values.astype(np.float32)), first.precision)

        few = 0.03 if first.precision == "bf16" else 0.5
        self.x = integers(1, first.input_shape)
        weights = integers(1, first.filter_shape), integers(1, self.second.filter_shape, few)
        self.filters = Filter(weights[0]), Filter(weights[1])
        self.biases = tuple(cupy.asarray(random.integers(-9, 10, k).astype(np.float32)) for k in (first.K, K))
        self.residual = integers(9, self.second.output_shape)

    def expected(self, relus: tuple[bool, bool] = (True, True), biases: bool = True) -> Any:
        """In float64, between the two rounded as the network's tensors are."""
        import cupy

        middle = conv2d_float64(self.first, loaded(self.x), loaded(self.filters[0].weight)) + biases * self.biases[0]
        middle = loaded(stored(cupy.maximum(middle, 0) if relus[0] else middle, self.first.precision))
        y = conv2d_float64(self.second, middle, loaded(self.filters[1].weight)) + biases * self.biases[1]
        y = y + loaded(self.residual)
        return stored(cupy.maximum(y, 0) if relus[1] else y, self.first.precision)

    def operands(
        self,
        relus: tuple[bool, bool] = (True, True),
        biases: bool = True,
        in_place: bool = False,
        backwards: bool = False,
    ) -> BackToBackOperands:
        """With an output of NaN, or one that holds the residual."""
        y = self.residual.copy() if in_place else poisoned(self.second.output_shape, self.first.precision)
        given: Any = self.biases if biases else (None, None)
        added = y if in_place else self.residual
        return BackToBackOperands(self.x, self.filters, given, added, y, relus, backwards=backwards)

    def configs(self) -> list[BackToBackConfig]:
        return list(back_to_back_candidates(self.pair, describe_device(0)))

    def launch(self, config: BackToBackConfig, **options: Any) -> Any:
        operands = self.operands(**options)
        launch_back_to_back(self.pair, operands, config)
        return operands.y


def wrong(y: Any, expected: Any) -> int:
    """Values that differ; NaN is wrong, and zeros are equal whatever their sign."""
    return int((loaded(y) != loaded(expected)).sum())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_on_integers(name: str, precision: str) -> None:
    first, K = PROBLEMS[name]
    case = Case(replace(first, precision=precision), K)
    expected = case.expected()
    for config in case.configs():
        for in_place, backwards in ((False, False), (True, True), (False, True), (True, False)):
            y = case.launch(config, in_place=in_place, backwards=backwards)
            assert not wrong(y, expected), f"{config}, {in_place=}, {backwards=}"


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("relus", RELUS)
@pytest.mark.parametrize("biases", [True, False])
def test_every_epilogue(precision: str, relus: tuple[bool, bool], biases: bool) -> None:
    for K in (64, 128, 256):
        case = Case(replace(PLAIN, K=K, precision=precision), 512)
        expected = case.expected(relus, biases)
        for config in case.configs():
            assert not wrong(case.launch(config, relus=relus, biases=biases), expected), config


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_nan_stays_where_it_is(precision: str) -> None:
    """In the window of the first convolution's input, and in a residual."""
    import cupy

    case = Case(replace(PLAIN, precision=precision), 256)
    case.x[0, 3, 4, 5] = stored(cupy.full(1, np.nan, np.float32), precision)[0]
    case.residual[1, 6, 8, 200] = stored(cupy.full(1, np.nan, np.float32), precision)[0]
    expected = np.zeros(case.second.output_shape, bool)
    expected[0, 2:5, 3:6] = True
    expected[1, 6, 8, 200] = True
    for config in case.configs():
        nan = cupy.isnan(loaded(case.launch(config))).get()
        np.testing.assert_array_equal(nan, expected)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("name", ["many tiles", "128 channels", "256 channels, many tiles"])
def test_as_two_launches_on_real_values(name: str, precision: str) -> None:
    """Sums in another order, and so now and then a middle value that is rounded the other way."""
    import cupy

    first, K = PROBLEMS[name]
    case = Case(replace(first, precision=precision), K)
    random = cupy.random.RandomState(0)

    def normal(shape: tuple[int, ...], scale: float = 1.0) -> Any:
        return stored(random.standard_normal(shape).astype(cupy.float32) * np.float32(scale), precision)

    case.x, case.residual = normal(case.first.input_shape), normal(case.second.output_shape)
    case.filters = (
        Filter(normal(case.first.filter_shape, case.first.gemm_k**-0.5)),
        Filter(normal(case.second.filter_shape, case.second.gemm_k**-0.5)),
    )
    middle, y = (poisoned(problem.output_shape, precision) for problem in (case.first, case.second))
    wgmma, device = VARIANTS["conv2d_wgmma"], describe_device(0)
    for problem, operands in (
        (case.first, Operands(case.x, case.filters[0], case.biases[0], None, middle, True)),
        (case.second, Operands(middle, case.filters[1], case.biases[1], case.residual, y, True)),
    ):
        wgmma.launch(problem, operands, wgmma.candidates(problem, device)[0])
    one = 2.0**-7 if precision == "bf16" else 2.0**-10  # of the last place, at 1
    for config in case.configs():
        actual = loaded(case.launch(config))
        cupy.testing.assert_allclose(actual, loaded(y), rtol=2 * one, atol=4 * one)
        if precision != "tf32":  # whose results have places enough for every order of a sum to show
            assert float((actual != loaded(y)).mean()) < 0.05


def test_in_tf32_what_is_between_is_rounded_and_what_is_stored_is_not() -> None:
    """Sums of integers with more bits than TF32 has."""
    import cupy

    case = Case(replace(PLAIN, N=9, precision="tf32"), 256)
    random = np.random.default_rng(1)
    case.x, case.filters = (
        cupy.asarray(random.integers(-16, 17, case.first.input_shape).astype(np.float32)),
        (Filter(case.filters[0].weight * 16), case.filters[1]),
    )
    middle = conv2d_float64(case.first, case.x, case.filters[0].weight) + case.biases[0]
    middle = cupy.maximum(middle, 0).astype(cupy.float32)
    rounded = to_tf32(middle)
    assert bool((rounded != middle).any())
    y = conv2d_float64(case.second, rounded, case.filters[1].weight) + case.biases[1] + case.residual
    expected = cupy.maximum(y, 0)
    assert float(abs(expected).max()) < 2**24  # so that every sum is exact
    assert bool((expected % 2 == 1).any())
    for config in case.configs():
        assert not wrong(case.launch(config), expected), config


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_in_a_graph_behind_itself(K: int, precision: str) -> None:
    """Launches that overlap: each takes what the one before has written as its residual, in the same place."""
    import cupy

    case = Case(replace(PLAIN, N=40, H=14, W=14, K=K, precision=precision), 256)
    for config in case.configs():
        operands = case.operands(in_place=True)
        expected = case.operands(in_place=True)
        launches = 3
        for _ in range(launches):
            launch_back_to_back(case.pair, expected, config)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            with jit.overlapping():
                for _ in range(launches):
                    launch_back_to_back(case.pair, operands, config)
            graph = stream.end_capture()
        for _ in range(3):
            operands.y[...] = case.residual
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert not wrong(operands.y, expected.y), config
