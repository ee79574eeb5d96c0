"""Which kernel solves what, frozen, and how one is chosen: no GPU is needed for either."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import conv_shapes

from cupy_resnet.conv2d import H100, VARIANTS, Conv2dProblem, Device, choose, variant_names
from cupy_resnet.conv2d.configs import ImplicitGemmConfig
from cupy_resnet.conv2d.heuristics import cost, fastest
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
DEVICES = (V100, T4, A100, A10, H100)
GENERAL = ("conv2d_direct", "conv2d_shared", "im2col_sgemm", "conv2d_implicit_gemm")

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

OLD = "needs compute capability 8.0"
WINOGRAD = {
    # problem: why not on (V100, T4, A100, A10, H100)
    "plain 3×3": (OLD, OLD, "", "", ""),
    "no padding": (OLD, OLD, "", "", ""),
    "uneven padding": (OLD, OLD, "", "", ""),
    "padding larger than the filter": (OLD, OLD, "", "", ""),
    "odd channels": (OLD, OLD, "", "", ""),
    "one channel": (OLD, OLD, "", "", ""),
    "1×1 image": (OLD, OLD, "", "", ""),
    "empty batch": (OLD, OLD, "", "", ""),
    "1×1": ("transforms 3×3 filters, not 1×1",) * 5,
    "5×5": ("transforms 3×3 filters, not 5×5",) * 5,
    "3×1": ("transforms 3×3 filters, not 3×1",) * 5,
    "1×3": ("transforms 3×3 filters, not 1×3",) * 5,
    "stem": ("transforms 3×3 filters, not 7×7",) * 5,
    "stride 2": ("needs stride 1, not 2×2",) * 5,
    "stride 1×2": ("needs stride 1, not 1×2",) * 5,
    "dilation 2": ("needs dilation 1, not 2×2",) * 5,
    "dilation 2×1": ("needs dilation 1, not 2×1",) * 5,
    "grouped": ("needs groups 1, not 4",) * 5,
    "depthwise": ("needs groups 1, not 64",) * 5,
    "strided, dilated, grouped": ("needs stride 1, not 3×1",) * 5,
}
"""The frozen matrix: a refusal that is not written here is a fault. The other variants refuse nothing."""


def test_the_ladder_from_the_bottom() -> None:
    assert variant_names() == [*GENERAL, "conv2d_winograd"]
    assert all(VARIANTS[name].name == name for name in VARIANTS)


@pytest.mark.parametrize("name", PROBLEMS)
def test_frozen_support(name: str) -> None:
    for gpu, why_not in zip(DEVICES, WINOGRAD[name], strict=True):
        for variant in GENERAL:
            assert VARIANTS[variant].supports(PROBLEMS[name], gpu) == (True, ""), f"{variant} on {gpu.name}"
        supported, reason = VARIANTS["conv2d_winograd"].supports(PROBLEMS[name], gpu)
        assert supported is (not why_not), gpu.name
        assert reason.startswith(why_not) and bool(reason) == bool(why_not), gpu.name  # noqa: PT018


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_no_kernel_does_is_refused_by_name(variant: str) -> None:
    supports = VARIANTS[variant].supports
    assert supports(replace(PLAIN, dtype="float16"), H100) == (False, "computes float32, not float16")
    too_many_pixels = supports(replace(PLAIN, N=2**24), H100)
    assert too_many_pixels[0] is False
    assert too_many_pixels[1].startswith("output pixels N·P·Q = ")
    old = supports(PLAIN, GTX1080)
    assert old[0] is False
    assert old[1].startswith("needs compute capability ")
    assert old[1].endswith(", GTX 1080 has 61")


def test_winograd_tells_how_much_shared_memory_is_missing() -> None:
    small = replace(A100, name="small", shared_memory_per_block=48 << 10)
    supported, reason = VARIANTS["conv2d_winograd"].supports(PLAIN, small)
    assert not supported
    assert reason == "needs 98304 bytes of shared memory per block, small has 49152"


def test_every_row_of_conv_shapes(data_folder: Path) -> None:
    problems = conv_shapes(data_folder)
    assert len(problems) == 166
    for name, p in problems.items():
        for variant in GENERAL:
            for gpu in DEVICES:
                assert VARIANTS[variant].supports(p, gpu) == (True, ""), f"{name}: {variant} on {gpu.name}"
        own = (p.R, p.S, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w, p.groups) == (3, 3, 1, 1, 1, 1, 1)
        assert VARIANTS["conv2d_winograd"].supports(p, H100)[0] == own, name


@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_are_configurations_that_fit_the_device(name: str) -> None:
    problem = PROBLEMS[name]
    for variant in VARIANTS.values():
        for gpu in DEVICES:
            if not variant.supports(problem, gpu)[0]:
                continue
            candidates = variant.candidates(problem, gpu)
            assert candidates, f"{variant.name} on {gpu.name}"
            assert set(candidates) <= set(variant.configurations())
            for config in candidates:
                assert getattr(config, "shared_memory", 0) <= gpu.shared_memory_per_block, f"{config} on {gpu.name}"
            config, predicted = fastest(variant.name, problem, gpu)
            assert config in candidates
            assert predicted == min(cost(problem, gpu, candidate) for candidate in candidates)


@pytest.mark.parametrize("name", PROBLEMS)
def test_wide_loads_only_where_they_are_aligned(name: str) -> None:
    problem = PROBLEMS[name]
    if problem.group_channels % 4 or problem.gemm_n % 4:
        for config in VARIANTS["conv2d_implicit_gemm"].candidates(problem, H100):
            assert config.vector == 1
    if problem.gemm_k % 4 or problem.C % 4:
        (config,) = VARIANTS["im2col_sgemm"].candidates(problem, H100)
        assert config.vector == 1


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("gpu", DEVICES, ids=lambda gpu: gpu.name)
def test_auto_takes_the_general_kernel(name: str, gpu: Device) -> None:
    choice = choose(PROBLEMS[name], gpu)
    assert choice.variant == "conv2d_implicit_gemm"
    assert choice.config == fastest("conv2d_implicit_gemm", PROBLEMS[name], gpu)[0]
    assert choice.fallback is None
    assert choice.reason.endswith(f" on {gpu.sm_count} multiprocessors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_is_taken_by_name(variant: str) -> None:
    for strict in (False, True):
        choice = choose(PLAIN, H100, variant, strict)
        assert (choice.variant, choice.reason, choice.fallback) == (variant, "asked for by name", None)
        assert choice.config in VARIANTS[variant].candidates(PLAIN, H100)


def test_where_a_kernel_does_not_apply_the_choice_tells_why() -> None:
    problem = PROBLEMS["stride 2"]
    choice = choose(problem, H100, "conv2d_winograd")
    assert choice.fallback == "conv2d_winograd needs stride 1, not 2×2"
    assert replace(choice, fallback=None) == choose(problem, H100)
    with pytest.raises(UnsupportedProblemError) as caught:
        choose(problem, H100, "conv2d_winograd", strict=True)
    assert str(caught.value) == f"conv2d_winograd does not support conv2d {problem}: needs stride 1, not 2×2"


@pytest.mark.parametrize("kernel", ["auto", *GENERAL, "conv2d_winograd"])
@pytest.mark.parametrize("strict", [False, True])
def test_what_nothing_solves_is_an_error_that_names_it(kernel: str, strict: bool) -> None:
    problem = replace(PLAIN, N=2**24)
    with pytest.raises(UnsupportedProblemError, match=rf"conv2d {problem}.*: output pixels N·P·Q = \d+ exceeds"):
        choose(problem, H100, kernel, strict)


@pytest.mark.parametrize("name", ["winograd", "", "AUTO", "conv2d"])
def test_an_unknown_kernel_is_an_error_that_lists_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown kernel {name!r}.*auto.*{GENERAL[0]}.*conv2d_winograd"):
        choose(PLAIN, H100, name)


LARGE = Conv2dProblem(N=256, H=56, W=56, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)


def test_winograd_is_chosen_only_where_it_is_allowed_and_expected_to_be_faster() -> None:
    assert choose(LARGE, H100).variant == "conv2d_implicit_gemm"
    choice = choose(LARGE, H100, allow_winograd=True)
    assert choice.variant == "conv2d_winograd"
    assert "faster than conv2d_implicit_gemm" in choice.reason
    for name, problem in PROBLEMS.items():
        for gpu in DEVICES:
            choice = choose(problem, gpu, allow_winograd=True)
            if choice.variant == "conv2d_winograd":
                assert not WINOGRAD[name][DEVICES.index(gpu)]
                general = fastest("conv2d_implicit_gemm", problem, gpu)[1]
                assert fastest("conv2d_winograd", problem, gpu)[1] < general
    assert choose(LARGE, T4, allow_winograd=True).variant == "conv2d_implicit_gemm"


def test_decisions_are_kept() -> None:
    assert choose(replace(LARGE), H100) is choose(LARGE, H100)


def tile_area(problem: Conv2dProblem) -> int:
    config = choose(problem, H100).config
    assert isinstance(config, ImplicitGemmConfig)
    return config.tile_m * config.tile_n


@pytest.mark.parametrize(("size", "channels"), [(56, 64), (28, 128), (14, 256), (7, 512)])
def test_bigger_batches_get_bigger_tiles(size: int, channels: int) -> None:
    layer = replace(PLAIN, H=size, W=size, C=channels, K=channels)
    areas = [tile_area(replace(layer, N=N)) for N in (1, 16, 256)]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


def test_the_predicted_time_is_positive_and_grows_with_the_work() -> None:
    for variant in ("conv2d_implicit_gemm", "conv2d_winograd"):
        for config in VARIANTS[variant].candidates(PLAIN, H100):
            costs = [cost(replace(LARGE, N=N), H100, config) for N in (1, 64, 512)]
            assert 0 < costs[0] < costs[1] < costs[2], config
            assert cost(LARGE, H100, config) < cost(replace(LARGE, C=128), H100, config)
            assert cost(LARGE, H100, config) < cost(LARGE, A10, config)  # fewer multiprocessors
