"""The benchmark on a GPU: every rival runs and is right, events and memory mean what they say, all modes finish."""

import json

import numpy as np
import pytest
import torch
from cli_support import run

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


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "auto"])
@pytest.mark.parametrize("model", ["resnet18", "resnet20"])
def test_ours_and_every_rival_are_right(model: str, precision: str) -> None:
    plan = Plan(
        models=[model],
        batches=[8],
        precisions=[precision],
        rivals=["eager", "graph", "compile"],
        engine="cuda",
        effort=QUICK,
    )
    (row,) = rows(plan)
    assert row.failed == {}
    assert {entry.name: entry.wrong for entry in row.entries} == dict.fromkeys(
        ["ours", "eager-nchw", "eager-nhwc", "graph-nhwc", "compile"]
    )
    for entry in row.entries:
        assert entry.peak_bytes is not None
        assert entry.first_call_s > 0
        # back to back is no slower than waiting for every call, but for noise
        assert entry.stream.median < 1.2 * entry.latency.median


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


def test_the_device_time_leaves_the_hosts_out() -> None:
    import time

    meter = CudaMeter()
    x = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        time.sleep(0.02)
        torch.matmul(x, x)

    work()
    alone = meter.device_ms(lambda: torch.matmul(x, x))
    assert meter.device_ms(work) < alone + 5


def test_memory_is_seen_whoever_holds_it() -> None:
    import cupy

    meter = CudaMeter()
    mark = meter.memory_mark()
    held = [cupy.empty(100 << 20, np.uint8), torch.empty(100 << 20, dtype=torch.uint8, device="cuda")]
    assert 200 << 20 <= meter.memory_peak(mark) < 260 << 20
    held.clear()
    assert meter.memory_peak(meter.memory_mark()) < 8 << 20


def test_the_ladder_has_every_kernel_and_torch_in_every_precision() -> None:
    problem = Conv2dProblem(N=4, H=28, W=28, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1)
    report = measure({problem: 1}, engine="cuda", effort=QUICK)
    assert report["layers"][0]["wrong"] == {}
    assert [rung.name for rung in rungs(report)] == [
        name for name, variant in VARIANTS.items() if name in report["layers"][0]["configs"]
    ]
    assert [rung.name for rung in library_rungs(report)] == ["cudnn", "cudnn_tf32", "cudnn_fp16", "cudnn_bf16"]


def test_fusion_tells_host_and_gpu_time() -> None:
    report = measure_fusion("resnet18", 16, engine="cuda", effort=QUICK)
    assert [stage.name for stage in report.stages] == [stage.name for stage in STAGES]
    for each in report.stages + report.torch:
        assert each.wrong is None
        assert each.device is not None
        assert each.host.median > 0
    times = [stage.time.median for stage in report.stages]
    assert times[-1] < times[0]


def test_the_command_in_every_mode(tmp_path) -> None:
    from PIL import Image

    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(40):
        Image.new("RGB", (64, 64), (6 * number, 0, 0)).save(folder / f"{number}.jpg")
    common = ("bench", "--engine", "cuda", "--models", "resnet20-cifar10", "--samples", "5", "--seconds", "3")
    for mode in (
        ("--batch", "1,8", "--rivals", "eager,graph", "--kernels", "auto,conv2d_direct", "--plot", "a.png"),
        ("--ladder", "--batch", "8"),
        ("--fusion", "--batch", "8"),
        ("--end-to-end", str(folder)),
    ):
        done = run(*common, *mode, "--json", "out.json", folder=tmp_path)
        assert done.status == 0, done.err
        stored = json.loads((tmp_path / "out.json").read_text())
        assert "NVIDIA" in stored["device"]
        assert stored["driver_cuda"]
