"""Which plans a model keeps and drops, and when it does without: the bookkeeping, with stand-ins for captured graphs.

What a plan itself does needs a GPU: tests/gpu/test_plans_on_gpu.py.
"""

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_resnet import plan as plan_module
from cupy_resnet.jit import launching
from cupy_resnet.plan import Runner

MIB = 1 << 20


class Pixels:
    """An input as far as a runner looks at it."""

    device = nullcontext()

    def __init__(self, N: int, size: int = 8) -> None:
        self.shape = (N, size, size, 3)


class FakeNetwork:
    """Answers with what it was called with, and counts."""

    name = "fake"

    def __init__(self) -> None:
        self.calls = 0
        self.failure: Exception | None = None

    def __call__(self, ops: Any, x: Pixels, *, mean: Any = None, std: Any = None) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return np.full((x.shape[0], 2), x.shape[1]), np.full((x.shape[0], 4), x.shape[1])


class FakePlan:
    """In the place of a captured graph: it holds `nbytes`, and after `close` it cannot be run any more."""

    made: list["FakePlan"]
    nbytes_of_next = 10 * MIB
    failure: Exception | None = None

    def __init__(self, network: FakeNetwork, ops: Any, x: Pixels, mean: Any, std: Any, replays: "FakeReplays") -> None:
        if FakePlan.failure is not None:
            raise FakePlan.failure
        self.key, self.nbytes, self.runs, self.closed = x.shape[:3], FakePlan.nbytes_of_next, 0, 0
        self.before_run = lambda: None
        self.replays = replays
        FakePlan.made.append(self)

    def run(self, x: Pixels, mean: Any, std: Any, features: bool, out: Any, given: Any) -> tuple[str, Any]:
        self.before_run()
        if self.closed:
            raise MemoryError("the plan was dropped")
        assert x.shape[:3] == self.key
        self.runs += 1
        if given is not None:
            self.replays.noted[given] = self
        return f"planned {x.shape[:3]}", out

    def close(self) -> None:
        self.closed += 1


class FakeReplays:
    """Repeats what was run before, of plans that are not closed."""

    def __init__(self, used: Any) -> None:
        self.used = used
        self.noted: dict[Any, FakePlan] = {}

    def repeat(self, given: Any, out: Any = None) -> Any:
        plan = self.noted.get(given)
        if plan is None or plan.closed:
            return None
        self.used(plan.key)
        return "replayed", given, out


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CuPy's current stream, with plans stood in for. The GPU has 400 MiB, so that plans may hold 100."""
    current = SimpleNamespace(is_capturing=lambda: False)
    cuda = SimpleNamespace(
        get_current_stream=lambda: current,
        runtime=SimpleNamespace(memGetInfo=lambda: (0, 400 * MIB)),
        MemoryPool=lambda: SimpleNamespace(malloc=None),
        using_allocator=nullcontext,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, zeros=np.zeros, int32=np.int32))
    monkeypatch.setattr(launching, "_driver", lambda: None)
    monkeypatch.setattr(plan_module, "_Plan", FakePlan)
    monkeypatch.setattr(plan_module, "Replays", FakeReplays)
    monkeypatch.setattr(FakePlan, "made", [], raising=False)
    monkeypatch.setattr(FakePlan, "nbytes_of_next", 10 * MIB)
    monkeypatch.setattr(FakePlan, "failure", None)
    return current


def make_runner(**options: Any) -> Runner:
    return Runner(FakeNetwork(), SimpleNamespace(name="cuda"), **options)  # type: ignore[arg-type]


def alive() -> list[tuple[int, ...]]:
    """Keys of the plans that were not closed, oldest first."""
    assert all(plan.closed <= 1 for plan in FakePlan.made)
    return [plan.key for plan in FakePlan.made if not plan.closed]


def test_one_plan_a_shape(stream: Any) -> None:
    runner = make_runner()
    for _ in range(3):
        assert runner(Pixels(4))[0] == "planned (4, 8, 8)"
        assert runner(Pixels(4, 16))[0] == "planned (4, 16, 16)"
    assert alive() == [(4, 8, 8), (4, 16, 16)]
    assert [plan.runs for plan in FakePlan.made] == [3, 3]
    assert runner.network.calls == 0


def test_the_least_recently_used_goes_first(stream: Any) -> None:
    runner = make_runner(max_plans=3)
    for N in (1, 2, 3, 1, 4, 2):
        runner(Pixels(N))
    assert [key[0] for key in alive()] == [1, 4, 2]
    assert [plan.key[0] for plan in FakePlan.made] == [1, 2, 3, 4, 2]


def test_plans_are_bounded_by_their_bytes(stream: Any) -> None:
    runner = make_runner(max_bytes=35 * MIB)
    for N in range(1, 7):
        runner(Pixels(N))
    assert [key[0] for key in alive()] == [4, 5, 6]
    FakePlan.nbytes_of_next = 90 * MIB
    runner(Pixels(9))
    assert [key[0] for key in alive()] == [9], "the newest stays whatever its size"


def test_by_default_they_hold_a_quarter_of_the_gpus_memory(stream: Any) -> None:
    runner = make_runner()
    for N in range(1, 13):
        runner(Pixels(N))
    assert [key[0] for key in alive()] == list(range(3, 13))


def test_by_default_there_are_sixteen(stream: Any) -> None:
    FakePlan.nbytes_of_next = MIB
    runner = make_runner()
    for N in range(1, 21):
        runner(Pixels(N))
    assert [key[0] for key in alive()] == list(range(5, 21))


