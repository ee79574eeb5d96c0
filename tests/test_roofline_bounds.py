"""What the roofline allows: of what is launched, fused or apart; and the same in a comparison and in a profile."""

from pathlib import Path
from typing import Any

import pytest
from back_to_back_support import everything, nothing
from profile_support import FakeClock

import cupy_resnet
from cupy_resnet.conv2d import H100, back_to_back
from cupy_resnet.explanation import Explanation, explain
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.bench import comparison, timing
from cupy_resnet.proof.bench.comparison import Plan, _Measurement, rows
from cupy_resnet.proof.bench.timing import Effort
from cupy_resnet.proof.ceilings import Ceilings
from cupy_resnet.proof.profiling import Roof, bounds, profile
from cupy_resnet.proof.profiling.measuring import join
from cupy_resnet.proof.profiling.timed_ops import Timing

LIMITS = Ceilings(
    device="Abacus",
    driver="beads",
    copy_bytes_per_s=4e12,
    matmul_flops_per_s={"float32": 5e13, "tf32": 3e14, "float16": 7e14},
    method={"copy": "by hand", "float32": "by hand", "tf32": "by hand", "float16": "by hand"},
    date="2026-01-02",
)
MEMORY = Roof(4e12, None, "nothing")
"""Of a device that is short of memory alone."""


def launched(name: str = "resnet50", N: int = 8, **options: Any) -> Explanation:
    known: dict[str, Any] = {"device": H100, "precision": "fp16", "ready": True}
    return explain(describe(name), (N, 3, 224, 224), **known | options)


def least_us(explanation: Explanation, roof: Roof) -> float:
    return sum(us for _, us in bounds(explanation, roof))


def test_convolutions_in_one_launch_move_what_lies_outside_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a bottleneck of the first stage and the next one's beginning, beside what they move launched apart."""
    N, side, narrow, wide = 8, 56, 64, 256
    pixels = N * side * side
    nothing(monkeypatch)
    apart = {step.layer: step.record for step in launched()}
    everything(monkeypatch)
    together = next(step for step in launched() if step.layer.startswith("layer1.1.conv2"))
    assert together.layer == "layer1.1.conv2 + layer1.1.conv3 + layer1.2.conv1"
    assert together.kernel == back_to_back.name
    filters = narrow * 9 * narrow + wide * narrow + narrow * wide
    maps = pixels * (narrow + wide + wide + narrow)  # input, residual, output, the next block's beginning
    assert together.record.nbytes == 2 * (filters + maps) + 4 * (narrow + wide + narrow)
    parts = [apart[f"layer1.{layer}"] for layer in ("1.conv2", "1.conv3", "2.conv1")]
    assert sum(part.flops for part in parts) == together.record.flops
    stays = pixels * (2 * narrow + wide)  # the map between, written and read; the output, read again
    assert sum(part.nbytes for part in parts) - together.record.nbytes == 2 * stays


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_bound_falls_by_the_time_of_the_bytes_that_fusing_saves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everything(monkeypatch)
    together = launched(name)
    nothing(monkeypatch)
    apart = launched(name)
    assert together.flops == apart.flops
    saved = sum(step.record.nbytes for step in apart) - sum(step.record.nbytes for step in together)
    assert saved > 0
    assert least_us(apart, MEMORY) - least_us(together, MEMORY) == pytest.approx(saved / 4e12 * 1e6)
    arithmetic = Roof(1e30, 7e14, "float16")
    assert least_us(together, arithmetic) == pytest.approx(least_us(apart, arithmetic))
    assert least_us(together, Roof.of(LIMITS, "fp16")) < least_us(apart, Roof.of(LIMITS, "fp16"))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_an_input_that_is_ready_is_read_as_it_is(precision: str) -> None:
    """It costs no conversion, and where a stem reads it itself, as few bytes as it has."""
    ready, given = launched("resnet18", precision=precision), launched("resnet18", precision=precision, ready=False)
    first = ready[0].record
    assert first.layer == "conv1"
    values = 8 * 3 * 224 * 224
    if precision == "fp32":  # no stem of its own
        assert given[0].op == "nchw_to_nhwc"
        assert [step.record for step in ready] == [step.record for step in given[1:]]
    else:
        assert given[0].record.nbytes - first.nbytes == (4 - 2) * values
        assert [step.record for step in ready[1:]] == [step.record for step in given[1:]]


