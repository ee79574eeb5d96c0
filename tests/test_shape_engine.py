"""The shape-only engine: what it records per precision, and that its sizes are those of the arrays."""

import numpy as np
import pytest

from cupy_resnet.binding import bind_shapes
from cupy_resnet.conv2d import PRECISIONS
from cupy_resnet.engines.base import Fusions
from cupy_resnet.engines.linear_problem import linear_problem
from cupy_resnet.engines.shape_engine import ShapeArray, ShapeEngine
from cupy_resnet.networks import describe

X, FILTER = (2, 9, 8, 16), (32, 3, 3, 16)


def records(precision: str, *calls) -> list:
    ops = ShapeEngine(precision)
    for call in calls:
        call(ops)
    return ops.records


@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_have_the_precisions_size_and_vectors_have_four_bytes(precision: str) -> None:
    size = PRECISIONS[precision].element_size
    ops = ShapeEngine(precision)
    x = ShapeArray(X, dtype=PRECISIONS[precision].storage)
    vector = ShapeArray((16,))
    y = ops.conv2d(x, ShapeArray(FILTER, layer="conv1"), ShapeArray((32,)), padding=1, residual=None, relu=True)
    activations, outputs = int(np.prod(X)), int(np.prod(y.shape))
    assert ops.records[-1].nbytes == size * (activations + int(np.prod(FILTER)) + outputs) + 4 * 32
    assert ops.records[-1].problem.precision == precision
    assert y.nbytes == size * outputs
    ops.conv2d(x, ops.filter(ShapeArray(FILTER)), padding=1, residual=y)
    assert ops.records[-1].nbytes == size * (activations + int(np.prod(FILTER)) + 2 * outputs)
    ops.batch_norm2d(x, vector, vector, vector, vector)
    assert ops.records[-1].nbytes == 2 * size * activations + 4 * 4 * 16
    ops.add_relu(x, x)
    assert ops.records[-1].nbytes == 3 * size * activations
    pooled = ops.global_avg_pool2d(x)
    assert pooled.nbytes == 4 * 2 * 16
    assert ops.records[-1].nbytes == size * activations + pooled.nbytes
    assert ops.nhwc_to_nchw(x).nbytes == 4 * activations


@pytest.mark.parametrize(
    ("precision", "dtype", "channels_first", "normalized", "launched"),
    [
        ("fp32", "float32", False, False, []),
        ("fp32", "float32", True, False, ["nchw_to_nhwc"]),
        ("fp32", "uint8", False, False, ["normalize"]),
        ("fp16", "float16", False, False, []),
        ("fp16", "float16", False, True, ["normalize"]),
        ("fp16", "float32", False, False, ["normalize"]),
        ("fp16", "float32", True, True, ["nchw_to_nhwc"]),
        ("bf16", "uint16", False, False, []),
        ("tf32", "float16", False, False, ["normalize"]),
    ],
)
def test_pixels_launch_something_only_where_something_must_change(
    precision: str, dtype: str, channels_first: bool, normalized: bool, launched: list[str]
) -> None:
    ops = ShapeEngine(precision)
    x = ShapeArray(X, dtype=np.dtype(dtype), channels_first=channels_first)
    y = ops.pixels(x, *([[0.5] * 16, [0.2] * 16] if normalized else []))
    assert [record.op for record in ops.records] == launched
    assert (y.shape, y.dtype) == (X, PRECISIONS[precision].storage)


def test_a_fused_stem_is_one_record_that_moves_the_map_never() -> None:
    parts, whole = ShapeEngine("fp16"), ShapeEngine("fp16", fusions=Fusions(stem=True))
    x = ShapeArray((8, 224, 224, 3), dtype=np.dtype(np.uint8))
    weight, bias = ShapeArray((64, 7, 7, 3), layer="conv1"), ShapeArray((64,), layer="conv1")
    shapes = [ops.stem(x, weight, bias, [0.5] * 3, [0.2] * 3).shape for ops in (parts, whole)]
    assert shapes == [(8, 56, 56, 64)] * 2
    assert [record.op for record in parts.records] == ["normalize", "conv2d", "max_pool2d"]
    (stem,) = whole.records
    assert (stem.op, stem.layer, stem.epilogue) == ("stem", "conv1", ("bias", "relu", "max_pool2d"))
    assert stem.problem == parts.records[1].problem
    assert stem.flops == sum(record.flops for record in parts.records[1:])
    assert stem.nbytes == 8 * 224 * 224 * 3 + 2 * 64 * 147 + 4 * 64 + 2 * 8 * 56 * 56 * 64


@pytest.mark.parametrize("precision", PRECISIONS)
def test_linear_becomes_a_convolution_for_many_images(precision: str) -> None:
    images = {N: linear_problem(N, 512, 1000, precision) for N in (0, 1, 8, 9, 15, 16, 256)}
    assert images[0] is images[1] is images[8] is None
    assert (images[9] is None) == (images[15] is None) == (precision == "fp32")
    many = images[256]
    assert many is not None
    assert many.precision == {"fp16": "tf32", "bf16": "tf32"}.get(precision, precision)
    assert (many.input_shape, many.filter_shape, many.output_shape) == (
        (256, 1, 1, 512),
        (1000, 1, 1, 512),
        (256, 1, 1, 1000),
    )
    ops = ShapeEngine(precision)
    ops.linear(ShapeArray((256, 512)), ShapeArray((1000, 512), layer="fc"))
    assert (ops.records[-1].as_conv2d, ops.records[-1].problem, ops.records[-1].layer) == (many, None, "fc")


def test_half_the_bytes_in_half_precision() -> None:
    totals = {}
    for precision in PRECISIONS:
        ops = ShapeEngine(precision)
        bind_shapes(describe("resnet18"))(ops, ShapeArray((1, 224, 224, 3), dtype=ops.arithmetic.storage))
        totals[precision] = sum(record.nbytes for record in ops.records if record.op in ("conv2d", "max_pool2d"))
    assert totals["fp32"] == totals["tf32"] == totals["fp32-tc"]
    assert totals["fp16"] == totals["bf16"]
    assert totals["fp16"] == pytest.approx(totals["fp32"] / 2, rel=1e-3)
