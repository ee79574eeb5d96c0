"""A bottleneck's end that adds a shortcut, and the next one's beginning, against convolutions by taps in float64."""

from dataclasses import replace
from typing import Any

import pytest

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import (
    BackToBackOperands,
    Following,
    back_to_back_candidates,
    configurations,
    launch_back_to_back,
)
from cupy_resnet.conv2d.variants import Filter, Shortcut
from cupy_resnet.engines.cuda_engine import describe_device
from gpu.reference import conv2d_float64, loaded, poisoned, stored

pytestmark = pytest.mark.gpu

PLAIN = Conv2dProblem(N=2, H=7, W=9, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
SHAPES = {  # the first, and the step of the shortcut
    "plain": (PLAIN, 1),
    "one pixel": (replace(PLAIN, N=1, H=1, W=1), 1),
    "of all second pixels": (replace(PLAIN, N=5, H=15, W=13, stride_h=2, stride_w=2), 2),
    "of all third pixels": (replace(PLAIN, N=5, H=15, W=13, stride_h=2, stride_w=3), 3),
    "pointwise": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0), 1),
    "full tiles": (replace(PLAIN, N=2, H=8, W=16), 1),
    "many tiles": (replace(PLAIN, N=64, H=29, W=27), 1),
    "deep": (replace(PLAIN, C=192, N=9), 2),
}
FORMS = sorted(
    {
        (c.precision, c.mid_channels, c.shortcut_channels, c.next_channels)
        for c in configurations()
        if c.shortcut_channels
    }
)


class Case:
    """Up to three convolutions and a shortcut on integers, few of the 1×1 filters' not 0, and what they should give."""

    def __init__(self, pair: Conv2dPair) -> None:
        import cupy

        self.pair = pair
        second = pair.second
        N, H, W, C = second.shortcut_shape
        less = second.shortcut_stride - 1  # the last rows and columns are behind all that an output wants
        self.shortcut = second.shortcut_alone((N, H - less, W - less, C))
        random = cupy.random.RandomState(pair.K + pair.following)

        def integers(shape: tuple[int, ...], most: int = 1, share: float = 1.0) -> Any:
            values = random.randint(-most, most + 1, shape) * (random.random_sample(shape) < share)
            return stored(values.astype(cupy.float32), pair.precision)

        self.x, self.x0 = integers(pair.first.input_shape), integers(self.shortcut.input_shape, 3)
        shares = (1.0, 8 / pair.first.K, 16 / pair.K)
        self.weights = [integers(p.filter_shape, 1, share) for p, share in zip(pair.parts, shares, strict=False)]
        self.weight0 = integers(self.shortcut.filter_shape, 1, 8 / C)
        self.biases = [random.randint(-9, 10, p.K).astype(cupy.float32) for p in pair.parts]

    def expected(self, relus: tuple[bool, ...]) -> list[Any]:
        import cupy

        outputs = [self.x]
        for problem, weight, bias, relu in zip(self.pair.parts, self.weights, self.biases, relus, strict=False):
            y = conv2d_float64(problem.without_shortcut(), loaded(outputs[-1]), loaded(weight)) + bias
            if problem.shortcut_channels:
                y = y + conv2d_float64(self.shortcut, loaded(self.x0), loaded(self.weight0))
            outputs.append(stored(cupy.maximum(y, 0) if relu else y, problem.precision))
        return outputs[2:]

    def outputs(self, config: Any, relus: tuple[bool, ...]) -> list[Any]:
        pair, following = self.pair, None
        y = poisoned(pair.output_shape, pair.precision)
        first, second, *third = (Filter(weight) for weight in self.weights)
        if pair.third is not None:
            z = poisoned(pair.third.output_shape, pair.precision)
            following = Following(third[0], self.biases[2], relus[2], z)
        operands = BackToBackOperands(
            self.x,
            (first, second),
            (self.biases[0], self.biases[1]),
            None,
            y,
            (relus[0], relus[1]),
            shortcut=Shortcut(self.x0, Filter(self.weight0)),
            following=following,
        )
        launch_back_to_back(pair, operands, config)
        return [y] if following is None else [y, following.z]


@pytest.mark.parametrize(("precision", "K", "shortcut", "following"), FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_on_integers(shape: str, K: int, shortcut: int, following: int, precision: str) -> None:
    first, stride = SHAPES[shape]
    first = replace(first, K=K, precision=precision)
    for filters in (256, 384):
        case = Case(Conv2dPair(first, filters, shortcut, stride, following))
        configs = back_to_back_candidates(case.pair, describe_device(0))
        if not configs and describe_device(0).compute_capability != (9, 0):
            pytest.skip("runs on compute capability 9.0 only")
        for relus in ((True, True, True), (False, True, False)):
            right = [loaded(output) for output in case.expected(relus)]
            for config in configs:
                for _ in range(4):  # a race would show itself
                    found = [loaded(output) for output in case.outputs(config, relus)]
                    for output, wanted in zip(found, right, strict=True):
                        assert bool((output == wanted).all()), str(config)
