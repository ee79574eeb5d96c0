"""A profile in the Trace Event Format that chrome://tracing and https://ui.perfetto.dev open."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from ...weights_store.writing import write_file
from .results import METHOD, Profile

OPERATIONS, BLOCKS, WHOLE = 1, 2, 3
"""Track numbers, from the top."""


def trace(profile: Profile) -> dict[str, Any]:
    """Returns the operations' medians laid end to end, the network's blocks below them, and the whole pass below.

    The time axis is that of no single run: every operation was timed alone.
    """
    events = [
        _name("process_name", 0, f"{profile.model}, N = {profile.input_shape[0]}, {profile.ceilings.device}"),
        _name("thread_name", OPERATIONS, "operations, each timed alone"),
        _name("thread_name", BLOCKS, "blocks"),
        _name("thread_name", WHOLE, "whole pass, as called"),
    ]
    now = 0.0
    for block, members in groupby(profile.ops, key=lambda op: op.block):
        begin = now
        for op in members:
            arguments = op.to_dict()
            del arguments["samples_us"]
            events.append(_slice(OPERATIONS, op.layer or op.op, op.kernel, now, op.median_us, arguments))
            now += op.median_us
        events.append(_slice(BLOCKS, block, "block", begin, now - begin, {}))
    events.append(_slice(WHOLE, profile.model, "pass", 0.0, profile.median_whole_us, {"samples": profile.samples}))
    about = {"method": METHOD, **{key: str(value) for key, value in profile.machine.items()}}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": kind, "args": {"name": name}}


def _slice(
    track: int, name: str, category: str, begin_us: float, us: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 1, "tid": track, "name": name, "cat": category, "ts": begin_us, "dur": us, "args": arguments
    }  # fmt: skip


def write_trace(profile: Profile, path: Path) -> None:
    """Writes the trace to a file, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_file(path, json.dumps(trace(profile)).encode())
