"""Which kernel solves what, frozen, and how one is chosen: no GPU is needed for either."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers import conv_shapes

from cupy_resnet.conv2d import H100, PRECISIONS, VARIANTS, Conv2dProblem, Device, heuristics, variant_names
from cupy_resnet.conv2d.configs import MmaConfig, Wgmma3xTf32Config, WgmmaConfig, WgmmaPatchConfig, WinogradConfig
from cupy_resnet.conv2d.heuristics import cost, fastest
from cupy_resnet.conv2d.tensor_core_variants import as_merged, is_aligned, shared_memory
from cupy_resnet.conv2d.wgmma_patch import patch_tile
from cupy_resnet.errors import UnsupportedProblemError


def device(name: str, capability: tuple[int, int], sm_count: int, shared_kilobytes: int) -> Device:
    return Device(
        name=name, compute_capability=capability, sm_count=sm_count, shared_memory_per_block=shared_kilobytes << 10
    )


GTX1080 = device("GTX 1080", (6, 1), 20, 48)
V100 = device("V100", (7, 0), 80, 96)
T4 = device("T4", (7, 5), 40, 64)
A100 = device("A100", (8, 0), 108, 163)
A10 = device("A10", (8, 6), 72, 99)
B200 = device("B200", (10, 0), 148, 227)
DEVICES = (V100, T4, A100, A10, H100, B200)
GENERAL = ("conv2d_direct", "conv2d_shared", "im2col_sgemm", "conv2d_implicit_gemm")
TENSOR_CORES = ("conv2d_wmma", "conv2d_mma")
"""What solves every problem, in fp32 and on tensor cores."""
NARROW = ("conv2d_mma_patch", "conv2d_wgmma", "conv2d_wgmma_patch", "conv2d_wgmma_3xtf32")
"""What solves some problems on tensor cores."""

PLAIN = Conv2dProblem(N=2, H=14, W=14, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
PROBLEMS = {
    "plain 3×3": PLAIN,
    "no padding": replace(PLAIN, pad_h=0, pad_w=0),
    "uneven padding": replace(PLAIN, pad_h=0, pad_w=1),
    "padding larger than the filter": replace(PLAIN, pad_h=5, pad_w=4),
    "odd channels": replace(PLAIN, C=3, K=17),
    "one channel": replace(PLAIN, C=1, K=1),
    "1×1 image": replace(PLAIN, H=1, W=1),
    "empty batch": replace(PLAIN, N=0),
    "1×1": replace(PLAIN, R=1, S=1, pad_h=0, pad_w=0),
    "5×5": replace(PLAIN, R=5, S=5, pad_h=2, pad_w=2),
    "3×1": replace(PLAIN, S=1, pad_w=0),
    "1×3": replace(PLAIN, R=1, pad_h=0),
    "stem": Conv2dProblem(N=2, H=224, W=224, C=3, K=64, R=7, S=7, stride_h=2, stride_w=2, pad_h=3, pad_w=3),
    "stride 2": replace(PLAIN, stride_h=2, stride_w=2),
    "stride 1×2": replace(PLAIN, stride_w=2),
    "dilation 2": replace(PLAIN, dilation_h=2, dilation_w=2),
    "dilation 2×1": replace(PLAIN, dilation_h=2),
    "grouped": replace(PLAIN, groups=4),
    "depthwise": replace(PLAIN, groups=64),
    "strided, dilated, grouped": replace(PLAIN, stride_h=3, dilation_w=2, groups=2),
}

MINIMUM = {
    # variant: precision: lowest compute capability
    "conv2d_direct": {"fp32": (7, 0)},
    "conv2d_shared": {"fp32": (7, 0)},
    "im2col_sgemm": {"fp32": (7, 0)},
    "conv2d_implicit_gemm": {"fp32": (7, 0)},
    "conv2d_winograd": {"fp32": (8, 0)},
    "conv2d_wmma": {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0)},
    "conv2d_mma": {"fp16": (8, 0), "bf16": (8, 0), "tf32": (8, 0), "fp32-tc": (8, 0)},
    "conv2d_mma_patch": {"fp16": (8, 0), "bf16": (8, 0), "tf32": (8, 0), "fp32-tc": (8, 0)},
    "conv2d_wgmma": {"fp16": (9, 0), "bf16": (9, 0), "tf32": (9, 0)},
    "conv2d_wgmma_patch": {"fp16": (9, 0), "bf16": (9, 0), "tf32": (9, 0)},
    "conv2d_wgmma_3xtf32": {"fp32-tc": (9, 0)},
}
"""The frozen matrix: a refusal that is written neither here nor in WINOGRAD and REFUSED is a fault."""

NO_OTHER = {"conv2d_wgmma", "conv2d_wgmma_patch", "conv2d_wgmma_3xtf32"}
"""Of these, whose instructions later architectures do not have: the lowest compute capability is the only one."""

WINOGRAD = {
    # problem: why not, whatever the GPU; the problems that are not here it solves
    "1×1": "transforms 3×3 filters, not 1×1",
    "5×5": "transforms 3×3 filters, not 5×5",
    "3×1": "transforms 3×3 filters, not 3×1",
    "1×3": "transforms 3×3 filters, not 1×3",
    "stem": "transforms 3×3 filters, not 7×7",
    "stride 2": "needs stride 1, not 2×2",
    "stride 1×2": "needs stride 1, not 1×2",
    "dilation 2": "needs dilation 1, not 2×2",
    "dilation 2×1": "needs dilation 1, not 2×1",
    "grouped": "needs groups 1, not 4",
    "depthwise": "needs groups 1, not 64",
    "strided, dilated, grouped": "needs stride 1, not 3×1",
}

PATCH = {
    # problem: why conv2d_mma_patch does not solve it, in any precision on any GPU with tensor cores for it
    "odd channels": "needs C a multiple of ",
    "one channel": "needs C a multiple of ",
    "stem": "needs stride 1, not 2×2",
    "stride 2": "needs stride 1, not 2×2",
    "stride 1×2": "needs stride 1, not 1×2",
    "dilation 2": "needs dilation 1, not 2×2",
    "dilation 2×1": "needs dilation 1, not 2×1",
    "grouped": "needs groups 1, not 4",
    "depthwise": "needs groups 1, not 64",
    "strided, dilated, grouped": "needs stride 1, not 3×1",
}
"""Besides, 1×1 filters over more than 64 channels in fp32-tc."""

WGMMA = {
    # problem: why conv2d_wgmma and conv2d_wgmma_3xtf32 do not solve it, in any precision on Hopper
    "odd channels": "needs C a multiple of ",
    "one channel": "needs C a multiple of ",
    "stem": "needs C a multiple of ",
    "grouped": "needs groups 1, not 4",
    "depthwise": "needs groups 1, not 64",
    "strided, dilated, grouped": "needs groups 1, not 2",
}

SIZES = ("no padding", "uneven padding", "padding larger than the filter")
STEPS = ("stem", "stride 2", "stride 1×2", "dilation 2", "dilation 2×1")
WGMMA_PATCH = {
    **WGMMA,
    **dict.fromkeys(SIZES, "needs a padding that keeps the size with a filter of 3×3"),
    **dict.fromkeys(STEPS, "needs stride 1 and dilation 1"),
}
REFUSED = dict(zip(NARROW, (PATCH, WGMMA, WGMMA_PATCH, WGMMA), strict=True))

choose = partial(heuristics.choose, use_tables=False)
"""By the model alone: what was measured on the machine at hand must not decide a test."""


def solves(variant: str, precision: str, gpu: Device) -> bool:
    """What `MINIMUM` says."""
    minimum = MINIMUM[variant].get(precision)
    if minimum is None:
        return False
    return gpu.compute_capability == minimum or (gpu.compute_capability > minimum and variant not in NO_OTHER)


def test_the_ladder_from_the_bottom() -> None:
    assert variant_names() == [*GENERAL, "conv2d_winograd", *TENSOR_CORES, *NARROW]
    assert list(MINIMUM) == variant_names()
    assert all(VARIANTS[name].name == name for name in VARIANTS)
    assert {precision for row in MINIMUM.values() for precision in row} == set(PRECISIONS)


@pytest.mark.parametrize("name", PROBLEMS)
def test_frozen_support(name: str) -> None:
    for variant in MINIMUM:
        for precision in PRECISIONS:
            for gpu in DEVICES:
                supported, reason = VARIANTS[variant].supports(replace(PROBLEMS[name], precision=precision), gpu)
                expected = solves(variant, precision, gpu)
                if variant == "conv2d_winograd" and name in WINOGRAD:
                    assert (supported, reason) == (False, WINOGRAD[name]), f"{precision} on {gpu.name}"
                elif name in REFUSED.get(variant, {}):
                    why_not = REFUSED[variant][name]
                    assert supported is False, f"{variant}, {precision} on {gpu.name}"
                    assert reason.startswith(why_not) or not expected, f"{variant}, {precision} on {gpu.name}: {reason}"
                else:
                    assert supported is expected, f"{variant}, {precision} on {gpu.name}: {reason}"
                    assert bool(reason) is not expected, f"{variant}, {precision} on {gpu.name}: {reason}"


@pytest.mark.parametrize(
    ("variant", "precision", "gpu", "reason"),
    [
        ("conv2d_direct", "fp16", H100, "computes in fp32, not in fp16"),
        ("conv2d_winograd", "tf32", H100, "computes in fp32, not in tf32"),
        ("conv2d_winograd", "fp32", T4, "needs compute capability 8.0, T4 has 7"),
        ("conv2d_wmma", "fp32", H100, "computes in fp16 or bf16 or tf32, not in fp32"),
        ("conv2d_wmma", "fp32-tc", H100, "computes in fp16 or bf16 or tf32, not in fp32-tc"),
        ("conv2d_wmma", "bf16", V100, "needs compute capability 8.0 for bf16, V100 has 7.0"),
        ("conv2d_wmma", "tf32", T4, "needs compute capability 8.0 for tf32, T4 has 7.5"),
        ("conv2d_mma", "fp16", T4, "needs compute capability 8.0, T4 has 7.5"),
        ("conv2d_mma", "fp32", H100, "computes in fp16 or bf16 or tf32 or fp32-tc, not in fp32"),
        ("conv2d_mma_patch", "bf16", T4, "needs compute capability 8.0, T4 has 7.5"),
        ("conv2d_mma_patch", "fp32", H100, "computes in fp16 or bf16 or tf32 or fp32-tc, not in fp32"),
        ("conv2d_wgmma", "fp16", T4, "needs compute capability 9.0, T4 has 7.5"),
        ("conv2d_wgmma", "tf32", A100, "needs compute capability 9.0, A100 has 8.0"),
        ("conv2d_wgmma", "bf16", B200, "needs compute capability 9.0, B200 has 10.0"),
        ("conv2d_wgmma", "fp32", H100, "computes in fp16 or bf16 or tf32, not in fp32"),
        ("conv2d_wgmma", "fp32-tc", H100, "computes in fp16 or bf16 or tf32, not in fp32-tc"),
        ("conv2d_wgmma_patch", "fp16", A100, "needs compute capability 9.0, A100 has 8.0"),
        ("conv2d_wgmma_patch", "bf16", B200, "needs compute capability 9.0, B200 has 10.0"),
        ("conv2d_wgmma_patch", "fp32-tc", H100, "computes in fp16 or bf16 or tf32, not in fp32-tc"),
    ],
)
def test_why_not(variant: str, precision: str, gpu: Device, reason: str) -> None:
    supported, why_not = VARIANTS[variant].supports(replace(PLAIN, precision=precision), gpu)
    assert supported is False
    assert why_not.startswith(reason)


@pytest.mark.parametrize("variant", MINIMUM)
def test_what_no_kernel_does_is_refused_by_name(variant: str) -> None:
    for precision in MINIMUM[variant]:
        problem = replace(PLAIN, precision=precision)
        too_many_pixels = VARIANTS[variant].supports(replace(problem, N=2**24), H100)
        assert too_many_pixels[0] is False
        assert too_many_pixels[1].startswith("output pixels N·P·Q = ")
        old = VARIANTS[variant].supports(problem, GTX1080)
        assert old[0] is False
        assert old[1].startswith("needs compute capability ")


def test_winograd_tells_how_much_shared_memory_is_missing() -> None:
    small = replace(A100, name="small", shared_memory_per_block=48 << 10)
    supported, reason = VARIANTS["conv2d_winograd"].supports(PLAIN, small)
    assert not supported
    assert reason == "needs 98304 bytes of shared memory per block, small has 49152"


def test_every_row_of_conv_shapes(data_folder: Path) -> None:
    problems = conv_shapes(data_folder)
    assert len(problems) == 166
    by_wgmma = by_wgmma_patch = 0
    for name, fp32 in problems.items():
        for precision in PRECISIONS:
            p = replace(fp32, precision=precision)
            for gpu in DEVICES:
                for variant in (*GENERAL, *TENSOR_CORES):
                    expected = solves(variant, precision, gpu)
                    assert VARIANTS[variant].supports(p, gpu)[0] is expected, f"{name}: {variant} on {gpu.name}"
            dense = (p.stride_h, p.stride_w, p.dilation_h, p.dilation_w, p.groups) == (1, 1, 1, 1, 1)
            winograd = dense and (p.R, p.S) == (3, 3) and precision == "fp32"
            assert VARIANTS["conv2d_winograd"].supports(p, H100)[0] == winograd, name
            patch = dense and solves("conv2d_mma_patch", precision, H100) and is_aligned(p)
            # Its shortest pipeline in fp32-tc has three stages, of which the filter of one tap fills too few in time.
            patch &= precision != "fp32-tc" or p.R * p.S > 1 or p.C <= 64
            assert VARIANTS["conv2d_mma_patch"].supports(p, H100)[0] == patch, name
            # No row has strides, filters or padding that are too large for it.
            size = p.arithmetic.element_size
            wgmma = p.groups == 1 and p.C * size % 128 == 0 and p.K * size % 16 == 0
            for gpu in DEVICES:
                expected = wgmma and solves("conv2d_wgmma", precision, gpu)
                assert VARIANTS["conv2d_wgmma"].supports(p, gpu)[0] is expected, f"{name}: {precision} on {gpu.name}"
                by_wgmma += expected
                keeps = dense and (2 * p.pad_h + 1, 2 * p.pad_w + 1) == (p.R, p.S)
                expected = wgmma and keeps and p.W <= 198 and solves("conv2d_wgmma_patch", precision, gpu)
                assert VARIANTS["conv2d_wgmma_patch"].supports(p, gpu)[0] is expected, f"{name}: {precision}, {gpu}"
                by_wgmma_patch += expected
    assert (by_wgmma, by_wgmma_patch) == (3 * 39, 3 * 30)  # in each of their precisions, on one GPU


WGMMAS = WgmmaConfig | Wgmma3xTf32Config
STATIC = 1024
"""Bytes of static shared memory of Hopper's kernels, their barriers, so that tiles begin at multiples of 1024."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_are_compiled_forms_that_fit_the_device(name: str) -> None:
    for precision in PRECISIONS:
        problem = replace(PROBLEMS[name], precision=precision)
        for variant in VARIANTS.values():
            for gpu in DEVICES:
                if not variant.supports(problem, gpu)[0]:
                    continue
                candidates = variant.candidates(problem, gpu)
                assert len(set(candidates)) == len(candidates) > 0, f"{variant.name} on {gpu.name}"
                assert {compiled_form(config) for config in candidates} <= set(variant.configurations())
                for config in candidates:
                    needed = shared_memory(problem, config) if isinstance(config, MmaConfig) else 0
                    needed = config.shared_memory if isinstance(config, WinogradConfig) else needed
                    needed = config.shared_memory + STATIC if isinstance(config, WGMMAS) else needed
                    if isinstance(config, WgmmaPatchConfig):
                        tile = patch_tile(problem, config.pixels, gpu.shared_memory_per_block, config.split_k_slices)
                        assert tile is not None
                        needed = tile.shared_memory + STATIC
                    assert needed <= gpu.shared_memory_per_block, f"{config}, {gpu.name}"
                    assert getattr(config, "precision", precision) == precision
                config, predicted = fastest(variant.name, problem, gpu, spread_nan=True)
                assert config in candidates
                assert predicted == min(cost(problem, gpu, candidate) for candidate in candidates)