@pytest.mark.parametrize("why", ["off", "NumPy", "empty", "capturing"])
def test_where_there_are_none(stream: Any, why: str) -> None:
    runner = make_runner(plans=why != "off")
    if why == "NumPy":
        runner = Runner(FakeNetwork(), SimpleNamespace(name="numpy"))  # type: ignore[arg-type]
    if why == "capturing":
        stream.is_capturing = lambda: True  # a graph of the caller's own, into which no other may be launched
    N = 0 if why == "empty" else 3
    logits, features = runner(Pixels(N))
    np.testing.assert_array_equal(logits, np.full((N, 2), 8))
    assert features is not None
    assert features.shape == (N, 4)
    assert FakePlan.made == []
    out = np.zeros((N, 2))
    assert runner(Pixels(N), features=False, out=out) == (out, None)
    np.testing.assert_array_equal(out, logits)


def test_drop_closes_all_of_them_and_says_whether_there_were_any(stream: Any) -> None:
    runner = make_runner()
    for N in (1, 2):
        runner(Pixels(N))
    assert runner.drop() is True
    assert alive() == []
    assert runner.drop() is False
    assert runner(Pixels(1))[0] == "planned (1, 8, 8)"
    assert len(FakePlan.made) == 3


@pytest.mark.parametrize("when", ["captured", "run"])
def test_out_of_memory_drops_every_plan_and_goes_on_without(stream: Any, when: str) -> None:
    runner = make_runner()
    for N in (1, 2):
        runner(Pixels(N))
    if when == "captured":
        FakePlan.failure = MemoryError("no room for a plan")
        logits, _ = runner(Pixels(3))
    else:

        def no_room() -> None:
            raise MemoryError("no room for the result")

        FakePlan.made[0].before_run = no_room
        logits, _ = runner(Pixels(1))
    np.testing.assert_array_equal(logits[0], [8, 8])
    assert runner.network.calls == 1
    assert alive() == []


def test_what_does_not_fit_at_all_is_an_error_after_they_are_gone(stream: Any) -> None:
    runner = make_runner()
    runner(Pixels(1))
    FakePlan.failure = runner.network.failure = MemoryError("no room")
    with pytest.raises(MemoryError, match="no room"):
        runner(Pixels(2))
    assert alive() == []


def test_other_errors_leave_them_alone(stream: Any) -> None:
    runner = make_runner()
    runner(Pixels(1))
    FakePlan.failure = ValueError("not a network's input")
    with pytest.raises(ValueError, match="not a network's input"):
        runner(Pixels(2))
    assert alive() == [(1, 8, 8)]


def test_a_plan_that_another_thread_drops_meanwhile_is_no_shortage(stream: Any) -> None:
    """Between finding a plan and running it: the call is answered, and nobody else's plans go with it."""
    runner = make_runner(max_plans=1)
    runner(Pixels(1))
    first = FakePlan.made[0]
    first.before_run = lambda: first.closed or runner(Pixels(2))  # another shape takes its place
    runner(Pixels(1))
    assert len(alive()) == 1
    last = FakePlan.made[-1]
    last.before_run = lambda: runner.drop() and None  # all are dropped, none is left
    runner(Pixels(last.key[0]))


def test_threads_that_meet_the_same_new_shape_share_one_plan(stream: Any) -> None:
    runner = make_runner()
    together = threading.Barrier(4)
    original = FakePlan.__init__

    def slow(self: FakePlan, *arguments: Any) -> None:
        together.wait(10)  # every thread has found that there is none
        original(self, *arguments)

    results: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakePlan, "__init__", slow)
        threads = [threading.Thread(target=lambda: results.append(runner(Pixels(5))[0])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == ["planned (5, 8, 8)"] * 4
    assert alive() == [(5, 8, 8)]
    assert sum(plan.runs for plan in FakePlan.made if not plan.closed) == 4


def test_a_call_is_replayed_once_there_was_one_like_it(stream: Any) -> None:
    runner, given = make_runner(), object()
    assert runner.replay(given) is None
    assert runner(Pixels(4), given=given)[0] == "planned (4, 8, 8)"
    assert runner.replay(given) == ("replayed", given, None)
    assert runner.replay(given, "out") == ("replayed", given, "out")
    assert FakePlan.made[0].runs == 1


def test_dropped_plans_are_not_replayed(stream: Any) -> None:
    runner, first, second = make_runner(max_plans=1), object(), object()
    runner(Pixels(1), given=first)
    runner(Pixels(2), given=second)
    assert runner.replay(first) is None
    assert runner.replay(second) is not None
    runner.drop()
    assert runner.replay(second) is None


def test_replaying_counts_as_use(stream: Any) -> None:
    runner, given = make_runner(max_plans=2), [object() for _ in range(4)]
    for N in (1, 2):
        runner(Pixels(N), given=given[N])
    assert runner.replay(given[1]) is not None
    runner(Pixels(3), given=given[3])
    assert [key[0] for key in alive()] == [1, 3]
    runner._count_as_used((2, 8, 8))  # another thread has dropped that plan meanwhile
    assert runner.planned == [(1, 8, 8), (3, 8, 8)]


def test_a_runner_goes_with_its_last_reference(stream: Any) -> None:
    """And with it what the GPU holds, without waiting for the collector."""
    runner, given = make_runner(), object()
    runner(Pixels(1), given=given)
    alive, replay = weakref.ref(runner), runner.replay
    gc.disable()
    try:
        del runner
        assert alive() is None
    finally:
        gc.enable()
    assert replay(given) == ("replayed", given, None), "who still has it in hand may call it"


def test_without_plans_nothing_is_replayed(stream: Any) -> None:
    runner, given = make_runner(plans=False), object()
    runner(Pixels(1), given=given)
    assert runner.replay(given) is None
