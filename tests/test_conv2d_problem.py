"""The description of a convolution: its sizes are torch's, its errors name what is wrong, its mirrors match."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ConvCase, conv_cases
from hypothesis import given, settings
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from cupy_resnet.conv2d import PRECISIONS, Conv2dProblem, stem
from cupy_resnet.conv2d.params import PARAMS_DTYPE, conv2d_params
from cupy_resnet.engines.cuda_engine import POOL2D_DTYPE
from cupy_resnet.resources import folder

PLAIN = Conv2dProblem(N=2, H=10, W=12, C=8, K=16, R=3, S=3, pad_h=1, pad_w=1)
STEM = Conv2dProblem(N=2, H=224, W=224, C=3, K=64, R=7, S=7, stride_h=2, stride_w=2, pad_h=3, pad_w=3)
UNEVEN = Conv2dProblem(
    N=7,
    H=40,
    W=50,
    C=12,
    K=20,
    R=5,
    S=6,
    stride_h=2,
    stride_w=3,
    pad_h=8,
    pad_w=9,
    dilation_h=4,
    dilation_w=1,
    groups=4,
)


def meta(*shape: int) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, device="meta")


def options(p: Conv2dProblem) -> dict[str, tuple[int, int]]:
    """What torch's conv2d and unfold have in common."""
    return {
        "stride": (p.stride_h, p.stride_w),
        "padding": (p.pad_h, p.pad_w),
        "dilation": (p.dilation_h, p.dilation_w),
    }


@settings(deadline=None)
@given(case=conv_cases())
def test_sizes_and_flops_are_torchs(case: ConvCase) -> None:
    p = case.problem
    x, weight = meta(p.N, p.C, p.H, p.W), meta(p.K, p.C // p.groups, p.R, p.S)
    with FlopCounterMode(display=False) as counter:
        y = F.conv2d(x, weight, groups=p.groups, **options(p))
    assert p.input_shape == tuple(x.permute(0, 2, 3, 1).shape)
    assert p.filter_shape == tuple(weight.permute(0, 2, 3, 1).shape)
    assert p.output_shape == (p.N, p.P, p.Q, p.K) == tuple(y.permute(0, 2, 3, 1).shape)
    assert p.flops == counter.get_total_flops()
    assert p.bytes == sum(tensor.nbytes for tensor in (x, weight, y))


@settings(deadline=None)
@given(case=conv_cases())
def test_the_matrix_product_is_that_of_torchs_columns(case: ConvCase) -> None:
    p = replace(case.problem, N=case.problem.N + 1)  # torch unfolds no empty batch
    columns = F.unfold(meta(p.N, p.C // p.groups, p.H, p.W), (p.R, p.S), **options(p))
    assert (p.gemm_k, p.gemm_m) == (columns.shape[1], columns.shape[0] * columns.shape[2])
    assert p.gemm_n * p.groups == p.K
    assert p.group_channels * p.groups == p.C


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"groups": 4}, True),
        ({"stride_h": 2}, False),
        ({"stride_w": 2}, False),
        ({"pad_h": 1}, False),
        ({"pad_w": 1}, False),
        ({"R": 2}, False),
        ({"S": 2}, False),
    ],
)
def test_pointwise(change: dict[str, int], expected: bool) -> None:
    assert replace(Conv2dProblem(N=1, H=4, W=4, C=8, K=8, R=1, S=1), **change).is_pointwise is expected


@pytest.mark.parametrize(
    ("precision", "element", "storage", "size"),
    [
        ("fp32", "float", "float32", 4),
        ("fp32-tc", "float", "float32", 4),
        ("tf32", "float", "float32", 4),
        ("fp16", "Half", "float16", 2),
        ("bf16", "BFloat16", "uint16", 2),
    ],
)
def test_bytes_follow_the_precision(precision: str, element: str, storage: str, size: int) -> None:
    problem = replace(PLAIN, precision=precision)
    assert problem.bytes == size * (2 * 10 * 12 * 8 + 16 * 9 * 8 + 2 * 10 * 12 * 16)
    assert problem.flops == PLAIN.flops
    arithmetic = problem.arithmetic
    assert (arithmetic.name, arithmetic.element, arithmetic.storage) == (precision, element, np.dtype(storage))
    assert arithmetic.element_size == size
    assert arithmetic.tensor_cores == (precision != "fp32")
    assert arithmetic.defines() == {"ELEMENT": element, "PRODUCTS": 3 if precision == "fp32-tc" else 1}