def compiled_form(config: object) -> object:
    """The configuration without what is decided at launch."""
    if not isinstance(config, MmaConfig):
        return config
    return replace(config, split_k_slices=config.split_k_slices if config.cluster else 1, merged_groups=1)


@pytest.mark.parametrize("name", PROBLEMS)
def test_wide_loads_only_where_they_are_aligned(name: str) -> None:
    problem = PROBLEMS[name]
    if problem.group_channels % 4 or problem.gemm_n % 4:
        for config in VARIANTS["conv2d_implicit_gemm"].candidates(problem, H100):
            assert config.vector == 1
    if problem.gemm_k % 4 or problem.C % 4:
        (config,) = VARIANTS["im2col_sgemm"].candidates(problem, H100)
        assert config.vector == 1
    for variant in (*TENSOR_CORES, "conv2d_mma_patch"):
        for precision in MINIMUM[variant]:
            typed = replace(problem, precision=precision)
            if not VARIANTS[variant].supports(typed, H100)[0]:
                continue
            chunk = {"fp16": 8, "bf16": 8, "tf32": 4, "fp32-tc": 4}[precision]
            for config in VARIANTS[variant].candidates(typed, H100):
                seen = as_merged(typed, getattr(config, "merged_groups", 1))
                assert config.aligned == (seen.group_channels % chunk == 0 and seen.gemm_n % 8 == 0), config


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("gpu", DEVICES, ids=lambda gpu: gpu.name)
def test_auto_takes_the_general_kernel(name: str, gpu: Device) -> None:
    for precision in PRECISIONS:
        problem = replace(PROBLEMS[name], precision=precision)
        order = ("conv2d_mma", "conv2d_wmma") if PRECISIONS[precision].tensor_cores else ("conv2d_implicit_gemm",)
        expected = [variant for variant in order if solves(variant, precision, gpu)]
        if not expected:
            with pytest.raises(UnsupportedProblemError, match=rf"cannot be computed: .* 8\.0, {gpu.name} has 7\.\d$"):
                choose(problem, gpu)
            continue
        choice = choose(problem, gpu)
        narrow = [v for v in NARROW if solves(v, precision, gpu) and name not in REFUSED[v]]
        assert choice.variant in (expected[0], *narrow)
        assert heuristics.automatic(problem, gpu) == [expected[0], *narrow]
        config, predicted = fastest(choice.variant, problem, gpu)
        assert choice.config == config
        assert predicted <= fastest(expected[0], problem, gpu)[1]
        assert choice.fallback is None
        ending = " µs by the model" if len(order) > 1 else f" on {gpu.sm_count} multiprocessors"
        assert choice.reason.endswith(ending)


