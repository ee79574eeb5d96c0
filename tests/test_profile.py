"""Where the time of a pass goes: joining, medians, bounds and shares, with a clock that says what it is told."""

import statistics
import sys
import types

import numpy as np
import pytest
from profile_support import LIMITS, FakeClock

import cupy_resnet
from cupy_resnet.engines.base import Ops
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.explanation import explain
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.clock import CudaClock, ProcessorClock, clock_of
from cupy_resnet.proof.profiling import ProfiledOp, Roof, profile
from cupy_resnet.proof.profiling.measuring import WARMUP, join
from cupy_resnet.proof.profiling.timed_ops import OPERATIONS, TimedOps, Timing

ROOF = Roof(1e11, 1e12, "float32")


def load(*, fuse=True):
    return cupy_resnet.load("resnet20", random_state_dict(describe("resnet20")), engine="numpy", fuse=fuse)


def timings(explanation, seconds):
    return [Timing(step.record.op, step.record.output_shape, s) for step, s in zip(explanation, seconds, strict=True)]


def test_every_operation_of_an_engine_is_timed():
    untimed = {"asarray", "upload", "to_numpy", "filter", "fusions"}
    public = {name for name in vars(NumpyEngine) if not name.startswith("_") and callable(getattr(NumpyEngine, name))}
    assert public - untimed == OPERATIONS
    assert untimed <= set(vars(Ops))


@pytest.mark.parametrize("fuse", [True, False])
def test_a_profile_has_the_operations_explain_tells(fuse):
    model = load(fuse=fuse)
    result = profile(model, 2, samples=2, clock=FakeClock(), limits=LIMITS)
    steps = model.explain((2, 3, 32, 32))
    assert [(op.layer, op.op, op.problem, op.kernel, op.config, op.flops, op.nbytes) for op in result.ops] == [
        (s.layer, s.op, s.problem, s.kernel, s.config, s.record.flops, s.record.nbytes) for s in steps
    ]
    assert result.flops == steps.flops
    assert (result.fuse, result.input_shape, result.engine, result.precision) == (fuse, (2, 3, 32, 32), "numpy", "fp32")


@pytest.mark.parametrize("fuse", [True, False])
def test_operations_know_their_block(fuse):
    for op in profile(load(fuse=fuse), 1, samples=1, clock=FakeClock(), limits=LIMITS).ops:
        if op.layer.startswith("layer"):
            assert op.layer.startswith(f"{op.block}.")
        elif op.op in ("global_avg_pool2d", "linear"):
            assert op.block == "head"
        elif op.op == "nchw_to_nhwc" or op.layer in ("conv1", "bn1"):
            assert op.block == "stem"
        else:
            assert op.block.startswith("layer") or op.op == "relu"
    shortcuts = [op.block for op in profile(load(), clock=FakeClock(), samples=1, limits=LIMITS).ops if "pad" in op.op]
    assert shortcuts == ["layer2.0", "layer3.0"]


def test_warm_up_passes_do_not_count_and_whole_passes_take_turns():
    clock = FakeClock(alone=[1e-6], as_called=[float(number) for number in range(WARMUP + 4)])
    result = profile(load(), 1, samples=4, clock=clock, limits=LIMITS)
    assert result.whole_us == tuple(1e6 * (WARMUP + number) for number in range(4))
    assert result.median_whole_us == 1e6 * (WARMUP + 1.5)
    assert all(len(op.samples_us) == 4 for op in result.ops)
    assert clock.log == (["as_called"] + ["alone"] * len(result.ops)) * (WARMUP + 4) + ["alone"] * 4  # 4 of nothing


def test_medians_and_shares():
    steps = explain(describe("resnet20"), (1, 3, 32, 32), engine="numpy")
    count = len(steps)
    # The k-th operation takes k + 1 µs, once half of it and once a hundred times as much.
    passes = [timings(steps, [factor * 1e-6 * (k + 1) for k in range(count)]) for factor in (0.5, 100, 1)]
    ops = join(steps, passes, ["block"] * count, ROOF)
    np.testing.assert_allclose([op.median_us for op in ops], np.arange(count) + 1)
    np.testing.assert_allclose(ops[2].samples_us, [1.5, 300, 3])
    total = count * (count + 1) / 2
    np.testing.assert_allclose([op.share for op in ops], (np.arange(count) + 1) / total)
    assert sum(op.share for op in ops) == pytest.approx(1)


def make_op(**changes):
    values = {
        "block": "b", "layer": "l", "op": "o", "problem": "p", "kernel": "k", "config": "c", "flops": 8_000_000,
        "nbytes": 200_000, "samples_us": (20.0, 10.0, 5.0), "bound": "compute", "bound_us": 8.0, "share": 0.5,
    }  # fmt: skip
    return ProfiledOp(**(values | changes))