def test_these_are_all_precisions() -> None:
    assert list(PRECISIONS) == ["fp32", "fp32-tc", "tf32", "fp16", "bf16"]


@pytest.mark.parametrize("precision", ["float16", "FP16", "auto", ""])
def test_an_unknown_precision_is_refused_with_those_there_are(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"must be one of fp32, .*bf16, got '{precision}'$"):
        replace(PLAIN, precision=precision)


POSITIVE = ("H", "W", "C", "K", "R", "S", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups")


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", POSITIVE)
def test_sizes_below_one_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^conv2d: {name} must be at least 1, got {value}$"):
        replace(PLAIN, **{name: value})


@pytest.mark.parametrize("name", ["N", "pad_h", "pad_w"])
def test_negative_sizes_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^conv2d: {name} must not be negative, got -1$"):
        replace(PLAIN, **{name: -1})


@pytest.mark.parametrize("change", [{"groups": 3}, {"groups": 16}, {"groups": 8, "K": 12}])
def test_groups_must_divide_the_channels(change: dict[str, int]) -> None:
    wrong = {"C": 8, "K": 16, **change}
    sizes = rf"C={wrong['C']} and output channels K={wrong['K']} must both be multiples of groups={wrong['groups']}$"
    with pytest.raises(ValueError, match=sizes):
        replace(PLAIN, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"R": 13}, r"\(13×3, dilation 1×1\) is larger than the padded input \(12×14\)"),
        ({"S": 15}, r"\(3×15, dilation 1×1\)"),
        ({"dilation_h": 6}, r"\(3×3, dilation 6×1\)"),
        ({"dilation_w": 7}, r"\(3×3, dilation 1×7\)"),
        ({"R": 13, "stride_h": 5}, r"\(13×3"),
    ],
)
def test_a_filter_larger_than_the_padded_input_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(PLAIN, **change)
    smaller = {name: size - 1 for name, size in change.items()}
    assert min(replace(PLAIN, **smaller).output_shape) >= 1


def sized(**sizes: int) -> Conv2dProblem:
    return Conv2dProblem(**{"N": 1, "H": 1, "W": 1, "C": 1, "K": 1, "R": 1, "S": 1, **sizes})


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (sized(N=2**31), "output pixels N·P·Q = "),
        (sized(N=2**19, H=64, W=64), "output pixels N·P·Q = "),
        (sized(H=2**15, W=2**15, C=2, stride_h=64), "one padded image (H+2·pad)·(W+2·pad)·C = 2147483648"),
        (sized(C=64, pad_h=4096, pad_w=4096, stride_h=99), "one padded image (H+2·pad)·(W+2·pad)·C = "),
        (sized(H=2**12, W=2**12, K=2**7), "one output image P·Q·K = 2147483648"),
        (sized(C=2**16, K=2**15), "filter elements K·R·S·C/groups = "),
        (sized(C=65536, K=65536, groups=65536), "groups = 65536 exceeds 65535"),
    ],
)
def test_sizes_beyond_the_kernels_indices_are_named(problem: Conv2dProblem, words: str) -> None:
    assert words in (problem.limit_exceeded() or "")


