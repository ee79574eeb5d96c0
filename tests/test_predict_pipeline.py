"""`predict` while it runs: order, look-ahead, memory, threads, early ends, numbers that are not finite."""

import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from predict_support import STATE, counted, decoding_threads, pixels, small_model

import cupy_resnet
from cupy_resnet import pipeline, preparation
from cupy_resnet.images import ImageError
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
    ops = model.ops
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
    ops = model.ops

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