def test_rates_are_of_the_median():
    op = make_op()
    assert op.tflops == pytest.approx(0.8)  # 8 MFLOP in 10 µs
    assert op.gb_per_s == pytest.approx(20)
    assert op.percent_of_bound == pytest.approx(80)
    assert op.intensity == 40
    stored = op.to_dict()
    assert stored["samples_us"] == (20.0, 10.0, 5.0)
    assert stored["median_us"] == 10
    assert stored["percent_of_bound"] == op.percent_of_bound


@pytest.mark.parametrize(
    ("layer", "short"),
    [
        ("", ""),
        ("conv1", "conv1"),
        ("layer2.0.downsample.0", "layer2.0.downsample.0"),
        ("layer1.0.conv2 + layer1.0.conv3 + layer1.1.conv1", "layer1.0.conv2 + conv3 + layer1.1.conv1"),
        ("layer1.1.conv2 + layer1.10.conv3", "layer1.1.conv2 + layer1.10.conv3"),
        (
            "layer1.0.conv2 + layer1.0.conv3 + layer1.0.downsample.0 + layer1.1.conv1",
            "layer1.0.conv2 + conv3 + downsample.0 + layer1.1.conv1",
        ),
    ],
)
def test_layers_of_one_kernel_name_their_block_once(layer, short):
    assert make_op(layer=layer).short_layer == short


def test_the_bound_is_what_takes_longer():
    assert ROOF.ridge == 10
    assert ROOF.bound(flops=1_000_000, nbytes=1_000_000) == ("memory", pytest.approx(10))
    assert ROOF.bound(flops=50_000_000, nbytes=1_000_000) == ("compute", pytest.approx(50))
    assert ROOF.bound(flops=0, nbytes=1_000) == ("memory", pytest.approx(0.01))


def test_the_roof_of_a_precision():
    assert Roof.of(LIMITS, "fp32") == ROOF
    assert Roof.of(LIMITS, "fp32-tc") == Roof(1e11, 2e12, "tf32 / 3")
    unknown = Roof.of(LIMITS, "fp16")
    assert (unknown.flops_per_s, unknown.ridge) == (None, None)
    assert unknown.bound(flops=10**15, nbytes=1_000_000) == ("memory", pytest.approx(10))
    with pytest.raises(ValueError, match=r"'fp4'.*fp32, fp32-tc"):
        Roof.of(LIMITS, "fp4")


def test_every_precision_of_a_model_has_a_ceiling():
    from cupy_resnet.loading import PRECISIONS

    for precision in set(PRECISIONS) - {"auto"}:
        Roof.of(LIMITS, precision)


def test_a_pass_that_differs_from_what_was_explained_is_refused():
    steps = explain(describe("resnet20"), (1, 3, 32, 32), engine="numpy")
    good = timings(steps, [1e-6] * len(steps))
    other = [*good[:5], Timing("relu", good[5].shape, 1e-6), *good[6:]]
    with pytest.raises(RuntimeError, match=r"operation 5 should be .*'conv2d'.*'relu'"):
        join(steps, [good, other], ["b"] * len(steps), ROOF)
    with pytest.raises(RuntimeError, match=f"operation {len(steps) - 1} .*but the engine ran nothing"):
        join(steps, [good[:-1]], ["b"] * len(steps), ROOF)


def test_timing_changes_no_result():
    engine = NumpyEngine()
    x = np.random.default_rng(0).standard_normal((2, 5, 5, 3), np.float32)
    weight = np.ones((4, 3, 3, 3), np.float32)
    timed = TimedOps(engine, ProcessorClock())
    y = timed.conv2d(timed.asarray(x), timed.filter(weight), padding=1, relu=True)
    np.testing.assert_array_equal(y, engine.conv2d(x, weight, padding=1, relu=True))
    assert (timed.name, [(t.op, t.shape) for t in timed.timings]) == ("numpy", [("conv2d", (2, 5, 5, 4))])
    assert timed.timings[0].seconds > 0


@pytest.mark.parametrize(("name", "channels"), [("resnet18", 3), ("resnet18", 1), ("resnet20", 1)])
def test_a_stem_and_pixels_are_what_explain_tells(name, channels):
    """One channel has one layout only; a stem that is no kernel of its own is its parts."""
    network = describe(name, in_channels=channels, num_classes=4)
    model = cupy_resnet.load(name, random_state_dict(network), engine="numpy")
    result = profile(model, 1, 32, samples=1, clock=FakeClock(), limits=LIMITS)
    parts = ["nchw_to_nhwc"] * (channels > 1) + ["conv2d + bias + relu"] + ["max_pool2d"] * (name == "resnet18")
    assert [op.op for op in result.ops if op.block == "stem"] == parts


