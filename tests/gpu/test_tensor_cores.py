"""Convolution in every precision on real values: as accurate as it says, and the same every time and at every place."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import conv_shapes

from cupy_resnet.conv2d import H100, PRECISIONS, VARIANTS, Conv2dProblem
from cupy_resnet.conv2d.configs import MMA, MMA_IN_CLUSTERS, MMA_PATCH, MMA_PATCH_IN_CLUSTERS, MmaConfig
from cupy_resnet.conv2d.heuristics import fastest
from cupy_resnet.conv2d.scratch import new_counters, scratch
from cupy_resnet.conv2d.tensor_core_variants import SPLIT_K_SLICES, HopperVariant
from cupy_resnet.conv2d.tf32_parts import nearest_tf32, split_tf32
from cupy_resnet.conv2d.variants import Filter, Operands
from cupy_resnet.conv2d.wgmma_3xtf32 import split_filter
from gpu.reference import (
    EXACT_UP_TO,
    PAIRS,
    as_torch,
    conv2d_float64,
    integer_case,
    loaded,
    poisoned,
    stored,
    tf32,
    to_tf32,
)

pytestmark = pytest.mark.gpu

REAL = {
    "7×7 stride 2": Conv2dProblem(N=4, H=64, W=64, C=3, K=64, R=7, S=7, stride_h=2, stride_w=2, pad_h=3, pad_w=3),
    "3×3": Conv2dProblem(N=4, H=28, W=28, C=128, K=128, R=3, S=3, pad_h=1, pad_w=1),
    "3×3 deep": Conv2dProblem(N=4, H=7, W=7, C=512, K=512, R=3, S=3, pad_h=1, pad_w=1),
    "1×1 wide": Conv2dProblem(N=4, H=14, W=14, C=1024, K=256, R=1, S=1),
    "3×3 groups": Conv2dProblem(N=4, H=14, W=14, C=256, K=256, R=3, S=3, pad_h=1, pad_w=1, groups=32),
}


class RealCase:
    """Normal deviates in a precision's storage, with outputs of order one, and results in float64.

    Filters are scaled by 1/√gemm_k: sums are then of order one, and so is what the default tolerances allow for them.
    In fp16 everything is a quarter of that. Tensor cores round sums toward zero, which over a depth of 4608 adds up to
    some 10⁻⁵ of them, as much as the absolute tolerance: near zero, where the relative one is no help, that has to fit.
    """

    def __init__(self, problem: Conv2dProblem, seed: int = 0) -> None:
        import cupy

        self.problem = problem
        random = cupy.random.RandomState(seed)
        order = 0.25 if problem.precision == "fp16" else 1.0

        def draw(shape: tuple[int, ...], scale: float) -> Any:
            return random.standard_normal(shape).astype(cupy.float32) * np.float32(scale)

        self.x = stored(draw(problem.input_shape, 1.0), problem.precision)
        self.weight = stored(draw(problem.filter_shape, order * problem.gemm_k**-0.5), problem.precision)
        self.filter = Filter(self.weight)
        self.bias = draw((problem.K,), order)
        self.residual = stored(draw(problem.output_shape, order), problem.precision)

    def float64(self, convolution: Any) -> Any:
        """Bias, residual and ReLU on top of a convolution in float64."""
        import cupy

        return cupy.maximum(convolution + self.bias + loaded(self.residual), 0)

    def launch(self, variant: str, config: Any, *, epilogue: bool = True) -> Any:
        """The kernel's result, in the storage dtype."""
        y = poisoned(self.problem.output_shape, self.problem.precision)
        bias, residual = (self.bias, self.residual) if epilogue else (None, None)
        VARIANTS[variant].launch(self.problem, Operands(self.x, self.filter, bias, residual, y, epilogue), config)
        return y

    def candidates(self, variant: str) -> Iterator[Any]:
        """Every configuration, none where the variant does not apply."""
        if VARIANTS[variant].supports(self.problem, H100)[0]:
            yield from VARIANTS[variant].candidates(self.problem, H100)


def norm(x: Any) -> float:
    """‖x‖ in float64."""
    import cupy

    return float(cupy.linalg.norm(x.astype(cupy.float64)))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "tf32"])
def test_close_to_float64_by_torchs_tolerances(precision: str, name: str) -> None:
    import torch

    problem = replace(REAL[name], precision=precision)
    case = RealCase(problem)
    expected = as_torch(stored(case.float64(conv2d_float64(problem, loaded(case.x), loaded(case.weight))), precision))
    for variant in (variant for variant, own in PAIRS if own == precision):
        for config in case.candidates(variant):
            actual = as_torch(case.launch(variant, config))
            torch.testing.assert_close(actual, expected, msg=lambda text, at=f"{variant} {config}": f"{at}: {text}")


