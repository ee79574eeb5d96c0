"""What is enqueued when a call is repeated, and in which order; with stand-ins for CUDA."""

from typing import Any

import numpy as np
import pytest
from replay_stand_ins import (
    BODY,
    DONE,
    LOGITS,
    RECORD,
    STREAM,
    WAIT,
    WHOLE,
    Cuda,
    Input,
    Repeating,
    captured,
    cuda,
    direct,
    reading,
    replays,
    writing,
)

from cupy_resnet.replay import MAX_ADDRESSES, Captured

__all__ = ["cuda", "direct", "replays"]

# Results that the last kernel leaves where they belong --------------------------------------------------------------


def reads(graph: int, address: int) -> tuple[Any, ...]:
    return "read_from", f"graph {graph}", "front", address


def writes(graph: int, address: int) -> tuple[Any, ...]:
    return "write_to", f"graph {graph}", "linear", 1, address


def run(graph: int, stream: int = STREAM) -> tuple[Any, ...]:
    return "graphLaunch", f"graph {graph}", stream


def test_a_repeated_call_is_a_launch_and_the_next_results_place_is_sought_while_the_gpu_is_busy(
    cuda: Cuda, direct: Repeating
) -> None:
    assert direct.repeat(Input()) == "new (2, 10)"
    first = [reads(1, 0x1000), writes(1, 0xAAA0), WAIT, run(1), RECORD, writes(1, 0xCCC1)]
    assert cuda.calls == first
    for n in (1, 2):
        cuda.calls.clear()
        assert direct.repeat(Input()) == f"spare {n}"
        assert cuda.calls == [WAIT, run(1), RECORD, writes(1, 0xCCC1 + n)]


def test_each_of_a_few_addresses_has_a_graph_of_its_own(cuda: Cuda, direct: Repeating) -> None:
    inputs = [Input(address=0x1000 * n) for n in range(1, MAX_ADDRESSES + 2)]
    for n in range(MAX_ADDRESSES):
        cuda.calls.clear()
        assert direct.repeat(inputs[n]) == "new (2, 10)"
        assert cuda.calls[0] == reads(n + 1, inputs[n].address)
    for n in range(MAX_ADDRESSES):
        cuda.calls.clear()
        assert direct.repeat(inputs[n]) == f"spare {n + 1}"
        assert cuda.calls[:2] == [WAIT, run(n + 1)]
    cuda.calls.clear()
    assert direct.repeat(inputs[-1]) == "new (2, 10)"
    assert cuda.calls[0] == reads(1, inputs[-1].address), "that of the oldest address is told this one"
    cuda.calls.clear()
    assert direct.repeat(inputs[0]) == "new (2, 10)"
    assert cuda.calls[0] == reads(2, inputs[0].address)


def test_a_graph_that_could_not_be_told_an_input_is_not_used_for_another(
    cuda: Cuda, direct: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "read_from", fail, raising=False)
        with pytest.raises(ValueError, match="refused"):
            direct.repeat(Input())
    assert direct.repeat(Input()) == "new (2, 10)"
    assert cuda.calls[0] == reads(2, 0x1000)


def test_on_the_default_stream_a_pass_follows_the_one_before_anyway(cuda: Cuda, direct: Repeating) -> None:
    direct.repeat(Input())
    cuda.library.current = 0
    record = "eventRecord", DONE, 0
    direct.repeat(Input())
    cuda.calls.clear()
    direct.repeat(Input())
    assert cuda.calls[:2] == [run(1, 0), record]
    cuda.passes.stream = 0x99  # of a pass of this plan that was not repeated
    cuda.calls.clear()
    direct.repeat(Input())
    assert cuda.calls[:3] == [("streamWaitEvent", 0, DONE), run(1, 0), record]


def test_results_go_right_to_an_array_of_the_callers(cuda: Cuda, direct: Repeating) -> None:
    direct.repeat(Input())
    for tells in ([writes(1, 0xBBB0)], []):
        cuda.calls.clear()
        assert direct.repeat(Input(), "out (2, 10)") == "out (2, 10)"
        assert cuda.calls == [*tells, WAIT, run(1), RECORD]
    cuda.calls.clear()
    assert direct.repeat(Input()) == "new (2, 10)", "not the spare of before, which the kernel does not know any more"
    assert cuda.calls[:2] == [writes(1, 0xAAA0), WAIT]


def test_what_was_sought_for_one_stream_is_not_given_to_another(cuda: Cuda, direct: Repeating) -> None:
    direct.repeat(Input())
    cuda.library.current = 0x99
    assert direct.repeat(Input()) == "new (2, 10)"
    assert direct.repeat(Input()) == "spare 2"


def test_without_room_for_the_next_results_these_are_there(cuda: Cuda, direct: Repeating) -> None:
    cuda.library.room_for_spares = False
    for _ in range(2):
        cuda.calls.clear()
        assert direct.repeat(Input()) == "new (2, 10)"
        assert cuda.calls[-3:] == [WAIT, run(1), RECORD]


def test_without_room_for_results_nothing_is_enqueued(cuda: Cuda, direct: Repeating) -> None:
    cuda.library.room = False
    assert direct.repeat(Input()) is None
    assert (cuda.calls, direct.keys) == ([], [])


# Results that are copied --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "address"), [(None, 0xAAA0), ("out (2, 10)", 0xBBB0)])
@pytest.mark.parametrize("why", ["several kernels of its kind", "tensor map", "nothing known"])
def test_where_the_last_kernel_cannot_be_told_results_are_copied(
    cuda: Cuda, replays: Repeating, why: str, out: str | None, address: int
) -> None:
    last = {"tensor map": writing(np.zeros(1, "V128")), "nothing known": None}.get(why, writing())
    cuda.last_kernel_is_found = why != "several kernels of its kind"
    replays.seen(Input(), last=last)
    for tells in ([reads(1, 0x2000)], []):
        cuda.calls.clear()
        assert replays.repeat(Input(address=0x2000), out) == (out or "new (2, 10)")
        copy = ("memcpyAsync", address, LOGITS + 1, 80, 3, STREAM)
        assert cuda.calls == [WAIT, *tells, run(1), copy, RECORD]


def test_then_the_graph_is_launched_before_memory_is_sought_and_whoever_comes_next_waits_for_it(
    cuda: Cuda, replays: Repeating
) -> None:
    replays.seen(Input())
    cuda.library.room = False
    assert replays.repeat(Input()) is None
    assert [made[0] for made in cuda.calls] == ["streamWaitEvent", "read_from", "graphLaunch", "eventRecord"]
    assert not cuda.passes.lock.locked()


@pytest.mark.parametrize("why", ["no bindings", "no kernel", "no room"])
def test_where_a_graph_cannot_be_had_or_told_the_front_is_launched_before_that_of_the_body(
    cuda: Cuda, replays: Repeating, why: str
) -> None:
    captures = []

    def capture() -> Captured:
        captures.append(why)
        if why == "no room":
            raise MemoryError
        return captured(WHOLE, LOGITS + 1, [reading(x)])

    cuda.bindings_are_there, cuda.kernels_are_found = why != "no bindings", why != "no kernel"
    x = Input()
    replays.note(cuda.passes, x, [reading(x)], capture)
    assert captures == ([] if why == "no bindings" else [why])  # a capture that nothing can come of is not begun
    assert replays.repeat(Input(address=0x2000)) is not None
    assert cuda.calls == [
        WAIT,
        ("launched", "front", STREAM, 0x2000),
        ("graphLaunch", BODY, STREAM),
        ("memcpyAsync", 0xAAA0, LOGITS, 80, 3, STREAM),
        RECORD,
    ]
