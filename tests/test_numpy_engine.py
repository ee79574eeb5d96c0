"""The NumPy engine against torch, operation by operation."""

import inspect

import numpy as np
import pytest
import torch
import torchvision
from helpers import ConvCase, assert_close, conv_cases, conv_shapes, integers, normal, torch_conv2d
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from cupy_resnet.conv2d.problem import Conv2dProblem
from cupy_resnet.engines import numpy_windows
from cupy_resnet.engines.base import Ops
from cupy_resnet.engines.bfloat16 import to_bfloat16
from cupy_resnet.engines.cuda_engine import CudaEngine
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine

ops = NumpyEngine()
OPERATIONS = [name for name, value in vars(Ops).items() if inspect.isfunction(value) and not name.startswith("_")]
SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 3e38, -3e38], np.float32)


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).permute(0, 3, 1, 2)


def nhwc(x: torch.Tensor) -> np.ndarray:
    return x.permute(0, 2, 3, 1).contiguous().numpy()


def with_specials(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal values, one in ten replaced by NaN, Inf, signed zero or a value near float32's limit."""
    rng = np.random.default_rng(seed)
    x = normal(shape, seed)
    where = rng.random(shape) < 0.1
    x[where] = rng.choice(SPECIAL, where.sum())
    return x


@pytest.mark.parametrize("engine", [NumpyEngine, ShapeEngine, CudaEngine])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_the_contract_exists_with_its_arguments(engine: type, operation: str) -> None:
    wanted = inspect.signature(getattr(Ops, operation)).parameters.values()
    found = inspect.signature(getattr(engine, operation)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in wanted]


@settings(max_examples=300, deadline=None)
@given(conv_cases(), st.integers(0, 2**16))
def test_conv2d(case: ConvCase, seed: int) -> None:
    arrays = case.arrays(exact=False, seed=seed)
    y = ops.conv2d(**arrays, **case.arguments)
    assert y.shape == case.problem.output_shape
    assert_close(y, torch_conv2d(arrays, case.arguments))


@settings(max_examples=150, deadline=None)
@given(conv_cases(), st.sampled_from([1, 500, 5000]))
def test_conv2d_is_exact_on_integers_whatever_the_block(case: ConvCase, column_bytes: int) -> None:
    arrays = case.arrays(exact=True)
    before = {name: None if array is None else array.copy() for name, array in arrays.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_windows, "COLUMN_BYTES", column_bytes)
        y = ops.conv2d(**arrays, **case.arguments)
    np.testing.assert_array_equal(y, torch_conv2d(arrays, case.arguments))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=f"{name} was changed")


def test_conv2d_on_every_row_of_conv_shapes(data_folder) -> None:
    for name, problem in conv_shapes(data_folder, batch=1).items():
        case = ConvCase(problem)
        arrays = case.arrays(exact=True)
        expected = F.conv2d(
            nchw(arrays["x"]),
            nchw(arrays["weight"]),
            stride=case.arguments["stride"],
            padding=case.arguments["padding"],
            dilation=case.arguments["dilation"],
            groups=problem.groups,
        )
        np.testing.assert_array_equal(ops.conv2d(**arrays, **case.arguments), nhwc(expected), err_msg=name)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("R", "stride", "pad", "groups"), [(1, 1, 0, 1), (3, 1, 1, 1), (3, 2, 1, 2), (7, 2, 3, 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_conv2d_propagates_non_finite_values(relu: bool, R: int, stride: int, pad: int, groups: int, value) -> None:
    case = ConvCase(
        Conv2dProblem(
            N=2, H=9, W=8, C=4, K=6, R=R, S=R, stride_h=stride, stride_w=stride, pad_h=pad, pad_w=pad, groups=groups
        ),
        bias=True,
        residual=True,
        relu=relu,
    )
    arrays = case.arrays(exact=False)
    arrays["x"][0, 4, 4, 1] = value
    arrays["residual"][1, 0, 0, 0] = value
    arrays["bias"][5] = value
    expected = torch_conv2d(arrays, case.arguments)
    y = ops.conv2d(**arrays, **case.arguments)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert_close(y, expected)


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], dict]:
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = draw(st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3)))
    size = [max(1, k - 2 * p) + draw(st.integers(0, 7)) for k, p in zip(kernel, padding, strict=True)]
    shape = (draw(st.integers(0, 2)), *size, draw(st.integers(1, 5)))
    return shape, {"kernel_size": kernel, "stride": stride, "padding": padding}


