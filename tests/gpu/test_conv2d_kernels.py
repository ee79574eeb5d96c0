"""Every convolution kernel in each of its precisions: exact on small integers, with any epilogue and configuration."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import ConvCase, conv_cases, conv_shapes, torch_conv2d
from hypothesis import HealthCheck, assume, given, settings

from cupy_resnet import environment
from cupy_resnet.conv2d import H100, PRECISIONS, VARIANTS, Conv2dProblem
from cupy_resnet.conv2d.configs import WGMMA_PATCH, WGMMA_PATCH_SPLIT_K, WgmmaPatchConfig
from cupy_resnet.conv2d.heuristics import fastest
from cupy_resnet.conv2d.variants import Filter, Operands
from cupy_resnet.conv2d.wgmma_patch import patch_tile
from gpu.reference import EXACT_UP_TO, PAIRS, IntegerCase, conv2d_float64, integer_case, loaded, stored

pytestmark = pytest.mark.gpu

EPILOGUES = list(itertools.product((False, True), repeat=3))
SHAPES = conv_shapes(environment.test_data()) if environment.test_data().is_dir() else {}
EXACT = [pair for pair in PAIRS if pair[0] != "conv2d_winograd"]
"""Pairs that let a NaN reach exactly its receptive field (but see fp32-tc below)."""

NARROW = ("conv2d_winograd", "conv2d_mma_patch", "conv2d_wgmma", "conv2d_wgmma_patch", "conv2d_wgmma_3xtf32")
"""Variants that solve few problems."""

TENSOR_CORES = [pair for pair in PAIRS if PRECISIONS[pair[1]].tensor_cores]

drawn = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
drawn_wide = settings(drawn, max_examples=25)


class OnDevice:
    """An integer case in a precision's storage, guarded, with a guarded place for results."""

    def __init__(self, guarded: Any, problem: Conv2dProblem, case: IntegerCase) -> None:
        self.problem, self.case = problem, case
        storage = problem.arithmetic.storage
        self.x, self.weight, self.residual = (
            guarded(values.shape, stored(values, problem.precision), storage)
            for values in (case.x, case.weight, case.residual)
        )
        self.bias = guarded(case.bias.shape, case.bias)
        self.filter = Filter(self.weight.array)
        self.y = guarded(problem.output_shape, dtype=storage)

    def failures(
        self,
        variant: str,
        config: Any,
        expected: Any,
        *,
        bias: bool,
        residual: bool,
        relu: bool,
        backwards: bool = False,
    ) -> list[str]:
        """Launches a kernel and returns what is wrong with the result, in words; nothing if it is right."""
        import cupy

        self.y.poison()
        operands = Operands(
            self.x.array,
            self.filter,
            self.bias.array if bias else None,
            self.residual.array if residual else None,
            self.y.array,
            relu,
            backwards=backwards,
        )
        VARIANTS[variant].launch(self.problem, operands, config)
        case = f"{variant} {config}, {self.problem}, bias={bias} residual={residual} relu={relu} {backwards=}"
        found = []
        if not cupy.array_equal(loaded(self.y.array), expected):
            wrong = loaded(self.y.array) != expected
            found.append(f"{int(wrong.sum())} of {wrong.size} outputs are wrong: {case}")
        if not self.y.margins_intact():
            found.append(f"wrote outside its output: {case}")
        return found


@pytest.mark.parametrize("name", SHAPES)
def test_exact_on_small_integers_with_every_epilogue(name: str, guarded: Any) -> None:
    """Every variant that solves the shape, in every precision: all of one case, whose reference is computed once."""
    case = integer_case(SHAPES[name], EXACT_UP_TO["bf16"], seed=len(name))
    failures, launched = [], set()
    for precision in PRECISIONS:
        problem = replace(SHAPES[name], precision=precision)
        choices = dict.fromkeys(  # with merged groups and without, where there are groups
            (variant, fastest(variant, problem, H100, spread_nan)[0])
            for variant in VARIANTS
            for spread_nan in (False, True)
            if VARIANTS[variant].supports(problem, H100)[0]
        )
        launched |= {(variant, precision) for variant, _ in choices}
        on_device = OnDevice(guarded, problem, case)
        for bias, residual, relu in EPILOGUES:
            epilogue = {"bias": bias, "residual": residual, "relu": relu}
            expected = case.expected(**epilogue)
            for variant, config in choices:
                failures += on_device.failures(variant, config, expected, **epilogue)
        del on_device  # before the next takes as much memory
    assert not failures, "\n".join(failures)
    assert launched >= {pair for pair in PAIRS if pair[0] not in NARROW}