# In a comparison and in a profile -----------------------------------------------------------------------------------


def work_on_h100(monkeypatch: pytest.MonkeyPatch, name: str, N: int, precision: str, **fields: Any) -> Any:
    """What a comparison with the CUDA engine would store: operations, and the bound in ms."""
    plan = Plan(models=[name], batches=[N], engine="numpy", ceilings=LIMITS, rivals=[])
    for field, value in {"engine": "cuda", **fields}.items():  # which cannot be asked for without a GPU
        object.__setattr__(plan, field, value)
    monkeypatch.setattr(comparison, "find_device", lambda device: 0)
    monkeypatch.setattr(comparison, "describe_device", lambda device: H100)
    unused: Any = None
    return _Measurement(plan, unused, describe(name), Path(), unused, N, precision)._work()


@pytest.mark.parametrize(
    ("name", "N", "precision"),
    [("resnet18", 1, "fp16"), ("resnet18", 32, "fp32"), ("resnet50", 256, "fp16"), ("resnet50", 32, "tf32")],
)
def test_a_comparison_and_a_profile_have_the_same_bound(
    name: str, N: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flops, bound_ms = work_on_h100(monkeypatch, name, N, precision)
    profiled = {}
    for ready in (True, False):
        told = launched(name, N, precision=precision, ready=ready)
        timings = [Timing(step.record.op, step.record.output_shape, 1e-6) for step in told]
        profiled[ready] = join(told, [timings], ["block"] * len(told), Roof.of(LIMITS, precision))
    assert bound_ms == pytest.approx(sum(op.bound_us for op in profiled[True]) / 1e3)
    assert flops == sum(op.flops for op in profiled[True]) == sum(op.flops for op in profiled[False])
    # A profile's own input is float32, channels first: only what reads it differs.
    converted = len(profiled[False]) - len(profiled[True])
    assert converted == (precision == "fp32")
    assert [op.bound_us for op in profiled[True][1:]] == [op.bound_us for op in profiled[False][1 + converted :]]


def test_the_bound_of_a_comparison_is_that_of_the_kernels_that_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = {}
    for kernels in (["auto"], ["conv2d_mma"], ["conv2d_mma", "auto"]):
        flops, bound[tuple(kernels)] = work_on_h100(monkeypatch, "resnet50", 256, "fp16", kernels=kernels)
        assert flops == launched(N=256).flops
    assert bound["auto",] == bound["conv2d_mma", "auto"]
    assert bound["auto",] == pytest.approx(least_us(launched(N=256), Roof.of(LIMITS, "fp16")) / 1e3)
    # Nothing is fused where one kernel is asked for.
    assert bound["conv2d_mma",] > 1.1 * bound["auto",]
    apart = launched(N=256, kernel="conv2d_mma")
    assert bound["conv2d_mma",] == pytest.approx(least_us(apart, Roof.of(LIMITS, "fp16")) / 1e3)


def test_on_the_processor_both_measure_the_same_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "STREAM_RUN_S", 0.001)
    quick = Effort(samples=2, warmup=0, seconds=0.1)
    plan = Plan(models=["resnet20"], batches=[3], engine="numpy", effort=quick, rivals=[], ceilings=LIMITS)
    (row,) = rows(plan)
    model = cupy_resnet.load("resnet20", random_state_dict(describe("resnet20")), engine="numpy")
    profiled = profile(model, 3, samples=1, clock=FakeClock(), limits=LIMITS)
    layout, *ops = profiled.ops
    assert layout.op == "nchw_to_nhwc"  # the input of a comparison is channels last
    assert row.bound_of == "launches"
    assert row.bound_ms == pytest.approx(sum(op.bound_us for op in ops) / 1e3)
    assert row.flops == profiled.flops
    assert profiled.bound_us == pytest.approx(layout.bound_us + 1e3 * row.bound_ms)
    assert profiled.to_dict()["bound_us"] == profiled.bound_us