@pytest.mark.parametrize("name", REAL)
def test_tf32_loses_what_its_operands_lose_and_no_more(name: str) -> None:
    """Against exact products of operands rounded to TF32 only the sums differ; against exact ones, 2⁻¹¹ per operand.

    Tensor cores round a sum toward zero once per 8 products: at most 2⁻²³ of it each time.
    """
    import cupy

    problem = replace(REAL[name], precision="tf32")
    case = RealCase(problem)
    steps = math.ceil(problem.gemm_k / 8) + 3  # and the epilogue's additions
    summed = steps * 2.0**-23
    of_rounded = case.float64(conv2d_float64(problem, to_tf32(case.x), to_tf32(case.weight)))
    exact = case.float64(conv2d_float64(problem, case.x, case.weight))
    magnitudes = conv2d_float64(problem, abs(case.x), abs(case.weight)) + abs(case.bias) + abs(case.residual)
    for variant in (variant for variant, own in PAIRS if own == "tf32"):
        for config in case.candidates(variant):
            y = case.launch(variant, config).astype(cupy.float64)
            error = norm(y - of_rounded) / norm(of_rounded)
            assert error < summed, f"{variant} {config}: {error:.2e} of the rounded operands' result, not {summed:.2e}"
            share = float((abs(y - exact) / magnitudes).max())
            allowed = 2.0**-10 + 2.0**-22 + summed
            assert share < allowed, f"{variant} {config}: off by {share:.2e} of an output's terms, not {allowed:.2e}"
            error = norm(y - exact) / norm(exact)
            assert error < 2.0**-11, f"{variant} {config}: relative error {error:.2e}"


def test_fp32_tc_is_as_accurate_as_cudnn_in_fp32(data_folder: Any) -> None:
    """‖y − y64‖ / ‖y64‖ of every ResNet-50 layer, normal data, against cuDNN with TF32 off on the same data."""
    import cupy
    import torch

    layers = {name: problem for name, problem in conv_shapes(data_folder).items() if ":resnet_50_v1_5:" in name}
    assert len(layers) == 23
    rows, worse = [], []
    with tf32(allowed=False):
        for name, fp32 in layers.items():
            problem = replace(fp32, precision="fp32-tc")
            case = RealCase(problem)
            exact = conv2d_float64(problem, case.x, case.weight)
            x, weight = (torch.from_dlpack(a).permute(0, 3, 1, 2).contiguous() for a in (case.x, case.weight))
            stride, padding = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
            y = torch.nn.functional.conv2d(x, weight, None, stride, padding).permute(0, 2, 3, 1).contiguous()
            torch.cuda.synchronize()
            cudnn = norm(cupy.from_dlpack(y) - exact) / norm(exact)
            config = fastest("conv2d_mma", problem, H100)[0]
            ours = norm(case.launch("conv2d_mma", config, epilogue=False) - exact) / norm(exact)
            rows.append(f"{name}: {ours:.3e}, cuDNN {cudnn:.3e} ({config})")
            if ours > cudnn:
                worse.append(name)
    assert not worse, f"{len(worse)} of 23 layers are less accurate: {worse}\n" + "\n".join(rows)


@pytest.mark.parametrize(("variant", "precision"), PAIRS)
def test_the_same_image_has_the_same_answer_at_every_place_and_every_time(variant: str, precision: str) -> None:
    """Bit for bit, whatever the other images are: 81 pixels an image, so that it meets tiles at different rows."""
    import cupy

    for C, K in ((256, 64), (13, 70)):
        problem = Conv2dProblem(N=7, H=9, W=9, C=C, K=K, R=3, S=3, pad_h=1, pad_w=1, precision=precision)
        case = RealCase(problem)
        case.x[3] = case.x[6] = case.x[0]
        case.residual[3] = case.residual[6] = case.residual[0]
        for config in case.candidates(variant):
            first = case.launch(variant, config).view(np.uint8)
            assert cupy.array_equal(first[0], first[3]), f"{variant} {config}: at place 3"
            assert cupy.array_equal(first[0], first[6]), f"{variant} {config}: at place 6"
            for _ in range(3):
                assert cupy.array_equal(case.launch(variant, config).view(np.uint8), first), f"{variant} {config}"


SPLIT = Conv2dProblem(N=2, H=7, W=7, C=128, K=72, R=3, S=3, pad_h=1, pad_w=1)
"""Deep enough in every precision for as many parts as there may be, with tiles of all sizes partly empty."""


NO_CLUSTERS = replace(H100, compute_capability=(8, 0))
"""As a GPU before them: all slices meet in the workspace."""

