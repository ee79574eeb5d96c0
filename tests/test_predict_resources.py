"""What `predict` does about memory that is short, and what it shows meanwhile."""

import io
import logging
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from predict_support import encoded, pixels, small_model
from rich.console import Console

import cupy_resnet
from cupy_resnet import jit, preparation, progress
from cupy_resnet.batching import activation_bytes, default_batch_size
from cupy_resnet.engines import checks
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.networks import describe, random_state_dict


@pytest.fixture(scope="module")
def model() -> cupy_resnet.Model:
    return small_model()


def short_of_memory(ops: Any, most: int) -> Any:
    """`ops.softmax`, which has no room for more than `most` images."""
    softmax = ops.softmax

    def limited(logits: np.ndarray) -> np.ndarray:
        if len(logits) > most:
            raise MemoryError("Out of memory allocating 123 bytes")
        return softmax(logits)

    return limited


def test_case_30_batches_that_do_not_fit_are_halved_with_one_warning(model, monkeypatch, caplog) -> None:
    images = [pixels(seed) for seed in range(21)]
    expected = [p.logits for p in model.predict(images)]
    ops = model.ops
    monkeypatch.setattr(ops, "softmax", short_of_memory(ops, 2))
    with caplog.at_level(logging.WARNING):
        predictions = model.predict(images, batch_size=8)
    assert [p.index for p in predictions] == list(range(21))
    for prediction, logits in zip(predictions, expected, strict=True):
        assert_close(prediction.logits, logits, rtol=1e-5, atol=1e-5)
    assert [record.message for record in caplog.records] == [
        "not enough memory for 8 images at once; going on with at most 4"
    ]


def test_case_30_the_smaller_batches_stay(model, monkeypatch) -> None:
    ops = model.ops
    sizes = []
    limited = short_of_memory(ops, 2)
    monkeypatch.setattr(ops, "softmax", lambda logits: sizes.append(len(logits)) or limited(logits))
    model.predict([pixels(seed) for seed in range(16)], batch_size=8)
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]


def test_case_30_no_room_for_one_image_names_what_it_needs(model, monkeypatch) -> None:
    network, ops = model.network, model.ops
    monkeypatch.setattr(ops, "softmax", short_of_memory(ops, 0))
    needed = activation_bytes(network, 16)
    with pytest.raises(MemoryError, match=rf"single image of 16 × 16 pixels.*\({needed} bytes\).*allocating 123 bytes"):
        model.predict([pixels(seed) for seed in range(5)])


def test_the_batch_size_follows_the_free_memory() -> None:
    network = describe("resnet18")
    # BatchNorm behind the stem reads and writes 112 × 112 × 64 floats (3.2 MB), with room for two more of them.
    assert activation_bytes(network, 224) == 4 * 4 * 112 * 112 * 64
    bound = cupy_resnet.load("resnet18", random_state_dict(network), engine="numpy").network
    # Once it is folded, the max-pool moves most: to 56 × 56 × 64.
    assert activation_bytes(bound, 224) == 4 * (3 * 112 * 112 * 64 + 56 * 56 * 64)
    gigabyte = 1 << 30
    assert default_batch_size(network, 224, "cuda", 80 * gigabyte) == 64
    assert default_batch_size(network, 224, "cuda", gigabyte // 2) == 20
    assert default_batch_size(network, 224, "cuda", 0) == 1
    assert default_batch_size(network, 224, "numpy", None) == 8
    assert default_batch_size(describe("resnet20"), 32, "cuda", 80 * gigabyte) == 1024
    assert default_batch_size(describe("resnet20"), 32, "numpy", None) == 64


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet20"])
def test_activation_bytes_bound_what_a_pass_holds(name: str) -> None:
    """Against the peak of NumPy's allocations in an unfused pass, less im2col's columns."""
    network = describe(name)
    model = cupy_resnet.load(name, random_state_dict(network), engine="numpy", fuse=False)
    bound = model.network
    size = network.default_size
    x = np.zeros((1, size, size, 3), np.uint8)

    class Lean(NumpyEngine):
        """Convolutions that only allocate their output."""

        def conv2d(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
            return np.zeros(checks.conv2d_problem(x.shape, weight.shape, **options).output_shape, np.float32)

    lean = Lean()
    tracemalloc.start()
    try:
        bound(lean, lean.normalize(x, (0, 0, 0), (1, 1, 1)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= activation_bytes(network, size) * 1.01


def test_progress_counts_images_and_shows_compilation() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress.image_progress(3, console) as advance:
        advance()
        jit.compile_listeners[-1](jit.CompileEvent("conv2d_direct", "sm_90", ()))
        assert "compiling conv2d_direct" in console.file.getvalue()
        jit.compile_listeners[-1](jit.CompileEvent("conv2d_direct", "sm_90", (), 0.1))
        advance()
    assert "2/3" in console.file.getvalue()
    assert not jit.compile_listeners


@pytest.mark.parametrize("ends", ["whole", "early"])
def test_progress_leaves_nothing_behind(model, ends: str, capsys) -> None:
    threads = threading.active_count()
    results = model.predict([pixels(seed) for seed in range(8)], stream=True, progress=True, batch_size=2)
    next(results)
    print("to stdout")
    list(results) if ends == "whole" else results.close()
    captured = capsys.readouterr()
    assert captured.out == "to stdout\n"
    assert "images" in captured.err
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # rich tells its thread to end and does not wait for it
    assert threading.active_count() == threads
    assert not jit.compile_listeners


def test_progress_knows_how_many_files_there_are(model, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(pixels(number)))
    assert preparation.count_images(tmp_path) == 3
    assert preparation.count_images([tmp_path, str(tmp_path / "1.png")]) == 4
    assert preparation.count_images([tmp_path, pixels(0)]) is None
    assert preparation.count_images(iter([])) is None
