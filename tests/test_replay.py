"""Which calls are repeated, and which go the long way; with stand-ins for CUDA.

That results are right needs a GPU: tests/gpu/test_replays_on_gpu.py.
"""

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from replay_stand_ins import (
    BODY,
    DONE,
    KEY,
    LOGITS,
    RECORD,
    WHOLE,
    Cuda,
    Input,
    Repeating,
    captured,
    cuda,
    direct,
    reading,
    replays,
)

from cupy_resnet.jit import Launch
from cupy_resnet.replay import MAX_REPLAYS, Captured, Passes

__all__ = ["cuda", "direct", "replays"]


def test_nothing_is_repeated_before_it_was_run(cuda: Cuda, replays: Repeating) -> None:
    for x in (Input(), np.zeros((2, 3, 8, 8), np.float32), None):
        assert replays.repeat(x) is None
    assert (cuda.calls, replays.keys) == ([], [])


def test_a_call_counts_as_use_of_its_plan_if_it_was_repeated(cuda: Cuda, direct: Repeating) -> None:
    for _ in range(2):
        direct.repeat(Input())
    assert direct.keys == [KEY, KEY]
    direct.repeat(Input("float16"))
    direct.repeat(Input(), "out (3, 10)")
    assert direct.keys == [KEY, KEY]


def test_other_errors_of_a_capture_are_not_swallowed(cuda: Cuda, replays: Repeating) -> None:
    def capture() -> Captured:
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        replays.note(cuda.passes, Input(), [reading(Input())], capture)


def test_the_first_input_is_not_kept_alive(cuda: Cuda, replays: Repeating) -> None:
    class Array:
        data = SimpleNamespace(ptr=0x1000)

    array = Array()
    alive = weakref.ref(array)
    replays.seen(Input(), [Launch("front", (1,), (32,), (array, 7), 0)])
    assert replays.repeat(Input()) is not None
    del array
    gc.collect()
    assert alive() is None


def test_a_dropped_plans_memory_is_not_held(cuda: Cuda, replays: Repeating) -> None:
    class Logits(SimpleNamespace):
        pass

    def with_logits(graph: int) -> Captured:
        logits = Logits(data=SimpleNamespace(ptr=LOGITS, device_id=1), shape=(2, 10), nbytes=80)
        alive.append(weakref.ref(logits))
        return Captured(SimpleNamespace(graphExec=graph), logits, None, [reading(x)])

    alive: list[Any] = []
    x = Input()
    passes = cuda.passes = Passes(KEY, with_logits(BODY), SimpleNamespace(ptr=DONE))
    replays.note(passes, x, [reading(x)], lambda: with_logits(WHOLE))
    gc.collect()
    assert [one() is not None for one in alive] == [True, True]
    replays.forget(passes)
    gc.collect()
    assert [one() is not None for one in alive] == [False, False]


def test_one_plans_end_is_not_anothers(cuda: Cuda, direct: Repeating) -> None:
    other = Passes((3, 8, 8), captured(BODY, LOGITS, []), SimpleNamespace(ptr=DONE))
    x = Input("larger")
    direct.note(other, x, [reading(x)], lambda: captured(WHOLE, LOGITS + 1, [reading(x)]))
    direct.forget(other)
    assert direct.repeat(x) is None
    assert direct.repeat(Input()) is not None


def test_who_waited_for_a_plan_while_it_was_dropped_goes_the_long_way(cuda: Cuda, direct: Repeating) -> None:
    direct.repeat(Input())
    cuda.calls.clear()
    replay = direct._replays[("NCHW",)]
    direct.forget(cuda.passes)
    direct._replays[("NCHW",)] = replay  # the other thread had it in hand before
    assert direct.repeat(Input()) is None
    assert cuda.calls == []


def test_what_is_known_is_not_captured_again(cuda: Cuda, replays: Repeating) -> None:
    x = Input()
    replays.seen(x)

    def fail() -> Captured:
        raise AssertionError("captured twice")

    replays.note(cuda.passes, x, [reading(x)], fail)
    assert replays.repeat(x) is not None


def test_each_signature_has_its_own_front(cuda: Cuda, replays: Repeating) -> None:
    for signature in ("NCHW", "NHWC"):
        x = Input(signature)
        replays.seen(x, [reading(x, f"front of {signature}")])
    for signature in ("NHWC", "NCHW"):
        assert replays.repeat(Input(signature)) is not None
        (front,) = [made[2] for made in cuda.calls if made[0] == "read_from"]
        assert front == f"front of {signature}"
        cuda.calls.clear()
    assert replays.repeat(Input("float16")) is None
    assert cuda.calls == []


def test_only_a_front_that_is_one_launch_which_reads_the_callers_array_is_repeated(
    cuda: Cuda, replays: Repeating
) -> None:
    x = Input()
    copied = reading(Input(address=0x5000))
    for launches in ([], [copied], [reading(x), copied], [copied, reading(x)], [Launch("front", (1,), (32,), (), 0)]):
        replays.seen(x, launches)
        assert replays.repeat(x) is None, launches
    odd = Input("odd")
    replays.seen(odd)
    replays.seen("of NumPy", [reading(x)])
    assert replays.repeat(x) is None
    assert replays.repeat(odd) is None
    assert cuda.calls == []


def test_the_oldest_of_too_many_signatures_of_a_plan_is_forgotten(cuda: Cuda, replays: Repeating) -> None:
    other = Passes((3, 8, 8), captured(BODY, LOGITS, []), SimpleNamespace(ptr=DONE))
    larger = Input("larger")
    replays.note(other, larger, [reading(larger)], lambda: captured(WHOLE, LOGITS + 1, [reading(larger)]))
    inputs = [Input(str(i)) for i in range(MAX_REPLAYS + 2)]
    for x in inputs:
        replays.seen(x)
    assert [replays.repeat(x) is None for x in inputs] == [True, True] + [False] * MAX_REPLAYS
    cuda.passes = other
    assert replays.repeat(larger) is not None


def test_a_threads_first_call_goes_the_long_way(cuda: Cuda, direct: Repeating) -> None:
    """CUDA may not have been started there."""
    results: list[Any] = []

    def work() -> None:
        results.append(direct.repeat(Input()))
        direct.seen(Input())
        results.append(direct.repeat(Input()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [None, "new (2, 10)"]


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("why", ["another device", "capturing", "unsuitable out", "forgotten"])
def test_where_it_goes_the_long_way_nothing_is_enqueued(cuda: Cuda, direct: Repeating, why: str, often: bool) -> None:
    if often:
        direct.repeat(Input())
        cuda.calls.clear()
    cuda.device = 0 if why == "another device" else 1
    cuda.capturing = why == "capturing"
    if why == "forgotten":
        direct.forget(cuda.passes)
    assert direct.repeat(Input(), "out (3, 10)" if why == "unsuitable out" else None) is None
    assert cuda.calls == []
    assert not cuda.passes.lock.locked()


def test_an_error_frees_the_plan_for_others_and_says_when_it_ends_cuda(cuda: Cuda, direct: Repeating) -> None:
    sticky = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime", "status": 700})
    for _ in range(2):
        cuda.failure = None
        direct.repeat(Input())
        for failure, message in ((ValueError("an ordinary one"), "ordinary"), (sticky("illegal"), "restart it")):
            cuda.failure = failure
            with pytest.raises((ValueError, RuntimeError), match=message):
                direct.repeat(Input())
            assert cuda.calls[-1] == RECORD
            assert not cuda.passes.lock.locked()
