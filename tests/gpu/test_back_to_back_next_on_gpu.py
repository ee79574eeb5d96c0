"""A bottleneck's end with the next one's beginning in one launch, against convolutions by taps in float64."""

from dataclasses import replace
from typing import Any

import pytest

from cupy_resnet.conv2d import Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import (
    BackToBackOperands,
    Following,
    back_to_back_candidates,
    launch_back_to_back,
)
from cupy_resnet.conv2d.variants import Filter
from cupy_resnet.engines.cuda_engine import describe_device
from gpu.reference import conv2d_float64, loaded, poisoned, stored, to_tf32

pytestmark = pytest.mark.gpu

PLAIN = Conv2dProblem(N=2, H=7, W=9, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
SHAPES = {
    "plain": (PLAIN, 256),
    "one pixel": (replace(PLAIN, N=1, H=1, W=1), 128),
    "uneven strides": (replace(PLAIN, N=5, H=15, W=13, stride_h=2, stride_w=3), 384),
    "pointwise": (replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0), 256),
    "full tiles": (replace(PLAIN, N=2, H=8, W=16), 256),
    "many tiles": (replace(PLAIN, N=64, H=29, W=27), 256),
    "many columns": (replace(PLAIN, C=192, N=9), 2048),
}


class Bottleneck:
    """Three convolutions on integers, few of the 1×1 filters' not 0, and what they should give."""

    def __init__(self, first: Conv2dProblem, K: int, next_channels: int) -> None:
        import cupy

        self.pair = Conv2dPair(first, K, following=next_channels)
        self.first, self.second, self.third = self.pair.parts
        self.device = describe_device(0)
        random = cupy.random.RandomState(K + next_channels)

        def integers(shape: tuple[int, ...], most: int = 1, share: float = 1.0) -> Any:
            values = random.randint(-most, most + 1, shape) * (random.random_sample(shape) < share)
            return stored(values.astype(cupy.float32), first.precision)

        self.x, self.residual = integers(first.input_shape), integers(self.second.output_shape, 9)
        shares = (1.0, 8 / first.K, 16 / K)
        self.problems = (self.first, self.second, self.third)
        self.weights = [integers(p.filter_shape, 1, share) for p, share in zip(self.problems, shares, strict=True)]
        self.biases = [random.randint(-9, 10, p.K).astype(cupy.float32) for p in self.problems]

    def expected(self, relus: tuple[bool, bool, bool]) -> list[Any]:
        import cupy

        outputs = [self.x]
        for problem, weight, bias, relu in zip(self.problems, self.weights, self.biases, relus, strict=True):
            x = to_tf32(loaded(outputs[-1])) if problem.precision == "tf32" else loaded(outputs[-1])
            y = conv2d_float64(problem, x, loaded(weight)) + bias
            y = y + loaded(self.residual) if problem is self.second else y
            outputs.append(stored(cupy.maximum(y, 0) if relu else y, problem.precision))
        return outputs[2:]

    def outputs(self, config: Any, relus: tuple[bool, bool, bool], *, in_place: bool) -> list[Any]:
        precision = self.first.precision
        y = self.residual.copy() if in_place else poisoned(self.second.output_shape, precision)
        z = poisoned(self.third.output_shape, precision)
        first, second, third = (Filter(weight) for weight in self.weights)
        operands = BackToBackOperands(
            self.x,
            (first, second),
            (self.biases[0], self.biases[1]),
            y if in_place else self.residual,
            y,
            relus[:2],
            following=Following(third, self.biases[2], relus[2], z),
        )
        launch_back_to_back(self.pair, operands, config)
        return [y, z]


@pytest.mark.parametrize(
    ("precision", "K", "next_channels"),
    [(precision, *sizes) for precision in ("fp16", "bf16", "tf32") for sizes in ((64, 64), (64, 128), (128, 128))],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_exact_on_integers(shape: str, K: int, next_channels: int, precision: str) -> None:
    first, columns = SHAPES[shape]
    case = Bottleneck(replace(first, K=K, precision=precision), columns, next_channels)
    configs = back_to_back_candidates(case.pair, case.device)
    if not configs:
        pytest.skip("runs on compute capability 9.0 only")
    for relus in ((True, True, True), (False, True, False)):
        right = [loaded(output) for output in case.expected(relus)]
        for config in configs:
            for in_place in (False, True, False, False, False):  # several times: a race would show itself
                found = [loaded(output) for output in case.outputs(config, relus, in_place=in_place)]
                for output, wanted in zip(found, right, strict=True):
                    assert bool((output == wanted).all()), (str(config), in_place)
