"""The benchmark on a GPU: every rival runs and is right, events and memory mean what they say, all modes finish."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import run_here

from cupy_resnet.conv2d import VARIANTS, Conv2dProblem
from cupy_resnet.loading import PRECISIONS
from cupy_resnet.proof.bench.comparison import Plan, rows
from cupy_resnet.proof.bench.contenders import Replayed
from cupy_resnet.proof.bench.fusion import measure_fusion
from cupy_resnet.proof.bench.ladder import measure
from cupy_resnet.proof.bench.meters import CudaMeter
from cupy_resnet.proof.bench.stages import STAGES
from cupy_resnet.proof.bench.timing import Effort
from cupy_resnet.proof.ladder import library_rungs, rungs

pytestmark = pytest.mark.gpu

QUICK = Effort(samples=20, warmup=3, seconds=5)


def check_row(plan: Plan, names: list[str]) -> None:
    (row,) = rows(plan)
    assert row.failed == {}
    assert {entry.name: entry.wrong for entry in row.entries} == dict.fromkeys(names)
    for entry in row.entries:
        assert entry.peak_bytes is not None
        assert entry.first_call_s > 0


# In the narrow networks for CIFAR-10 cuDNN's fp32 happens to be more accurate than fp32 on tensor cores (see README).
RIGHT = [("resnet18", name) for name in PRECISIONS if name != "auto"]
RIGHT += [("resnet20", name) for name in PRECISIONS if name not in ("auto", "fp32-tc")]


@pytest.mark.parametrize(("model", "precision"), RIGHT)
def test_ours_and_torchs_kernels_are_right(model: str, precision: str) -> None:
    plan = Plan(
        models=[model], batches=[8], precisions=[precision], rivals=["eager", "graph"], engine="cuda", effort=QUICK
    )
    check_row(plan, ["ours", "eager-nchw", "eager-nhwc", "graph-nhwc"])


def test_the_compiled_rival_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest network alone: compiling takes most of the time of all these tests."""
    # Starting processes that compile takes longer than the few kernels of this network.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    plan = Plan(models=["resnet20"], batches=[8], precisions=["fp16"], rivals=["compile"], engine="cuda", effort=QUICK)
    check_row(plan, ["ours", "compile"])


def test_torchs_switches_decide_whether_tf32_is_used() -> None:
    plan = Plan(models=["resnet18"], batches=[8], rivals=["eager"], engine="cuda", effort=QUICK)
    (row,) = rows(plan)
    assert row.eager_error < 1e-5  # TF32's is above 1e-4


def test_a_replayed_graph_follows_its_input() -> None:
    net = torch.nn.Conv2d(3, 4, 3).cuda()
    with torch.inference_mode():
        xs = [torch.randn(2, 3, 8, 8, device="cuda") for _ in range(3)]
        replayed = Replayed(net, xs[0])
        for x in (*xs, xs[0]):
            torch.testing.assert_close(replayed(x).clone(), net(x))


@pytest.mark.alone
def test_the_device_time_leaves_the_hosts_out() -> None:
    import time

    meter = CudaMeter()
    x = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        time.sleep(0.02)
        torch.matmul(x, x)

    work()
    alone, behind_the_host = (
        min(meter.device_ms(call) for _ in range(10)) for call in (lambda: torch.matmul(x, x), work)
    )
    assert behind_the_host < alone + 5


@pytest.mark.alone
def test_memory_is_seen_whoever_holds_it() -> None:
    """The driver counts every process's memory, and others may come and go meanwhile: hence the median."""
    import cupy

    meter = CudaMeter()
    taken, rest = [], []
    for _ in range(5):
        mark = meter.memory_mark()
        held = [cupy.empty(100 << 20, np.uint8), torch.empty(100 << 20, dtype=torch.uint8, device="cuda")]
        taken.append(meter.memory_peak(mark))
        held.clear()
        rest.append(meter.memory_peak(meter.memory_mark()))
    assert 200 << 20 <= statistics.median(taken) < 260 << 20
    assert statistics.median(rest) < 8 << 20


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_ladder_has_every_kernel_and_torch_in_every_precision(precision: str) -> None:
    problem = Conv2dProblem(N=4, H=28, W=28, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
    report = measure({problem: 1}, engine="cuda", effort=QUICK, precision=precision)
    assert report["layers"][0]["wrong"] == {}
    # All of them can do this one.
    assert [rung.name for rung in rungs(report)] == [
        name for name, variant in VARIANTS.items() if precision in variant.precisions
    ]
    assert [rung.name for rung in library_rungs(report)] == ["cudnn", "cudnn_tf32", "cudnn_fp16", "cudnn_bf16"]


@pytest.mark.alone
def test_fusion_tells_host_and_gpu_time() -> None:
    report = measure_fusion("resnet18", 8, engine="cuda", effort=QUICK)
    assert [stage.name for stage in report.stages] == [stage.name for stage in STAGES]
    for each in report.stages + report.torch:
        assert each.wrong is None
        assert each.device is not None
        assert each.host.median > 0
    times = [min(stage.device_ms) for stage in report.stages]
    assert times[-1] < times[0]


MODES = {
    "rows": (
        *("--batch", "1,8", "--precision", "fp16", "--rivals", "eager,graph"),
        *("--kernels", "auto,conv2d_wmma", "--plot", "a.png"),
    ),
    "ladder": ("--ladder", "--conv", "N=8,H=16,C=32,K=32,R=3,pad=1"),
    "fusion": ("--fusion", "--batch", "8", "--models", "resnet18"),
    "end-to-end": ("--end-to-end", "photographs"),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_command_in_every_mode(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Path("photographs").mkdir()
    for number in range(40):
        Image.new("RGB", (64, 64), (6 * number, 0, 0)).save(f"photographs/{number}.jpg")
    measured = () if mode == "ladder" else ("--models", "resnet20-cifar10")
    common = ("--engine", "cuda", "--samples", "5", "--seconds", "3", "--json", "out.json")
    # In this process, which has torch and compiled kernels already.
    done = run_here(monkeypatch, capsys, "bench", *common, *measured, *MODES[mode])
    assert done.status == 0, done.err
    stored = json.loads(Path("out.json").read_text())
    assert "NVIDIA" in stored["device"]
    assert stored["driver_cuda"]
    assert mode != "rows" or Path("a.png").stat().st_size
