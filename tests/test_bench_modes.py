"""The ladder and whole runs from files, on the NumPy engine; the pages that show results."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from bench_support import MACHINE, QUICK, FakeMeter, fused
from helpers import normal
from PIL import Image

import cupy_resnet
from cupy_resnet.conv2d import PRECISIONS, Conv2dProblem
from cupy_resnet.engines.bfloat16 import to_bfloat16
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof import tables
from cupy_resnet.proof.bench import end_to_end, ladder
from cupy_resnet.proof.bench.end_to_end import EndToEndReport, TorchvisionPipeline, image_files, measure_end_to_end
from cupy_resnet.proof.bench.fusion import FusionReport
from cupy_resnet.proof.bench.ladder import measure
from cupy_resnet.proof.bench.listings import list_end_to_end, list_ladder
from cupy_resnet.proof.bench.precisions import RULES
from cupy_resnet.proof.bench.report import write_json
from cupy_resnet.proof.ladder import Layer, convolutions, library_rungs, parse_problem, rival_precision, rungs

PROBLEM = Conv2dProblem(N=2, H=9, W=9, C=4, K=6, R=3, S=3, pad_h=1, pad_w=1)


# The ladder -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("N=2,H=9,C=4,K=6,R=3,pad=1", {}),
        ("n=2, h=9, c=4, k=6, r=3, pad_h=1, pad_w=1", {}),
        ("N=2,H=9,C=4,K=6,R=3,pad=1,stride=2", {"stride_h": 2, "stride_w": 2}),
        ("N=2,H=9,C=4,K=6,R=3,pad=1,S=1,W=5,groups=2", {"S": 1, "W": 5, "groups": 2}),
        ("N=2,H=9,C=4,K=6,R=3,pad=1,stride_w=2,dilation=2", {"stride_w": 2, "dilation_h": 2, "dilation_w": 2}),
    ],
)
def test_a_convolution_in_words(text, fields):
    assert parse_problem(text) == replace(PROBLEM, **fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks N, H, C, K, R"),
        ("N=2,H=9,C=4,K=6", "lacks R"),
        ("N=2,H=9,C=4,K=6,R=3,color=1", "called color"),
        ("N=2,H=9,C=4,K=6,R=x", "'R=x' is no number"),
        ("N=0,H=9,C=4,K=6,R=3", "N must be at least 1"),
        ("N=2,H=2,C=4,K=6,R=3", "larger than the padded input"),
        ("N=2,H=9,C=4,K=6,R=3,groups=5", "multiples of groups"),
    ],
)
def test_words_that_are_no_convolution(text, words):
    with pytest.raises(ValueError, match=words):
        parse_problem(text)


def test_the_ladder_on_the_processor():
    said = []
    problems = convolutions("resnet20", 2, 32) | {PROBLEM: 1}
    report = measure(problems, engine="numpy", effort=QUICK, show=said.append, model="resnet20", batch=2)
    assert said == [str(problem) for problem in problems]
    layers = [Layer(**layer) for layer in report["layers"]]
    for layer, (problem, count) in zip(layers, problems.items(), strict=True):
        assert (layer.text, layer.count, layer.flops) == (str(problem), count, problem.flops)
        assert layer.kernels == ["numpy"]
        assert layer.libraries == ["onednn", "onednn_bf16"]
        assert all(samples and min(samples) > 0 for samples in layer.samples_ms.values())
    (own,) = rungs(report)
    assert (own.name, own.layers) == ("numpy", len(problems))
    assert own.milliseconds == pytest.approx(sum(layer.median_ms("numpy") for layer in layers))
    assert [rung.name for rung in library_rungs(report)] == ["onednn", "onednn_bf16"]
    assert library_rungs(report)[0].percent_of_cudnn == pytest.approx(100)
    found = list_ladder(report)
    assert [cells[0] for cells in found.rows] == ["numpy", "oneDNN", "oneDNN bf16"]
    assert found.header[-1] == "of oneDNN fp32"
    assert "resnet20, N = 2" in found.title


def test_a_kernel_with_one_wrong_tap_does_not_count(monkeypatch):
    right = NumpyEngine.conv2d

    def broken(self, x, weight, *operands, **geometry):
        weight = weight.copy()
        weight[:, 2, 1] = 0
        return right(self, x, weight, *operands, **geometry)

    monkeypatch.setattr(NumpyEngine, "conv2d", broken)
    report = measure({PROBLEM: 1}, engine="numpy", effort=QUICK)
    (layer,) = report["layers"]
    assert "relative error" in layer["wrong"]["numpy"]
    assert rungs(report) == []
    assert any("does not count" in note for note in list_ladder(report).notes)


def test_a_ladder_of_another_precision():
    report = measure({PROBLEM: 1}, engine="numpy", effort=QUICK, precision="bf16")
    (layer,) = (Layer(**layer) for layer in report["layers"])
    assert layer.kernels == []
    assert layer.rival == "onednn_bf16"
    assert [round(rung.percent_of_cudnn) for rung in library_rungs(report)][1] == 100
    assert layer.text.endswith(", bf16")


def test_the_ladder_of_a_precision_as_accurate_as_float32_has_float32_as_its_rival():
    report = measure({PROBLEM: 1}, engine="numpy", effort=QUICK, precision="fp32-tc")
    (layer,) = (Layer(**layer) for layer in report["layers"])
    assert (layer.kernels, layer.rival) == ([], "onednn")  # the NumPy engine computes in fp32 itself
    assert library_rungs(report)[0].percent_of_cudnn == pytest.approx(100)


@pytest.mark.parametrize("precision", ["tf32", "fp16", "int8"])
def test_a_ladder_without_a_rival_is_refused(precision):
    with pytest.raises(ValueError, match=f"numpy engine .* in fp32, fp32-tc, bf16, not in '{precision}'"):
        measure({PROBLEM: 1}, engine="numpy", effort=QUICK, precision=precision)


def test_every_precision_has_rules_and_a_tolerance_for_the_ladder():
    assert set(ladder.TOLERANCES) == set(PRECISIONS) == set(RULES)
    for name in PRECISIONS:
        assert rival_precision(name) in ladder.TORCH_PRECISIONS["cuda"]


def test_outputs_in_bfloat16_are_compared_by_value():
    expected = normal((2, 3, 3, 4)).astype(np.float64)
    assert 1e-4 < ladder._relative_error(to_bfloat16(expected), expected) < ladder.TOLERANCES["bf16"]
    expected[1, 2] = 0
    assert ladder._relative_error(to_bfloat16(normal((2, 3, 3, 4))), expected) > ladder.TOLERANCES["bf16"]


def test_the_stored_ladder_is_listed():
    stored = tables.load("ladder_fp32")
    assert library_rungs(stored)[0].percent_of_cudnn == pytest.approx(100)
    found = list_ladder(stored)
    names = [cells[0] for cells in found.rows]
    assert names[: len(rungs(stored)) + 1] == [*(rung.name for rung in rungs(stored)), "cuDNN"]
    assert "resnet50, N = 32" in found.title


# From files to labels -------------------------------------------------------------------------------------------------


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photographs"
    (folder / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(7):
        small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
        small.resize((80, 60)).save(folder / ("more" if number % 2 else ".") / f"{number}.jpg")
    return folder


def test_whole_runs_from_files(photographs):
    said = []
    report = measure_end_to_end(
        "resnet20-cifar10", photographs, engine="numpy", batch_size=3, workers=2, effort=QUICK, show=said.append
    )
    assert (report.images, report.batch_size, report.workers, report.engine) == (7, 3, 2, "numpy")
    assert report.megabytes * 1e6 == sum(file.stat().st_size for file in image_files(photographs))
    assert len(report.ours_s) == len(report.rival_s) == 5
    assert report.agreement == 1.0
    assert list(report.stages_ms) == list(end_to_end.STAGES)
    assert min(report.stages_ms.values()) > 0
    assert sum(report.shares.values()) == pytest.approx(1)
    assert report.images_per_second == pytest.approx(7 / np.median(report.ours_s))
    assert said[0] == "the first run, which does not count"
    assert EndToEndReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    found = list_end_to_end(report)
    assert [cells[0] for cells in found.rows] == list(end_to_end.STAGES)
    assert "7 files" in found.notes[0]
    assert "the same class for 100.0%" in found.notes[2]


def test_whole_runs_without_a_rival_have_no_ratio(photographs):
    report = measure_end_to_end("resnet20-cifar10", photographs, engine="numpy", rival=False, effort=QUICK)
    assert report.rival_s == []
    assert report.rival_images_per_second is None
    assert report.agreement is None
    assert "no rival" in report.ratio.reason
    assert len(list_end_to_end(report).notes) == 2


def by_hand(**fields):
    known = {
        "model": "resnet20",
        "precision": "fp32",
        "engine": "numpy",
        "images": 100,
        "megabytes": 1.0,
        "batch_size": 10,
        "workers": 2,
        "ours_s": [1.0] * 5,
        "rival_s": [1.5] * 5,
        "stages_ms": {"decode": 8.0, "preprocess": 4.0, "copy": 1.0, "inference": 7.0},
        "agreement": 1.0,
    }
    return EndToEndReport(machine=MACHINE, **known | fields)


def test_shares_and_what_is_busy():
    report = by_hand()
    assert report.shares == {"decode": 0.4, "preprocess": 0.2, "copy": 0.05, "inference": 0.35}
    # 10 ms an image: two threads have 20 ms and use 12, the engine uses 8 of its 10
    assert report.occupancy == pytest.approx({"threads": 0.6, "engine": 0.8})
    assert report.ratio.value == pytest.approx(1.5)


def test_a_rival_that_sees_other_classes_gives_no_ratio():
    assert "only 98.0% of the images" in by_hand(agreement=0.98).ratio.reason
    assert "differ by" in by_hand(rival_s=[0.9, 1.0, 1.01, 1.02, 1.2]).ratio.reason


def test_the_rivals_pipeline_prepares_images_as_ours_does(photographs):
    model = cupy_resnet.load("resnet20-cifar10", engine="numpy", resize=40)
    network, state = describe("resnet20"), random_state_dict(describe("resnet20"))
    net = cupy_resnet.proof.bench.network.torch_network(network, state)
    pipeline = TorchvisionPipeline(net, model.transforms, end_to_end.check_precision("fp32"), "cpu", 4, 2)
    seen = []
    pipeline._module = lambda x: seen.append(x.clone()) or torch.zeros(len(x), 10)
    files = image_files(photographs)
    pipeline.run(files)
    x = torch.cat(seen)
    assert [len(batch) for batch in seen] == [4, 3]
    assert x.is_contiguous(memory_format=torch.channels_last)
    from cupy_resnet.images import prepare

    for file, found in zip(files, x, strict=True):
        with Image.open(file) as image:
            pixels = prepare(image.convert("RGB"), model.transforms).astype(np.float32) / 255
        expected = (pixels - np.float32(model.transforms.mean)) / np.float32(model.transforms.std)
        np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_folder_without_images(tmp_path):
    with pytest.raises(FileNotFoundError, match="no images"):
        image_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        image_files(tmp_path / "nowhere")


def test_copying_is_a_part_of_inference():
    meter = FakeMeter()
    predictions = [
        cupy_resnet.Prediction(
            index=0, timings=cupy_resnet.prediction.Timings(decode=2e-3, preprocess=1e-3, inference=4e-3)
        )
    ]
    assert end_to_end._stages(predictions, 1.5) == pytest.approx(
        {"decode": 2.0, "preprocess": 1.0, "copy": 1.5, "inference": 2.5}
    )
    assert end_to_end._stages(predictions, 9.0)["inference"] == 0.0
    assert end_to_end._copy_ms("numpy", 32, 4, meter) == 0.0  # nobody waits on this device


# Pages ----------------------------------------------------------------------------------------------------------------


def test_pages_show_fusion_and_whole_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    stages = [fused("standard", 4.0), fused("+ add-ReLU", 2.0)]
    fusion = FusionReport(
        machine=MACHINE, model="resnet18", N=64, size=224, engine="numpy", precision="fp32", stages=stages, torch=[]
    )
    write_json(tmp_path / "fusion.json", fusion.to_dict())
    write_json(tmp_path / "files.json", by_hand().to_dict())
    layer = Layer(
        asdict(PROBLEM), str(PROBLEM), 1, PROBLEM.flops, {"numpy": ""}, {"numpy": [1.0], "onednn_nhwc": [2.0]}
    )
    stored = MACHINE | {"format": "ladder", "model": None, "batch": None, "precision": "fp32"}
    write_json(tmp_path / "one.json", stored | {"layers": [asdict(replace(layer, library="onednn"))]})
    assert "| + add-ReLU | 10 | 1.00 | 2.00 | 2.00× | – |" in tables.table("fusion")
    assert "| decode | 8.00 | 40 % | threads |" in tables.table("files")
    assert "| numpy | 1 | 1.00 |" in tables.table("one")
    assert "| 200 % |" in tables.table("one")
    for name in ("fusion", "files", "one"):
        assert f"raw samples in `notebooks/results/{name}.json`" in tables.table(name)