@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        sized(N=0),
        sized(N=2**31 - 2**11),
        sized(H=2**15, W=2**15 - 1, C=2, stride_h=64),
        sized(H=2**12, W=2**12, K=2**7 - 1),
        sized(C=2**15, K=2**15),
        sized(C=65535, K=65535, groups=65535),
        Conv2dProblem(N=514, H=256, W=256, C=64, K=64, R=1, S=1),  # tensors beyond 2³¹ elements
    ],
    ids=str,
)
def test_everything_below_is_allowed(problem: Conv2dProblem) -> None:
    assert problem.limit_exceeded() is None


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (sized(N=5, C=2, K=3), "5×1×1×2 → 3, 1×1"),
        (PLAIN, "2×10×12×8 → 16, 3×3, pad 1×1"),
        (STEM, "2×224×224×3 → 64, 7×7, stride 2×2, pad 3×3"),
        (UNEVEN, "7×40×50×12 → 20, 5×6, stride 2×3, pad 8×9, dilation 4×1, groups 4"),
        (replace(UNEVEN, precision="bf16"), "7×40×50×12 → 20, 5×6, stride 2×3, pad 8×9, dilation 4×1, groups 4, bf16"),
    ],
)
def test_prints_what_differs_from_the_plain_case(problem: Conv2dProblem, text: str) -> None:
    assert str(problem) == text


def test_equal_problems_are_one_key() -> None:
    assert len({PLAIN, replace(PLAIN), STEM}) == 2
    assert len({replace(PLAIN, precision=precision) for precision in PRECISIONS}) == len(PRECISIONS)


def struct_fields(path: Path, struct: str) -> dict[str, str]:
    """The names and types of a struct's fields, in order."""
    text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    (body,) = re.findall(rf"struct {struct} \{{(.*?)\}};", text, re.DOTALL)
    fields = {}
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind = re.match(r"(long long|int) ", declaration)
        assert kind, declaration
        fields |= {name.strip(): kind[1] for name in declaration.removeprefix(kind[0]).split(",")}
    return fields


@pytest.mark.parametrize(
    ("dtype", "file", "struct"),
    [
        (PARAMS_DTYPE, "include/conv2d_params.cuh", "Conv2dParams"),
        (POOL2D_DTYPE, "include/pool2d.cuh", "Pool2dParams"),
        (stem.PARAMS_DTYPE, "include/stem_params.cuh", "StemParams"),
    ],
    ids=["Conv2dParams", "Pool2dParams", "StemParams"],
)
def test_the_record_mirrors_the_kernels_struct(dtype: np.dtype, file: str, struct: str) -> None:
    fields = struct_fields(folder("kernels_cu") / file, struct)
    kinds = {"int": "<i4", "long long": "<i8"}
    assert [(name, dtype.fields[name][0].str) for name in dtype.names] == [(n, kinds[k]) for n, k in fields.items()]
    offset = 0
    for name in fields:  # each at a multiple of its size, as C++ lays it out, without a gap
        size = dtype.fields[name][0].itemsize
        assert dtype.fields[name][1] == offset
        assert offset % size == 0
        offset += size
    assert dtype.itemsize == offset
    assert offset % max(dtype.fields[name][0].itemsize for name in fields) == 0


def test_the_record_holds_the_problem() -> None:
    params = conv2d_params(UNEVEN, True)
    assert params.shape == (1,)
    expected = {name: getattr(UNEVEN, name) for name in ("N", "H", "W", "C", "K", "R", "S", "P", "Q", "groups")}
    expected |= {"stride_h": 2, "stride_w": 3, "pad_h": 8, "pad_w": 9, "dilation_h": 4, "dilation_w": 1}
    expected |= {"group_channels": 3, "group_filters": 5, "gemm_m": 7 * UNEVEN.P * UNEVEN.Q, "gemm_k": 90, "relu": 1}
    expected |= {"shortcut_channels": 0, "shortcut_stride": 1, "backwards": 0}
    assert {name: int(params[name][0]) for name in PARAMS_DTYPE.names} == expected
    assert conv2d_params(UNEVEN, False)["relu"] == 0
    assert conv2d_params(UNEVEN, False, True)["backwards"] == 1
    assert conv2d_params(UNEVEN, True) is params