def in_reach(variant: str, problem: Conv2dProblem) -> Conv2dProblem:
    """A drawn problem, changed to one that the variant solves where it solves few of them."""
    if variant not in NARROW:
        return problem
    if variant in ("conv2d_wgmma", "conv2d_wgmma_3xtf32"):
        channels = 128 // problem.arithmetic.element_size
        C, K = -(-problem.C // channels) * channels, (problem.K + 7) // 8 * 8
        return replace(problem, groups=1, C=C, K=K)
    sizes = {"stride_h": 1, "stride_w": 1, "dilation_h": 1, "dilation_w": 1, "groups": 1}
    if variant == "conv2d_wgmma_patch":
        R, S = problem.R | 1, problem.S | 1
        size = problem.arithmetic.element_size
        sizes |= {"C": -(-problem.C * size // 128) * 128 // size, "K": -(-problem.K * size // 16) * 16 // size}
        sizes |= {"R": R, "S": S, "pad_h": R // 2, "pad_w": S // 2}
    if variant == "conv2d_mma_patch":
        sizes |= {"C": (problem.C + 7) // 8 * 8, "K": (problem.K + 7) // 8 * 8}
    problem = replace(problem, **sizes)
    if VARIANTS[variant].supports(problem, H100)[0]:
        return problem
    return replace(problem, R=3, S=3, H=problem.H + 2, W=problem.W + 2)


def check_every_configuration(guarded: Any, variant: str, problem: Conv2dProblem, case: ConvCase) -> None:
    integers = integer_case(problem, EXACT_UP_TO[problem.precision], seed=problem.flops % 1000)
    assert VARIANTS[variant].supports(problem, H100) == (True, "")
    on_device = OnDevice(guarded, problem, integers)
    epilogue = {"bias": case.bias, "residual": case.residual, "relu": case.relu}
    expected = integers.expected(**epilogue)
    failures = []
    for config in VARIANTS[variant].candidates(problem, H100):
        failures += on_device.failures(variant, config, expected, **epilogue)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("variant", "precision"), PAIRS)
@drawn
@given(case=conv_cases())
def test_every_configuration_on_drawn_shapes(variant: str, precision: str, case: ConvCase, guarded: Any) -> None:
    assume(case.problem.N > 0)
    problem = in_reach(variant, replace(case.problem, precision=precision))
    check_every_configuration(guarded, variant, problem, case)


@pytest.mark.parametrize(("variant", "precision"), TENSOR_CORES)
@drawn_wide
@given(case=conv_cases())
def test_every_aligned_configuration_on_drawn_shapes(
    variant: str, precision: str, case: ConvCase, guarded: Any
) -> None:
    """The same with channels and filters in multiples of 8, which few drawn shapes have."""
    p = case.problem
    assume(p.N > 0)
    problem = in_reach(variant, replace(p, C=8 * p.C, K=8 * p.K, precision=precision))
    check_every_configuration(guarded, variant, problem, case)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("variant", ["conv2d_wgmma", "conv2d_wgmma_patch"])
def test_blocks_may_take_their_tiles_from_the_last_one_on(variant: str, precision: str, guarded: Any) -> None:
    """Several of them each, of a number that blocks do not divide."""
    problem = Conv2dProblem(N=61, H=29, W=27, C=64, K=136, R=3, S=3, pad_h=1, pad_w=1, precision=precision)
    case = integer_case(problem, EXACT_UP_TO[precision])
    on_device = OnDevice(guarded, problem, case)
    configs = [config for config in VARIANTS[variant].candidates(problem, H100) if not config.cluster]
    assert configs
    failures = []
    for residual in (False, True):
        expected = case.expected(bias=True, residual=residual, relu=True)
        for config in configs:
            options = {"bias": True, "residual": residual, "relu": True, "backwards": True}
            failures += on_device.failures(variant, config, expected, **options)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("variant", "precision"), PAIRS)
def test_the_output_may_take_the_residuals_memory(variant: str, precision: str, guarded: Any) -> None:
    problem = Conv2dProblem(N=3, H=30, W=29, C=64, K=72, R=3, S=3, pad_h=1, pad_w=1, precision=precision)
    case = integer_case(problem, EXACT_UP_TO[precision])
    expected = case.expected(bias=True, residual=True, relu=True)
    on_device = OnDevice(guarded, problem, case)
    for config in VARIANTS[variant].candidates(problem, H100):
        on_device.y.array[...] = on_device.residual.array
        y = on_device.y.array
        operands = Operands(on_device.x.array, on_device.filter, on_device.bias.array, y, y, True)
        VARIANTS[variant].launch(problem, operands, config)
        assert bool((loaded(y) == expected).all()), config


@pytest.mark.parametrize(("all_forms", "filters"), [(WGMMA_PATCH, 16), (WGMMA_PATCH_SPLIT_K, 32)], ids=["", "split-K"])
@pytest.mark.parametrize("precision", VARIANTS["conv2d_wgmma_patch"].precisions)
def test_every_form_of_a_patch_on_resnets_maps(
    precision: str, all_forms: tuple[WgmmaPatchConfig, ...], filters: int, guarded: Any
) -> None:
    """Those that a narrower one of the same tile makes superfluous as well: tiles, images and filters in part empty.

    `filters` of the last tile are so many bytes: as few as a form takes. 576 channels no cluster can share out evenly.
    """
    forms = {config for config in all_forms if config.precision == precision}
    failures, launched = [], set()
    for size, C in ((56, 64), (28, 128), (14, 256), (7, 512), (7, 576)):
        for R in (1, 3):
            shape = Conv2dProblem(N=5, H=size, W=size, C=C, K=64, R=R, S=R, pad_h=R // 2, pad_w=R // 2)
            problem = replace(shape, K=64 + filters // PRECISIONS[precision].element_size, precision=precision)
            case = integer_case(problem, EXACT_UP_TO[precision], seed=size)
            on_device = OnDevice(guarded, problem, case)
            for config in sorted(forms, key=lambda config: config.pixels):
                limit, slices = H100.shared_memory_per_block, config.split_k_slices
                if patch_tile(problem, config.pixels, limit, slices) is None or C // config.channels < slices:
                    continue
                launched.add(config)
                for epilogue in EPILOGUES[::7]:  # none of it, and all
                    given = dict(zip(("bias", "residual", "relu"), epilogue, strict=True))
                    failures += on_device.failures("conv2d_wgmma_patch", config, case.expected(**given), **given)
    assert not failures, "\n".join(failures)
    assert launched == forms


def test_tf32_rounds_neither_the_residual_nor_the_output(guarded: Any) -> None:
    """Of a patch, whose operands the accelerator rounds: sums, biases and residuals of 24 bits."""
    import cupy

    problem = Conv2dProblem(N=3, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, precision="tf32")
    case = integer_case(problem, 2**12)
    large = cupy.arange(case.residual.size, dtype=cupy.float32).reshape(case.residual.shape) + np.float32(2**23 + 1)
    case = replace(case, residual=large, bias=case.bias + np.float32(2**13))
    on_device = OnDevice(guarded, problem, case)
    epilogue = {"bias": True, "residual": True, "relu": True}
    failures = []
    for config in VARIANTS["conv2d_wgmma_patch"].candidates(problem, H100):
        failures += on_device.failures("conv2d_wgmma_patch", config, case.expected(**epilogue), **epilogue)
    assert not failures, "\n".join(failures)


@drawn
@given(case=conv_cases())
def test_the_reference_is_torchs_convolution(case: ConvCase) -> None:
    import cupy

    assume(case.problem.N > 0)
    arrays = ConvCase(case.problem).arrays(exact=True)
    y = conv2d_float64(case.problem, cupy.asarray(arrays["x"]), cupy.asarray(arrays["weight"]))
    expected = torch_conv2d(arrays, ConvCase(case.problem).arguments)
    np.testing.assert_array_equal(cupy.asnumpy(y).astype(np.float32), expected)


@pytest.mark.parametrize(("variant", "precision"), EXACT)
def test_a_non_finite_pixel_reaches_exactly_its_receptive_field(variant: str, precision: str) -> None:
    import cupy

    for C, K in ((64, 16), (8, 16), (7, 9)):  # loaded by 128 bytes, by 16, and element by element
        problem = Conv2dProblem(N=2, H=12, W=12, C=C, K=K, R=3, S=3, pad_h=1, pad_w=1, precision=precision)
        case = ConvCase(problem, relu=True)
        for value in (np.nan, np.inf, -np.inf):
            arrays = case.arrays(exact=True)
            x = arrays["x"]
            assert x is not None
            x[0, 5, 6, 3] = value
            operand = stored(cupy.asarray(x), precision)
            if precision == "fp32-tc":  # splitting makes NaN of an infinite operand
                x[0, 5, 6, 3] = np.nan
            expected = torch_conv2d(arrays, case.arguments)
            assert not np.isfinite(expected[0, 4:7, 5:8]).all()
            assert np.isfinite(expected[1]).all()
            filter = Filter(stored(cupy.asarray(arrays["weight"]), precision))
            if not VARIANTS[variant].supports(problem, H100)[0]:
                assert C == 7 or variant.startswith("conv2d_wgmma")
                continue
            for config in VARIANTS[variant].candidates(problem, H100):
                y = cupy.empty(problem.output_shape, problem.arithmetic.storage)
                VARIANTS[variant].launch(problem, Operands(operand, filter, None, None, y, True), config)
                what = f"{variant} {config} {problem}, {value}"
                np.testing.assert_array_equal(cupy.asnumpy(loaded(y)), expected, err_msg=what)


def test_winograd_spreads_a_nan_over_its_tiles_and_no_further() -> None:
    import cupy

    problem = Conv2dProblem(N=2, H=12, W=12, C=8, K=16, R=3, S=3, pad_h=1, pad_w=1)
    case = ConvCase(problem)
    arrays = case.arrays(exact=True)
    clean = torch_conv2d(arrays, case.arguments)
    assert arrays["x"] is not None
    arrays["x"][0, 5, 6, 3] = np.nan
    y = cupy.empty(problem.output_shape, cupy.float32)
    operands = Operands(cupy.asarray(arrays["x"]), Filter(cupy.asarray(arrays["weight"])), None, None, y, False)
    VARIANTS["conv2d_winograd"].launch(problem, operands, fastest("conv2d_winograd", problem, H100)[0])
    # Output tile t covers outputs 2t, 2t+1 and reads inputs 2t−1 .. 2t+2: pixel (5, 6) lies in tiles 2 and 3 both ways.
    spread = np.zeros(problem.output_shape, bool)
    spread[0, 4:7, 5:8] = True  # the true receptive field
    result = cupy.asnumpy(y)
    assert np.isnan(result[spread]).all()
    spread[0, 4:8, 4:8] = True  # its tiles: one pixel beyond, on one side
    np.testing.assert_array_equal(result[~spread], clean[~spread])


LARGE = {
    "input beyond 2^31": Conv2dProblem(N=514, H=256, W=256, C=64, K=8, R=1, S=1, stride_h=4, stride_w=4),
    "input beyond 2^31, stride 1": Conv2dProblem(N=514, H=256, W=256, C=64, K=8, R=1, S=1),
    "output beyond 2^31": Conv2dProblem(N=514, H=256, W=256, C=8, K=64, R=1, S=1),
    "output beyond 2^31, unaligned": Conv2dProblem(N=514, H=256, W=256, C=4, K=64, R=1, S=1),
    "input beyond 2^31, unaligned": Conv2dProblem(N=514, H=256, W=256, C=64, K=4, R=1, S=1, stride_h=4, stride_w=4),
}


BEYOND = [
    (name, variant, precision)
    for name in LARGE
    for variant, precision in EXACT
    if precision == "fp16" or (precision == "fp32" and "unaligned" not in name and "stride 1" not in name)
    if VARIANTS[variant].supports(replace(LARGE[name], precision=precision), H100)[0]
]


@pytest.mark.parametrize(("name", "variant", "precision"), BEYOND)
def test_offsets_beyond_2_to_the_31(name: str, variant: str, precision: str) -> None:
    import cupy

    problem = replace(LARGE[name], precision=precision)
    assert max(np.prod(problem.input_shape, dtype=np.int64), np.prod(problem.output_shape, dtype=np.int64)) > 2**31
    storage = problem.arithmetic.storage
    x = cupy.zeros(problem.input_shape, storage)
    last = integer_case(replace(problem, N=1), EXACT_UP_TO[precision])
    x[-1:] = stored(last.x, precision)
    y = cupy.full(problem.output_shape, cupy.nan, storage)
    operands = Operands(x, Filter(stored(last.weight, precision)), None, None, y, False)
    VARIANTS[variant].launch(problem, operands, fastest(variant, problem, H100)[0])
    assert cupy.array_equal(loaded(y[-1:]), last.exact)
    assert not y[:-1].any()  # NaN would count as true
