"""What fusion buys, stage by stage, on the NumPy engine."""

import json

import numpy as np
import pytest
from bench_support import MACHINE, QUICK, fused
from helpers import normal

import cupy_resnet
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.engines.shape_engine import ShapeEngine
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.bench.fusion import FusionReport, measure_fusion
from cupy_resnet.proof.bench.listings import list_fusion
from cupy_resnet.proof.bench.stages import STAGES, bind_stage, stage_records


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnet20"])
def test_every_stage_computes_the_same(model):
    network, ops = describe(model, num_classes=10), NumpyEngine("float64")
    state = random_state_dict(network)
    x = normal((2, 40, 40, 3)).astype(np.float64)
    expected = None
    for stage in STAGES:
        logits, features = bind_stage(stage, network, state, ops)(stage.wrapper(ops), x)
        expected = logits if expected is None else expected
        np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-10)
        assert features.shape == (2, network.num_features)


def operations(model, stage):
    """How often each operation occurs in a stage; a convolution with what is fused behind it."""
    counts = {}
    for record in stage_records(stage, describe(model), (1, 32, 32, 3)):
        name = "+".join([record.op, *record.epilogue])
        counts[name] = counts.get(name, 0) + 1
    return counts


def test_stages_of_resnet18_kernel_by_kernel():
    # 20 convolutions: the stem, two in each of 8 blocks, 3 shortcuts; ReLU behind the stem, 8 first ones, 8 additions
    pools = {"max_pool2d": 1, "global_avg_pool2d": 1, "linear": 1}
    standard, add_relu, conv_bn_relu, conv_bn, everything = (operations("resnet18", stage) for stage in STAGES)
    assert standard == {"conv2d": 20, "batch_norm2d": 20, "add": 8, "relu": 17} | pools
    assert add_relu == {"conv2d": 20, "batch_norm2d": 20, "add_relu": 8, "relu": 9} | pools
    assert conv_bn_relu == {"conv2d": 11, "batch_norm2d": 11, "conv2d+bias+relu": 9, "add_relu": 8} | pools
    # A shortcut's bias is in that of the convolution that it is added to.
    assert conv_bn == {"conv2d": 3, "conv2d+bias": 8, "conv2d+bias+relu": 9, "add_relu": 8} | pools
    assert everything == {"conv2d": 3, "conv2d+bias+relu": 9, "conv2d+bias+residual+relu": 8} | pools


def test_stages_of_resnet50_kernel_by_kernel():
    # 53 convolutions: the stem, three in each of 16 blocks, 4 shortcuts
    pools = {"max_pool2d": 1, "global_avg_pool2d": 1, "linear": 1}
    standard, _, conv_bn_relu, conv_bn, everything = (operations("resnet50", stage) for stage in STAGES)
    assert standard == {"conv2d": 53, "batch_norm2d": 53, "add": 16, "relu": 49} | pools
    assert conv_bn_relu == {"conv2d": 20, "batch_norm2d": 20, "conv2d+bias+relu": 33, "add_relu": 16} | pools
    assert conv_bn == {"conv2d": 4, "conv2d+bias": 16, "conv2d+bias+relu": 33, "add_relu": 16} | pools
    assert everything == {"conv2d": 4, "conv2d+bias+relu": 33, "conv2d+bias+residual+relu": 16} | pools


def test_first_and_last_stage_are_those_of_load():
    network = describe("resnet20")
    for stage, fuse in ((STAGES[0], False), (STAGES[-1], True)):
        model = cupy_resnet.load("resnet20", random_state_dict(network), engine="numpy", fuse=fuse)
        loaded = [step.record for step in model.explain((3, 3, 32, 32))][1:]
        assert [(r.op, r.output_shape, r.epilogue, r.nbytes) for r in loaded] == [
            (r.op, r.output_shape, r.epilogue, r.nbytes) for r in stage_records(stage, network, (3, 32, 32, 3))
        ]


def test_every_stage_moves_fewer_bytes_than_the_one_before():
    for model in ("resnet18", "resnet50"):
        moved = [sum(r.nbytes for r in stage_records(stage, describe(model), (64, 224, 224, 3))) for stage in STAGES]
        assert moved == sorted(moved, reverse=True)
        assert moved[0] > 1.5 * moved[-1]


def test_a_wrapper_forwards_everything_else():
    for stage in STAGES:
        ops = stage.wrapper(ShapeEngine())
        assert ops.name == "shapes"
        with pytest.raises(AttributeError):
            ops.nothing  # noqa: B018


def test_fusion_on_the_processor():
    report = measure_fusion("resnet20", 2, engine="numpy", effort=QUICK)
    assert [stage.name for stage in report.stages] == [stage.name for stage in STAGES]
    assert len(report.torch) == 4
    for each in report.stages + report.torch:
        assert each.wrong is None
        assert each.error < 1e-5
        assert each.device_ms == []
        assert each.device is None
        assert each.time.count == 5
    assert [report.rival(stage) is not None for stage in report.stages] == [True, False, False, True, False]
    assert report.rival(report.stages[3]).name.startswith("folded-")
    assert report.stages[0].operations == 70
    stored = json.loads(json.dumps(report.to_dict()))
    assert FusionReport.from_dict(stored) == report
    with pytest.raises(ValueError, match="format is 'bench'"):
        FusionReport.from_dict(stored | {"format": "bench"})
    del stored["stages"]
    with pytest.raises(ValueError, match="lacks stages"):
        FusionReport.from_dict(stored)


def test_a_stage_that_computes_something_else_has_no_gain(monkeypatch):
    right = NumpyEngine.add_relu
    monkeypatch.setattr(NumpyEngine, "add_relu", lambda self, x, y: right(self, x, y * np.float32(1.001)))
    report = measure_fusion("resnet20", 1, engine="numpy", effort=QUICK)
    assert [stage.wrong is None for stage in report.stages] == [True, False, False, False, True]
    assert "relative error" in report.gain(report.stages[1]).reason
    assert list_fusion(report).rows[1][4] == "–"


def test_on_a_gpu_host_and_gpu_time_are_told_apart():
    stages = [fused("standard", 4.0, 3.0), fused("+ add-ReLU", 3.5, 2.0)]
    torchs = [fused("eager-nchw", 5.0, 6.0, stage="standard"), fused("eager-nhwc", 7.0, 4.5, stage="standard")]
    report = FusionReport(
        machine=MACHINE, model="resnet18", N=64, size=224, engine="cuda", precision="fp32", stages=stages, torch=torchs
    )
    found = list_fusion(report)
    assert found.header == (
        *("stage", "operations", "MB moved", "host, ms", "GPU, ms", "gain", "torch: host, ms", "torch: GPU, ms"),
    )
    assert found.rows[0] == ("standard", "10", "1.00", "4.00", "3.00", "", "7.00", "4.50 (eager-nhwc)")
    assert found.rows[1] == ("+ add-ReLU", "10", "1.00", "3.50", "2.00", "1.50×", "–", "–")