@settings(max_examples=150, deadline=None)
@given(pools(), st.integers(0, 2**16))
def test_max_pool2d(pool: tuple[tuple[int, ...], dict], seed: int) -> None:
    shape, arguments = pool
    x = with_specials(shape, seed)
    np.testing.assert_array_equal(ops.max_pool2d(x, **arguments), nhwc(F.max_pool2d(nchw(x), **arguments)))


@settings(max_examples=150, deadline=None)
@given(pools(), st.integers(0, 2**16), st.booleans())
def test_avg_pool2d(pool: tuple[tuple[int, ...], dict], seed: int, count_include_pad: bool) -> None:
    shape, arguments = pool
    x = normal(shape, seed)
    if x.size:
        x.flat[seed % x.size] = np.nan
    expected = F.avg_pool2d(nchw(x).double(), **arguments, count_include_pad=count_include_pad).float()
    assert_close(ops.avg_pool2d(x, **arguments, count_include_pad=count_include_pad), nhwc(expected))


@pytest.mark.parametrize("shape", [(2, 7, 7, 5), (3, 1, 1, 4), (0, 5, 3, 2), (1, 65, 33, 3)])
def test_global_avg_pool2d(shape: tuple[int, ...]) -> None:
    x = normal(shape)
    if x.size:
        x[0, 0, 0, 0] = np.nan
    assert_close(ops.global_avg_pool2d(x), F.adaptive_avg_pool2d(nchw(x), 1).flatten(1).numpy())


@pytest.mark.parametrize("N", [0, 1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(N: int, bias: bool) -> None:
    x, weight = normal((N, 37), 1), normal((11, 37), 2, 37**-0.5)
    b = normal((11,), 3) if bias else None
    expected = F.linear(torch.from_numpy(x), torch.from_numpy(weight), None if b is None else torch.from_numpy(b))
    assert_close(ops.linear(x, weight, b), expected.numpy())


@pytest.mark.parametrize("N", [0, 1, 6])
def test_softmax(N: int) -> None:
    x = normal((N, 13), scale=30)
    if N > 3:
        x[0, 2], x[1, 5], x[2] = np.nan, np.inf, -np.inf
    assert_close(ops.softmax(x), F.softmax(torch.from_numpy(x), dim=1).numpy())


@pytest.mark.parametrize("N", [0, 2])
def test_batch_norm2d(N: int) -> None:
    x = normal((N, 5, 6, 7))
    if N:
        x[0, 0, 0, :2] = np.nan, np.inf
    weight, bias, mean = normal((7,), 1), normal((7,), 2), normal((7,), 3)
    var = np.abs(normal((7,), 4)) + np.float32(0.01)
    tensors = [torch.from_numpy(array).double() for array in (mean, var, weight, bias)]
    expected = F.batch_norm(nchw(x).double(), *tensors, training=False, eps=1e-3).float()
    assert_close(ops.batch_norm2d(x, weight, bias, mean, var, eps=1e-3), nhwc(expected))


def test_elementwise_operations_treat_special_values_as_torch() -> None:
    x, y = with_specials((3, 8, 9, 10), 1), with_specials((3, 8, 9, 10), 2)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    np.testing.assert_array_equal(ops.relu(x), F.relu(tx).numpy())
    np.testing.assert_array_equal(ops.add(x, y), (tx + ty).numpy())
    np.testing.assert_array_equal(ops.add_relu(x, y), F.relu(tx + ty).numpy())


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 7, 8, 4), (0, 5, 5, 2), (1, 1, 1, 3)])
def test_pad_channels(stride: int, shape: tuple[int, ...]) -> None:
    x = with_specials(shape)
    expected = F.pad(nchw(x)[:, :, ::stride, ::stride], (0, 0, 0, 0, 3, 2))
    np.testing.assert_array_equal(ops.pad_channels(x, 3, 2, stride=stride), nhwc(expected))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("N", [0, 2])
def test_normalisation_is_torchvisions_bit_for_bit(dtype: str, N: int) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    x = np.random.default_rng(0).integers(0, 256, (N, 3, 16, 17)).astype(dtype)
    scaled = torch.from_numpy(x).float() / 255 if dtype == "uint8" else torch.from_numpy(x)
    expected = nhwc(torchvision.transforms.functional.normalize(scaled, mean, std) if N else scaled)
    np.testing.assert_array_equal(ops.nchw_to_nhwc(x, mean=mean, std=std), expected)
    np.testing.assert_array_equal(ops.normalize(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), mean, std), expected)
    np.testing.assert_array_equal(ops.nchw_to_nhwc(x), nhwc(scaled))


