"""`predict` while it runs: order, look-ahead, memory, threads, early ends, numbers that are not finite, no room."""

import contextlib
import gc
import io
import logging
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from predict_support import STATE, counted, decoding_threads, encoded, pixels, small_model
from rich.console import Console

import cupy_resnet
from cupy_resnet import jit, pipeline, preparation, progress
from cupy_resnet.batching import activation_bytes, default_batch_size
from cupy_resnet.engines import checks
from cupy_resnet.engines.numpy_engine import NumpyEngine
from cupy_resnet.images import ImageError
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.prediction import NotFiniteError

TINY = {"resize": 4, "crop": 4}


@pytest.fixture(scope="module")
def model() -> cupy_resnet.Model:
    return small_model()


@pytest.fixture(scope="module")
def tiny() -> cupy_resnet.Model:
    """The smallest work per image: 4 × 4 pixels."""
    return small_model(**TINY)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every test here ends with the pools ended."""
    yield
    gc.collect()
    assert not decoding_threads()


def test_order_holds_when_decoding_takes_random_times(model, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, times = preparation.decode, random.Random(0)
    delays = {index: times.choice([0, 0, 0.002, 0.03]) for index in range(60)}
    finished = []

    def slow(source: Any, **options: Any) -> Any:
        time.sleep(delays[source.index])
        finished.append(source.index)
        return decode(source, **options)

    images = [pixels(seed) for seed in range(60)]
    expected = [p.logits for p in model.predict(images)]
    monkeypatch.setattr(preparation, "decode", slow)
    predictions = model.predict(images, batch_size=7, workers=8)
    assert finished != sorted(finished)
    assert [p.index for p in predictions] == list(range(60))
    for prediction, logits in zip(predictions, expected, strict=True):
        assert_close(prediction.logits, logits, rtol=1e-5, atol=1e-5)


def test_the_next_images_are_decoded_while_the_engine_runs(model, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ops = model._alive()
    decode, linear = preparation.decode, ops.linear
    decoded: set[int] = set()
    during: list[set[int]] = []
    gate = threading.Event()

    def watched(source: Any, **options: Any) -> Any:
        if source.index >= 4:
            assert gate.wait(20), "the engine never ran the first batch"
        image = decode(source, **options)
        decoded.add(source.index)
        return image

    def running(*arguments: Any) -> Any:
        gate.set()  # the engine has begun; the second batch is decoded only from here on
        deadline = time.monotonic() + 20
        while len(during) == 0 and not {4, 5, 6, 7} <= decoded and time.monotonic() < deadline:
            time.sleep(0.001)
        during.append(set(decoded))
        return linear(*arguments)

    monkeypatch.setattr(preparation, "decode", watched)
    monkeypatch.setattr(ops, "linear", running)
    assert len(model.predict([pixels(seed) for seed in range(12)], batch_size=4, workers=4)) == 12
    assert {4, 5, 6, 7} <= during[0]


def test_a_batch_is_launched_before_the_one_before_is_collected(model, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    launch, answer = pipeline._Pipeline._launch, pipeline._Pipeline._answer
    monkeypatch.setattr(
        pipeline._Pipeline, "_launch", lambda self, items: events.append("launch") or launch(self, items)
    )
    monkeypatch.setattr(pipeline._Pipeline, "_answer", lambda self, *a: events.append("answer") or answer(self, *a))
    model.predict([pixels(seed) for seed in range(3)], batch_size=1)
    assert events == ["launch", "launch", "answer", "launch", "answer", "answer"]


def test_nothing_happens_before_the_first_result_is_asked_for(model) -> None:
    taken = [0]
    results = model.predict(counted((pixels(seed) for seed in range(9)), taken), stream=True)
    assert taken == [0]
    assert not decoding_threads()
    del results


def test_generators_are_taken_no_further_than_needed(tiny) -> None:
    taken, workers, batch_size = [0], 2, 4
    results = tiny.predict(
        counted((pixels(0) for _ in range(500)), taken), stream=True, workers=workers, batch_size=batch_size
    )
    most = 0
    for number, _ in enumerate(results, start=1):
        most = max(most, taken[0] - number)
    assert number == 500
    assert most <= 2 * batch_size + 2 * workers


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to read its own memory")
def test_20_000_generated_images_need_the_memory_of_a_few(tiny) -> None:
    """Each image is 48 KB: kept, they would be a gigabyte."""
    block = pixels(0, 128, 128)
    images = (np.roll(block, number, axis=1) for number in range(20_000))
    sizes: list[int] = []
    for number, prediction in enumerate(tiny.predict(images, stream=True)):
        assert prediction.index == number
        if number >= 2000 and number % 1000 == 0:
            sizes.append(resident_bytes())
    assert number == 19_999
    assert max(sizes) - sizes[0] < 24 << 20


@pytest.mark.parametrize("consumed", [1, 5, 40])
def test_an_early_end_stops_the_threads(model, consumed: int) -> None:
    taken = [0]
    results = model.predict(counted((pixels(seed) for seed in range(1000)), taken), stream=True, batch_size=4)
    for number, _ in enumerate(results, start=1):
        if number == consumed:
            break
    assert decoding_threads()
    results.close()
    assert not decoding_threads()
    before = taken[0]
    assert before < consumed + 60
    assert list(results) == []
    assert taken == [before]


def test_a_stream_that_is_dropped_stops_its_threads(model) -> None:
    next(iter(model.predict([pixels(0)] * 50, stream=True, batch_size=2)))
    gc.collect()
    assert not decoding_threads()


def test_an_interrupt_stops_the_threads(model, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ops = model._alive()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "linear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.predict([pixels(seed) for seed in range(50)], batch_size=4)
    assert not decoding_threads()
    monkeypatch.undo()
    assert len(model.predict([pixels(0)])) == 1


def test_inputs_that_raise_do_so_after_the_results_before(model) -> None:
    def inputs() -> Iterator[np.ndarray]:
        for seed in range(5):
            yield pixels(seed)
        raise LookupError("the camera is gone")

    found: list[int] = []
    with pytest.raises(LookupError, match="the camera is gone"):
        found.extend(p.index for p in model.predict(inputs(), stream=True, batch_size=3, on_error="record"))
    assert found == [0, 1, 2, 3, 4]


def test_an_error_in_the_middle_of_many(model) -> None:
    def inputs() -> Iterator[Any]:
        for seed in range(40):
            yield b"no image" if seed == 23 else pixels(seed % 5)

    found: list[int] = []
    with pytest.raises(ImageError, match="image 23: "):
        found.extend(p.index for p in model.predict(inputs(), stream=True, batch_size=4))
    assert found == list(range(23))
    recorded = model.predict(inputs(), on_error="record", batch_size=4)
    assert [p.index for p in recorded] == list(range(40))
    assert [p.index for p in recorded if p.error] == [23]


def test_several_threads_use_one_model(model) -> None:
    images = [pixels(seed) for seed in range(12)]
    expected = [p.logits for p in model.predict(images, batch_size=5)]
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        results[index] = model.predict(images, batch_size=5, workers=2)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for predictions in results:
        for prediction, logits in zip(predictions, expected, strict=True):
            np.testing.assert_array_equal(prediction.logits, logits)


def test_a_closed_model_says_so() -> None:
    model = small_model()
    results = model.predict([pixels(seed) for seed in range(20)], stream=True, batch_size=2)
    next(results)
    model.close()
    with pytest.raises(RuntimeError, match="this resnet20 model is closed; load it again"):
        list(results)
    with pytest.raises(RuntimeError, match="this resnet20 model is closed; load it again"):
        model.predict([])


def overflowing() -> dict[str, np.ndarray]:
    """Weights that are finite and overflow in layer2.0 for every image that is not all black.

    Without biases and means a black image (with mean 0) stays zero up to the classifier.
    """
    zero = {key: np.zeros_like(array) for key, array in STATE.items() if key.endswith((".running_mean", ".bias"))}
    huge = {key: np.full_like(STATE[key], 1e25) for key in ("layer2.0.bn1.weight", "layer2.0.bn2.weight")}
    return {**STATE, **zero, **huge, "linear.bias": STATE["linear.bias"]}


def test_case_24_and_25_values_that_are_not_finite_are_errors_that_name_the_layer() -> None:
    model = small_model(overflowing(), mean=(0, 0, 0))
    images = [np.zeros((16, 16, 3), np.uint8), pixels(1), np.zeros((16, 16, 3), np.uint8)]
    message = r"image 1: 10 of 10 logits are not finite numbers; in resnet20 the first .* in the output of layer2\.0\."
    predictions = model.predict(images, on_error="record", batch_size=2)
    assert [p.error is None for p in predictions] == [True, False, True]
    assert predictions[1].label is None
    assert predictions[1].logits is None
    with pytest.raises(NotFiniteError, match=message):
        raise NotFiniteError(predictions[1].error)
    np.testing.assert_array_equal(predictions[0].logits, STATE["linear.bias"])
    results = model.predict(images, stream=True, batch_size=3)
    assert next(results).index == 0
    with pytest.raises(NotFiniteError, match=message):
        next(results)


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
    _, ops = model._alive()
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
    _, ops = model._alive()
    sizes = []
    limited = short_of_memory(ops, 2)
    monkeypatch.setattr(ops, "softmax", lambda logits: sizes.append(len(logits)) or limited(logits))
    model.predict([pixels(seed) for seed in range(16)], batch_size=8)
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]


def test_case_30_no_room_for_one_image_names_what_it_needs(model, monkeypatch) -> None:
    network, ops = model._alive()
    monkeypatch.setattr(ops, "softmax", short_of_memory(ops, 0))
    needed = activation_bytes(network, 16)
    with pytest.raises(MemoryError, match=rf"single image of 16 × 16 pixels.*\({needed} bytes\).*allocating 123 bytes"):
        model.predict([pixels(seed) for seed in range(5)])


def test_the_batch_size_follows_the_free_memory() -> None:
    network = describe("resnet18")
    # BatchNorm behind the stem reads and writes 112 × 112 × 64 floats (3.2 MB), with room for two more of them.
    assert activation_bytes(network, 224) == 4 * 4 * 112 * 112 * 64
    bound = cupy_resnet.load("resnet18", random_state_dict(network), engine="numpy")._alive()[0]
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
    bound, _ = model._alive()
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


def test_an_interrupted_process_ends_at_once(tmp_path: Path) -> None:
    """The interpreter does not hang on the pool's threads when a stream is left open."""
    program = (
        "import numpy as np, predict_support\n"
        "results = predict_support.small_model().predict("
        "(predict_support.pixels(0) for _ in range(10**6)), stream=True)\n"
        "print(next(results).index)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "CUPY_RESNET_ENGINE": "numpy"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_worker_errors_of_other_kinds_are_not_hidden(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("a bug")

    monkeypatch.setattr(preparation, "prepare", broken)
    with (
        pytest.raises(OSError, match="a bug"),
        contextlib.closing(model.predict([pixels(0)], stream=True, on_error="record")) as results,
    ):
        next(results)