@pytest.mark.parametrize("variant", MINIMUM)
def test_a_kernel_is_taken_by_name(variant: str) -> None:
    for precision in MINIMUM[variant]:
        problem = replace(PLAIN, precision=precision)
        for strict in (False, True):
            choice = choose(problem, H100, variant, strict)
            assert (choice.variant, choice.reason, choice.fallback) == (variant, "asked for by name", None)
            assert choice.config in VARIANTS[variant].candidates(problem, H100)


def test_where_a_kernel_does_not_apply_the_choice_tells_why() -> None:
    problem = PROBLEMS["stride 2"]
    choice = choose(problem, H100, "conv2d_winograd")
    assert choice.fallback == "conv2d_winograd needs stride 1, not 2×2"
    assert replace(choice, fallback=None) == choose(problem, H100)
    with pytest.raises(UnsupportedProblemError) as caught:
        choose(problem, H100, "conv2d_winograd", strict=True)
    assert str(caught.value) == f"conv2d_winograd does not support conv2d {problem}: needs stride 1, not 2×2"
    half = replace(PLAIN, precision="fp16")
    choice = choose(half, H100, "conv2d_direct")
    assert choice.fallback == "conv2d_direct computes in fp32, not in fp16"
    assert replace(choice, fallback=None) == choose(half, H100)
    strided = replace(half, stride_h=2)
    choice = choose(strided, H100, "conv2d_mma_patch")
    assert (choice.variant, choice.fallback) == ("conv2d_mma", "conv2d_mma_patch needs stride 1, not 2×1")
    choice = choose(half, A100, "conv2d_wgmma")
    assert choice.fallback == "conv2d_wgmma needs compute capability 9.0, A100 has 8.0"
    assert replace(choice, fallback=None) == choose(half, A100)
    with pytest.raises(UnsupportedProblemError, match=r"^conv2d_wgmma does not support .*: needs groups 1, not 4$"):
        choose(replace(half, groups=4), H100, "conv2d_wgmma", strict=True)


