"""The tables of the pages are those of the stored measurements, and the measurements say what the project claims."""

import itertools
import re
import statistics
from pathlib import Path

import pytest

from cupy_resnet.conv2d import VARIANTS
from cupy_resnet.proof import tables
from cupy_resnet.proof.bench.report import read_report
from cupy_resnet.proof.ladder import Layer, convolutions, rungs

FP32 = [name for name, variant in VARIANTS.items() if "fp32" in variant.precisions]
"""The rungs that the stored ladder is about."""


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.parent.name)
def test_pages_show_what_was_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table:" in text
    assert tables.render(text) == text, "run: python -m cupy_resnet.proof.tables"


def test_the_ladder_covers_every_layer_and_every_kernel() -> None:
    report = tables.load("ladder_fp32")
    measured = {layer["text"] for layer in report["layers"]}
    assert measured == {str(problem) for problem in convolutions(report["model"], report["batch"])}
    assert len(measured) == 23
    assert [rung.name for rung in rungs(report)] == FP32


def test_each_rung_is_faster_than_the_one_before_on_the_layers_both_support() -> None:
    report = tables.load("ladder_fp32")
    layers = [Layer(**layer) for layer in report["layers"]]
    for lower, upper in itertools.pairwise(FP32):
        both = [layer.text for layer in layers if lower in layer.samples_ms and upper in layer.samples_ms]
        times = {rung.name: rung.milliseconds for rung in rungs(report, both)}
        assert times[upper] < times[lower], (lower, upper)


@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_the_network_in_fp16_is_right_and_faster_than_every_rival(model: str) -> None:
    report = read_report(tables.RESULTS / f"network_fp16_{model}.json")
    assert [row.N for row in report.rows] == [1, 8, 32, 64, 128, 256]
    for row in report.rows:
        ours, *rivals = row.entries
        assert (ours.name, ours.wrong, row.failed) == ("ours", None, {})
        for rival in rivals:
            assert statistics.median(ours.stream_ms) < statistics.median(rival.stream_ms), (row.N, rival.name)
            assert statistics.median(ours.latency_ms) < statistics.median(rival.latency_ms), (row.N, rival.name)


@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_every_launch_of_256_images_reaches_60_percent_of_what_bounds_it(model: str) -> None:
    shares = [int(share) for share in re.findall(r"\| (\d+) % \|$", tables.launches(model), re.MULTILINE)]
    assert len(shares) >= 10
    assert min(shares) >= 60


def test_the_network_in_fp32_is_right_and_with_more_than_one_image_faster_than_every_rival() -> None:
    report = read_report(tables.RESULTS / "network_fp32.json")
    expected = list(itertools.product(("resnet18", "resnet50"), (1, 32, 256)))
    assert [(row.model, row.N) for row in report.rows] == expected
    for row in report.rows:
        ours, *rivals = row.entries
        assert (ours.name, ours.wrong, row.precision, row.failed) == ("ours", None, "fp32", {})
        for rival in rivals if row.N > 1 else ():
            assert statistics.median(ours.stream_ms) < statistics.median(rival.stream_ms), (row.N, rival.name)
            assert statistics.median(ours.latency_ms) < statistics.median(rival.latency_ms), (row.N, rival.name)
