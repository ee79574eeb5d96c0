"""Every convolution kernel: exact on small integers with every epilogue, and close to float64 on real values."""

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from helpers import ConvCase, conv_cases, conv_shapes, torch_conv2d
from hypothesis import HealthCheck, assume, given, settings

from cupy_resnet import environment
from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, choose
from cupy_resnet.conv2d.variants import Filter, Operands
from gpu.reference import conv2d_float64

pytestmark = pytest.mark.gpu

EPILOGUES = list(itertools.product((False, True), repeat=3))
SHAPES = conv_shapes(environment.test_data()) if environment.test_data().is_dir() else {}
SUPPORTED = [
    (name, variant)
    for name, problem in SHAPES.items()
    for variant in VARIANTS
    if VARIANTS[variant].supports(problem, H100)[0]
]


@lru_cache(maxsize=1)  # tests come shape by shape
def integer_case(name: str) -> tuple[Any, ...]:
    """x, weight, bias, residual of small integers on the GPU, and the convolution without epilogue, exact."""
    import cupy

    problem = SHAPES[name]
    random = cupy.random.RandomState(len(name))
    shapes = (problem.input_shape, problem.filter_shape, (problem.K,), problem.output_shape)
    x, weight, bias, residual = (random.randint(-2, 3, shape).astype(cupy.float32) for shape in shapes)
    exact = conv2d_float64(problem, x, weight).astype(cupy.float32)
    return x, weight, bias, residual, exact


@pytest.mark.parametrize(("name", "variant"), SUPPORTED)
def test_exact_on_small_integers_with_every_epilogue(name: str, variant: str, guarded: Any) -> None:
    import cupy

    problem = SHAPES[name]
    x, weight, bias, residual, exact = integer_case(name)
    x, weight = guarded(x.shape, x), guarded(weight.shape, weight)
    filter = Filter(weight.array)
    config = choose(problem, H100, variant).config
    y = guarded(problem.output_shape)
    for with_bias, with_residual, relu in EPILOGUES:
        y.memory.fill(cupy.nan)
        operands = Operands(
            x.array, filter, bias if with_bias else None, residual if with_residual else None, y.array, relu
        )
        VARIANTS[variant].launch(problem, operands, config)
        expected = exact + bias if with_bias else exact
        expected = expected + residual if with_residual else expected
        expected = cupy.maximum(expected, 0) if relu else expected
        epilogue = f"bias={with_bias} residual={with_residual} relu={relu}"
        assert cupy.array_equal(y.array, expected), f"{variant} {config}, {problem}, {epilogue}"
        assert y.margins_intact(), f"{variant} {config} wrote outside its output: {problem}"


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=conv_cases())
def test_every_configuration_on_drawn_shapes(variant: str, case: ConvCase, guarded: Any) -> None:
    import cupy

    problem = case.problem
    if variant == "conv2d_winograd":  # few drawn shapes are its own: make them so
        sizes = {**problem.__dict__, "R": 3, "S": 3, "stride_h": 1, "stride_w": 1, "dilation_h": 1, "dilation_w": 1}
        groups = problem.groups
        sizes |= {"groups": 1, "H": problem.H + 2, "W": problem.W + 2, "C": problem.C * groups}
        problem = Conv2dProblem(**sizes)
        case = ConvCase(problem, case.bias, case.residual, case.relu)
    assume(problem.N > 0)
    arrays = case.arrays(exact=True)
    expected = torch_conv2d(arrays, case.arguments)
    device = {k: None if v is None else guarded(v.shape, cupy.asarray(v)).array for k, v in arrays.items()}
    for config in VARIANTS[variant].candidates(problem, H100):
        y = guarded(problem.output_shape)
        operands = Operands(
            device["x"], Filter(device["weight"]), device["bias"], device["residual"], y.array, case.relu
        )
        VARIANTS[variant].launch(problem, operands, config)
        np.testing.assert_array_equal(cupy.asnumpy(y.array), expected, err_msg=f"{variant} {config} {problem}")
        assert y.margins_intact()