@pytest.mark.parametrize("kernel", ["auto", *MINIMUM])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_nothing_solves_is_an_error_that_names_it(kernel: str, strict: bool, precision: str) -> None:
    problem = replace(PLAIN, N=2**24, precision=precision)
    reason = r"output pixels N·P·Q = \d+ exceeds"
    if strict and kernel != "auto" and precision not in MINIMUM[kernel]:
        reason = f"computes in .*, not in {precision}"
    with pytest.raises(UnsupportedProblemError, match=rf"conv2d {problem}.*: {reason}"):
        choose(problem, H100, kernel, strict)


@pytest.mark.parametrize("name", ["winograd", "", "AUTO", "conv2d"])
def test_an_unknown_kernel_is_an_error_that_lists_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown kernel {name!r}.*auto.*{GENERAL[0]}.*conv2d_winograd.*conv2d_mma"):
        choose(PLAIN, H100, name)


LARGE = Conv2dProblem(N=256, H=56, W=56, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)


def test_winograd_is_chosen_only_where_it_is_allowed_and_expected_to_be_faster() -> None:
    assert choose(LARGE, H100).variant == "conv2d_implicit_gemm"
    choice = choose(LARGE, H100, spread_nan=True)
    assert choice.variant == "conv2d_winograd"
    assert "faster than conv2d_implicit_gemm" in choice.reason
    for name, problem in PROBLEMS.items():
        for gpu in DEVICES:
            choice = choose(problem, gpu, spread_nan=True)
            if choice.variant == "conv2d_winograd":
                assert name not in WINOGRAD
                general = fastest("conv2d_implicit_gemm", problem, gpu)[1]
                assert fastest("conv2d_winograd", problem, gpu)[1] < general
    assert choose(LARGE, T4, spread_nan=True).variant == "conv2d_implicit_gemm"
    for precision in (name for name, arithmetic in PRECISIONS.items() if arithmetic.tensor_cores):
        assert choose(replace(LARGE, precision=precision), H100, spread_nan=True).variant in ("conv2d_mma", *NARROW)


def test_decisions_are_kept() -> None:
    assert choose(replace(LARGE), H100) is choose(LARGE, H100)