PIXELS = {"uint8": np.uint8, "float16": np.float16, "float32": np.float32, "bfloat16": np.int16}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", PIXELS)
def test_pixels_of_any_type_and_strides(dtype: str, normalized: bool) -> None:
    values = np.random.default_rng(0).integers(0, 256, (2, 6, 10, 3)).astype(np.float32)
    x = to_bfloat16(values).view(np.int16) if dtype == "bfloat16" else values.astype(dtype)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = torch.from_numpy(values / np.float32(255) if dtype == "uint8" else values).permute(0, 3, 1, 2)
    if normalized:
        expected = torchvision.transforms.functional.normalize(expected, mean, std)
    options = {"mean": mean, "std": std} if normalized else {}
    turned = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    for pixels in (x, turned, np.ascontiguousarray(x[:, ::-1])[:, ::-1], np.repeat(x, 2, axis=2)[:, :, ::2]):
        before, out = pixels.copy(), np.empty(x.shape, np.float32)
        y = ops.pixels(pixels, **options)
        np.testing.assert_array_equal(y, nhwc(expected))
        assert y.flags.c_contiguous
        assert y.dtype == np.float32
        assert ops.pixels(pixels, **options, out=out) is out
        np.testing.assert_array_equal(out, y)
        np.testing.assert_array_equal(pixels, before)


def test_pixels_that_are_activations_already_are_not_copied() -> None:
    x = normal((2, 4, 5, 3))
    assert ops.pixels(x) is x
    assert ops.pixels(x, out=np.empty_like(x)) is not x


@pytest.mark.parametrize("shape", [(2, 37, 46, 3), (1, 1, 1, 1), (3, 8, 7, 4), (0, 9, 9, 3)])
def test_stem_is_torchs(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    C = shape[3]
    weight, bias = normal((16, 7, 7, C), 1, 0.1), normal((16,), 2)
    mean, std = np.linspace(0.4, 0.5, C), np.linspace(0.2, 0.3, C)
    pixels = (torch.from_numpy(x).double() / 255 - torch.from_numpy(mean)) / torch.from_numpy(std)
    y = F.conv2d(pixels.permute(0, 3, 1, 2), nchw(weight).double(), torch.from_numpy(bias).double(), 2, 3)
    expected = nhwc(F.max_pool2d(F.relu(y), 3, 2, 1).float())
    out = np.empty(expected.shape, np.float32)
    assert_close(ops.stem(x, ops.filter(weight), bias, mean, std), expected)
    assert ops.stem(x, weight, bias, mean, std, out=out) is out
    assert_close(out, expected)
    shapes = ShapeEngine()
    stand_ins = [ShapeArray(a.shape, dtype=a.dtype) for a in (x, weight, bias)]
    assert shapes.stem(*stand_ins, mean, std).shape == expected.shape


def test_layout_round_trip_and_strided_input() -> None:
    x = normal((2, 3, 5, 7))[:, ::-1, ::2]
    y = ops.nchw_to_nhwc(x)
    assert y.flags.c_contiguous
    np.testing.assert_array_equal(ops.nhwc_to_nchw(y), x)


def test_float64_engine_is_a_reference() -> None:
    case = ConvCase(Conv2dProblem(N=2, H=9, W=9, C=32, K=16, R=3, S=3, pad_h=1, pad_w=1), bias=True)
    arrays = {key: None if a is None else a.astype(np.float64) for key, a in case.arrays(exact=False).items()}
    x, weight, bias = (torch.from_numpy(arrays[key]) for key in ("x", "weight", "bias"))
    expected = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), bias, padding=1)
    y = NumpyEngine("float64").conv2d(**arrays, **case.arguments)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, nhwc(expected), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="float32 or float64"):
        NumpyEngine("float16")  # type: ignore[arg-type]