REAL = {
    "7×7 stride 2": Conv2dProblem(N=4, H=64, W=64, C=3, K=64, R=7, S=7, stride_h=2, stride_w=2, pad_h=3, pad_w=3),
    "3×3": Conv2dProblem(N=4, H=28, W=28, C=128, K=128, R=3, S=3, pad_h=1, pad_w=1),
    "3×3 deep": Conv2dProblem(N=4, H=7, W=7, C=512, K=512, R=3, S=3, pad_h=1, pad_w=1),
    "1×1 wide": Conv2dProblem(N=4, H=14, W=14, C=1024, K=256, R=1, S=1),
    "3×3 groups": Conv2dProblem(N=4, H=14, W=14, C=256, K=256, R=3, S=3, pad_h=1, pad_w=1, groups=32),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_close_to_float64_on_real_values(variant: str, name: str) -> None:
    import cupy
    import torch

    problem = REAL[name]
    if not VARIANTS[variant].supports(problem, H100)[0]:
        assert variant == "conv2d_winograd"
        return
    case = ConvCase(problem, bias=True, residual=True, relu=True)
    arrays = case.arrays(exact=False)
    expected = torch_conv2d(arrays, case.arguments)
    x, weight, bias, residual = (cupy.asarray(arrays[k]) for k in ("x", "weight", "bias", "residual"))
    for config in VARIANTS[variant].candidates(problem, H100):
        y = cupy.full(problem.output_shape, cupy.nan, cupy.float32)
        VARIANTS[variant].launch(problem, Operands(x, Filter(weight), bias, residual, y, True), config)
        torch.testing.assert_close(torch.from_numpy(cupy.asnumpy(y)), torch.from_numpy(expected))


@pytest.mark.parametrize("variant", VARIANTS)
def test_repeated_runs_agree_bit_for_bit(variant: str) -> None:
    import cupy

    problem = REAL["3×3"]
    arrays = ConvCase(problem).arrays(exact=False)
    x, weight = cupy.asarray(arrays["x"]), cupy.asarray(arrays["weight"])
    config = choose(problem, H100, variant).config
    results = []
    for _ in range(3):
        y = cupy.empty(problem.output_shape, cupy.float32)
        VARIANTS[variant].launch(problem, Operands(x, Filter(weight), None, None, y, False), config)
        results.append(y)
    assert all(cupy.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "conv2d_winograd"])
def test_a_non_finite_pixel_reaches_exactly_its_receptive_field(variant: str, value: float) -> None:
    import cupy

    problem = Conv2dProblem(N=2, H=12, W=12, C=8, K=16, R=3, S=3, pad_h=1, pad_w=1)
    case = ConvCase(problem, relu=True)
    arrays = case.arrays(exact=True)
    arrays["x"][0, 5, 6, 3] = value
    expected = torch_conv2d(arrays, case.arguments)
    y = cupy.empty(problem.output_shape, cupy.float32)
    operands = Operands(cupy.asarray(arrays["x"]), Filter(cupy.asarray(arrays["weight"])), None, None, y, True)
    VARIANTS[variant].launch(problem, operands, choose(problem, H100, variant).config)
    np.testing.assert_array_equal(cupy.asnumpy(y), expected)


def test_winograd_spreads_a_nan_over_its_tiles_and_no_further() -> None:
    import cupy

    problem = Conv2dProblem(N=2, H=12, W=12, C=8, K=16, R=3, S=3, pad_h=1, pad_w=1)
    case = ConvCase(problem)
    arrays = case.arrays(exact=True)
    clean = torch_conv2d(arrays, case.arguments)
    arrays["x"][0, 5, 6, 3] = np.nan
    y = cupy.empty(problem.output_shape, cupy.float32)
    operands = Operands(cupy.asarray(arrays["x"]), Filter(cupy.asarray(arrays["weight"])), None, None, y, False)
    VARIANTS["conv2d_winograd"].launch(problem, operands, choose(problem, H100, "conv2d_winograd").config)
    # Output tile t covers outputs 2t, 2t+1 and reads inputs 2t−1 .. 2t+2: pixel (5, 6) lies in tiles 2 and 3 both ways.
    spread = np.zeros(problem.output_shape, bool)
    spread[0, 4:7, 5:8] = True  # the true receptive field
    result = cupy.asnumpy(y)
    assert np.isnan(result[spread]).all()
    spread[0, 4:8, 4:8] = True  # its tiles: one pixel beyond, on one side
    np.testing.assert_array_equal(result[~spread], clean[~spread])


LARGE = {
    "input beyond 2^31": Conv2dProblem(N=514, H=256, W=256, C=64, K=4, R=1, S=1, stride_h=4, stride_w=4),
    "output beyond 2^31": Conv2dProblem(N=514, H=256, W=256, C=4, K=64, R=1, S=1),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "conv2d_winograd"])
def test_offsets_beyond_2_to_the_31(variant: str, name: str) -> None:
    import cupy

    problem = LARGE[name]
    assert max(np.prod(problem.input_shape, dtype=np.int64), np.prod(problem.output_shape, dtype=np.int64)) > 2**31
    x = cupy.zeros(problem.input_shape, cupy.float32)
    x[-1] = cupy.random.randint(-2, 3, problem.input_shape[1:])
    weight = cupy.random.randint(-2, 3, problem.filter_shape).astype(cupy.float32)
    y = cupy.full(problem.output_shape, cupy.nan, cupy.float32)
    VARIANTS[variant].launch(
        problem, Operands(x, Filter(weight), None, None, y, False), choose(problem, H100, variant).config
    )
    last = Conv2dProblem(**{**problem.__dict__, "N": 1})
    assert cupy.array_equal(y[-1:], conv2d_float64(last, x[-1:], weight).astype(cupy.float32))
    assert not y[:-1].any()  # NaN would count as true