FORMS = {"conv2d_mma": (MMA, MMA_IN_CLUSTERS), "conv2d_mma_patch": (MMA_PATCH, MMA_PATCH_IN_CLUSTERS)}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32-tc"])
@pytest.mark.parametrize("variant", FORMS)
def test_every_tile_with_every_number_of_split_k_slices(variant: str, precision: str) -> None:
    """Exact, again and again, with two streams at it at once: no block may meet another launch's partial sums."""
    import cupy

    seen = set()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for shape in (SPLIT, replace(SPLIT, C=127, K=71)):
        problem = replace(shape, precision=precision)
        if not VARIANTS[variant].supports(problem, H100)[0]:
            continue
        case = integer_case(shape, EXACT_UP_TO[precision])
        x, residual, filter = (stored(a, precision) for a in (case.x, case.residual, case.weight))
        expected = case.expected(bias=True, residual=True, relu=True)
        cupy.cuda.Device().synchronize()  # the other streams read what this one wrote
        candidates = [c for gpu in (H100, NO_CLUSTERS) for c in VARIANTS[variant].candidates(problem, gpu)]
        for config in dict.fromkeys(candidates):
            assert isinstance(config, MmaConfig)
            seen.add(config)
            results = []
            for turn in range(4):
                with streams[turn % 2]:
                    results.append(poisoned(problem.output_shape, precision))
                    operands = Operands(x, Filter(filter), case.bias, residual, results[-1], True)
                    VARIANTS[variant].launch(problem, operands, config)
            cupy.cuda.Device().synchronize()
            right = [cupy.array_equal(loaded(y), expected) for y in results]
            assert all(right), f"{config}: right were {right}"
    tiles, clusters = ([form for form in forms if form.precision == precision] for forms in FORMS[variant])
    anywhere = {replace(tile, split_k_slices=slices) for tile in tiles for slices in (1, *SPLIT_K_SLICES)}
    assert seen == anywhere | set(clusters)


def test_counters_of_ones_own_are_left_at_zero() -> None:
    """What a captured graph relies on: it may be replayed for as long as its counters live."""
    import cupy

    problem = replace(SPLIT, precision="fp16")
    case = RealCase(problem)
    own = new_counters()
    with scratch(own):
        for config in case.candidates("conv2d_mma"):
            case.launch("conv2d_mma", config)
            assert not own.any(), config
    assert cupy.cuda.get_current_stream().done


@pytest.mark.parametrize("variant", [variant for variant, precision in PAIRS if precision == "tf32"])
def test_filters_rounded_to_tf32_beforehand_change_no_bit(variant: str) -> None:
    """Ties included where tensor memory accelerators round, which break them as `nearest_tf32` does; threads do not."""
    case = RealCase(replace(REAL["3×3"], precision="tf32"))
    bits = case.weight.view(np.uint32)
    ties = bits & np.uint32(0x1FFF) == 0x1000
    assert ties.any()
    if not isinstance(VARIANTS[variant], HopperVariant):
        bits += ties
    rounded = RealCase(case.problem)
    rounded.filter = Filter(nearest_tf32(case.weight))
    for config in case.candidates(variant):
        assert (case.launch(variant, config) == rounded.launch(variant, config)).all(), config


def test_the_last_bits_of_low_parts_are_not_looked_at() -> None:
    import cupy

    case = RealCase(replace(REAL["3×3"], precision="fp32-tc"))
    whole = RealCase(case.problem)
    whole.filter = Filter(whole.weight, {"3xtf32": cupy.stack(split_tf32(whole.weight))})
    for config in case.candidates("conv2d_wgmma_3xtf32"):
        assert (case.launch("conv2d_wgmma_3xtf32", config) == whole.launch("conv2d_wgmma_3xtf32", config)).all()
    assert (split_filter(case.filter) != split_filter(whole.filter)).any()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32-tc"])
def test_merged_groups_spread_a_nan_to_their_neighbours_and_no_further(precision: str) -> None:
    import cupy

    problem = Conv2dProblem(N=2, H=12, W=12, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, groups=16, precision=precision)
    case = integer_case(problem, EXACT_UP_TO[precision])
    case.x[0, 5, 6, 6] = cupy.nan  # in the second of 16 groups of 4 channels, of which 8 are computed as one
    x, filter = stored(case.x, precision), Filter(stored(case.weight, precision))
    merged = [c for c in VARIANTS["conv2d_mma"].candidates(problem, H100) if getattr(c, "merged_groups", 1) > 1]
    assert merged
    for config in merged:
        assert config.merged_groups == 8
        y = poisoned(problem.output_shape, precision)
        VARIANTS["conv2d_mma"].launch(problem, Operands(x, filter, None, None, y, False), config)
        expected = cupy.array(case.exact)
        expected[0, 4:7, 5:8, :32] = cupy.nan
        np.testing.assert_array_equal(cupy.asnumpy(loaded(y)), cupy.asnumpy(expected), err_msg=str(config))