class OneKernelStem(NumpyEngine):
    """Says, as the CUDA engine on tensor cores does, that a stem is one kernel."""

    name = "cuda"

    def filter(self, weight):
        return types.SimpleNamespace(weight=super().filter(weight))

    def stem_kernel(self, x_shape, filter_shape):
        return (filter_shape[1:] == (7, 7, x_shape[3])), ""

    def stem(self, x, weight, *operands, **options):
        return super().stem(x, weight.weight, *operands, **options)


def test_a_stem_of_one_kernel_is_timed_as_one():
    engine = OneKernelStem()
    timed = TimedOps(engine, ProcessorClock())
    x, weight = np.ones((2, 3, 32, 32), np.uint8), engine.filter(np.ones((8, 7, 7, 3), np.float32))
    bias, out = np.zeros(8, np.float32), np.empty((2, 8, 8, 8), np.float32)
    y = timed.stem(x.transpose(0, 2, 3, 1), weight, bias, mean=[0.5] * 3, std=[2.0] * 3, out=out)
    assert y is out
    assert [(timing.op, timing.shape) for timing in timed.timings] == [("stem", (2, 8, 8, 8))]


def test_pixels_are_timed_as_the_kernel_that_converts_them():
    timed = TimedOps(NumpyEngine(), ProcessorClock())
    nchw = np.ones((2, 3, 4, 4), np.float32)
    nhwc = np.ones((2, 4, 4, 3), np.float32)
    assert timed.pixels(nhwc) is nhwc
    assert timed.timings == []
    timed.pixels(nchw.transpose(0, 2, 3, 1), mean=[0] * 3, std=[1] * 3)
    timed.pixels(nhwc, [0] * 3, [1] * 3)
    timed.pixels(np.ones((2, 4, 4, 3), np.uint8), out=nhwc)
    assert [timing.op for timing in timed.timings] == ["nchw_to_nhwc", "normalize", "normalize"]


def test_the_sum_on_this_processor_is_about_the_whole():
    result = profile(load(), 4, samples=5, limits=LIMITS)
    assert 0.2 < result.sum_us / result.median_whole_us < 5  # a busy machine may favour either
    assert result.empty_us < 100
    assert statistics.median(result.whole_us) == result.median_whole_us


def test_what_cannot_be_profiled():
    model = load()
    for arguments in ({"batch_size": 0}, {"samples": 0}):
        with pytest.raises(ValueError, match="at least one image and one sample"):
            profile(model, **arguments)
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        profile(model)


def test_kernels_are_summed_slowest_first():
    result = profile(load(), 1, samples=1, clock=FakeClock(alone=[1e-6]), limits=LIMITS)
    sums = result.by_kernel()
    assert list(sums.values()) == sorted(sums.values(), key=lambda value: -value[1])
    assert sum(count for count, _ in sums.values()) == len(result.ops)
    assert sum(time for _, time in sums.values()) == pytest.approx(result.sum_us)
    assert sums["BLAS"] == (1, pytest.approx(1))


class FakeGpu(types.ModuleType):
    """Stands for CuPy: writes down what is asked of the stream and the events. The gate's function waits in a list."""

    def __init__(self):
        super().__init__("cupy")
        log = self.log = []

        class Event:
            def record(self, stream):
                log.append("record")

            def synchronize(self):
                log.append("event synchronize")

        class Stream:
            def synchronize(self):
                log.append("synchronize")

            def launch_host_func(self, function, argument):
                log.append("gate")
                gates.append(lambda: function(argument))

        gates = self.gates = []
        device = type(
            "Device", (), {"__init__": lambda *_: None, "__enter__": lambda _: None, "__exit__": lambda *_: None}
        )
        self.cuda = types.SimpleNamespace(
            Device=device, Event=Event, get_current_stream=Stream, get_elapsed_time=lambda start, stop: 0.25
        )


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_on_a_gpu_all_is_queued_behind_a_gate(gpu):
    def call():
        gpu.log.append("call")
        return "result"

    assert CudaClock(0).alone(call) == ("result", 0.25e-3)
    assert gpu.log == ["synchronize", "gate", "record", "call", "record", "event synchronize"]
    gpu.gates[0]()  # the gate is open: this returns at once, and not after a second


def test_a_failing_call_leaves_the_gate_open(gpu, monkeypatch):
    monkeypatch.setattr("cupy_resnet.proof.clock.GATE_SECONDS", 1000)
    with pytest.raises(ZeroDivisionError):
        CudaClock(0).alone(lambda: 1 / 0)
    gpu.gates[0]()


def test_as_called_on_a_gpu_waits_before_and_after(gpu):
    assert 0 < CudaClock(0).as_called(lambda: gpu.log.append("call")) < 1
    assert gpu.log == ["synchronize", "call", "synchronize"]


def test_the_clock_of_an_engine():
    assert isinstance(clock_of(NumpyEngine()), ProcessorClock)
    clock = clock_of(types.SimpleNamespace(name="cuda", device=3))
    assert isinstance(clock, CudaClock)
    assert clock.device == 3