X, W = np.zeros((2, 5, 5, 4), np.float32), np.zeros((6, 3, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.conv2d(X[0], W), r"x must be \(N, H, W, C\), got shape \(5, 5, 4\)"),
        (lambda o: o.conv2d(X, W[..., :3]), r"x \(2, 5, 5, 4\) has C=4 channels, but weight \(6, 3, 3, 3\)"),
        (lambda o: o.conv2d(X, W[:5, ..., :2], groups=2), r"C=4 and output channels K=5 .* multiples of groups=2"),
        (lambda o: o.conv2d(X, W, X[0, 0, 0]), r"bias has shape \(4,\), but weight \(6, 3, 3, 4\) needs \(6,\)"),
        (lambda o: o.conv2d(X, W, residual=X), r"residual has shape \(2, 5, 5, 4\).*\(2, 3, 3, 6\)"),
        (lambda o: o.conv2d(X, W, dilation=3), r"filter \(3×3, dilation 3×3\) is larger than the padded input \(5×5\)"),
        (lambda o: o.conv2d(X, W, stride=0), "stride_h must be at least 1"),
        (lambda o: o.conv2d(X, W, padding=-1), "pad_h must not be negative"),
        (lambda o: o.add(X, X[:1]), r"\(2, 5, 5, 4\) and y \(1, 5, 5, 4\)"),
        (lambda o: o.add_relu(X, X[:, :1]), "must be equal"),
        (lambda o: o.max_pool2d(X, 3, padding=2), "padding .* half of kernel_size"),
        (lambda o: o.max_pool2d(X, 7), "larger than x"),
        (lambda o: o.avg_pool2d(X, 2, stride=0), "at least 1"),
        (lambda o: o.global_avg_pool2d(X[:, :0]), "no pixels"),
        (lambda o: o.linear(X[0, 0], W[0, 0, :, :3]), r"\(5, 4\) and weight \(3, 3\)"),
        (lambda o: o.linear(X[0, 0, :, :0], W[0, 0, :, :0]), r"x \(5, 0\) has no features"),
        (lambda o: o.softmax(X), r"x must be \(N, K\)"),
        (lambda o: o.softmax(X[0, 0, :, :0]), r"x \(5, 0\) has no classes"),
        (
            lambda o: o.batch_norm2d(X, *[X[0, 0, 0]] * 3, X[0, 0, 0, :3]),
            r"running_var has shape \(3,\), expected \(4,\)",
        ),
        (lambda o: o.pad_channels(X, -1, 0), "must not be negative"),
        (lambda o: o.nchw_to_nhwc(X, mean=(0, 0, 0)), "given together"),
        (lambda o: o.normalize(X, (0, 0), (1, 1)), r"mean has shape \(2,\), expected \(4,\)"),
        (lambda o: o.normalize(X, [0] * 4, [1, 1, 0, 1]), "std must not be zero"),
        (lambda o: o.filter(X[0]), r"weight must be \(K, R, S, C/groups\)"),
        (lambda o: o.pixels(X[0]), r"x must be \(N, H, W, C\)"),
        (lambda o: o.pixels(X, (0, 0, 0)), "given together"),
        (lambda o: o.pixels(X, out=X[:1]), r"out must be a C-contiguous float32 array of shape \(2, 5, 5, 4\)"),
        (lambda o: o.max_pool2d(X, 3, out=X), r"out must be .* of shape \(2, 1, 1, 4\), got .*\(2, 5, 5, 4\)"),
        (lambda o: o.stem(X, W, X[0, 0, 0]), r"bias has shape \(4,\)"),
        (lambda o: o.stem(X, W, W[:, 0, 0, 0]), r"weight \(6, 3, 3, 4\) must be a 7×7 filter"),
    ],
)
def test_wrong_shapes_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ops)


def test_wrong_dtypes_and_types_are_named() -> None:
    with pytest.raises(TypeError, match="x is float64, but this engine computes in float32"):
        ops.relu(X.astype(np.float64))
    with pytest.raises(TypeError, match="y must be a NumPy array, got list"):
        ops.add(X, X.tolist())
    with pytest.raises(TypeError, match="x must be uint8, float16, float32, or bfloat16 as uint16 or int16, got int64"):
        ops.pixels(X.astype(np.int64))


@settings(max_examples=60, deadline=None)
@given(conv_cases(), pools())
def test_shape_engine_agrees_on_shapes(case: ConvCase, pool: tuple[tuple[int, ...], dict]) -> None:
    arrays = case.arrays(exact=True)
    shapes = ShapeEngine()
    stand_ins = {key: None if a is None else ShapeArray(a.shape) for key, a in arrays.items()}
    y = shapes.conv2d(**stand_ins, **case.arguments)
    assert y.shape == ops.conv2d(**arrays, **case.arguments).shape
    assert shapes.records[-1].problem == case.problem
    x = integers(pool[0])
    assert shapes.avg_pool2d(ShapeArray(x.shape), **pool[1]).shape == ops.avg_pool2d(x, **pool[1]).shape
