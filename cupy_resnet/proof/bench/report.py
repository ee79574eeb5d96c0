"""What a comparison found: plain data with its raw samples, ratios that may be refused, JSON that reads back."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from ...weights_store.writing import write_file
from .statistics import Ratio, Summary, fastest, ratio

Kind = Literal["latency", "stream"]
STREAM_FROM = 8
"""From this batch size on the figure of a row is the ratio of the calls back to back; below, that of single calls."""

FORMAT = "bench"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender in one row.

    Args:
        name: of the contender.
        kernel: the convolution kernel it was told to use; None for a rival.
        first_call_s: seconds from nothing to the first result: loading, moving, folding, capturing, compiling. Our
            kernels may come compiled from the disk cache.
        peak_bytes: the most memory it took, weights included, the input not; None where that is not known.
        error: ‖y − y64‖ / ‖y64‖ of its logits against float64; None where they are not finite.
        wrong: why its times do not count, a clause; None where they do.
        latency_ms: single calls, waited for.
        stream_calls: calls of a run back to back.
        stream_ms: milliseconds per call of each such run.
    """

    name: str
    kernel: str | None
    first_call_s: float
    peak_bytes: int | None
    error: float | None
    wrong: str | None
    latency_ms: list[float]
    stream_calls: int
    stream_ms: list[float]

    @property
    def ours(self) -> bool:
        return self.kernel is not None

    @cached_property
    def latency(self) -> Summary:
        return Summary.of(self.latency_ms)

    @cached_property
    def stream(self) -> Summary:
        return Summary.of(self.stream_ms)

    def summary(self, kind: Kind) -> Summary:
        """Milliseconds of single calls or of calls back to back."""
        return self.latency if kind == "latency" else self.stream


@dataclass(frozen=True, kw_only=True)
class Row:
    """A network at a batch size in a precision.

    Args:
        model: the network's name.
        N: images in a batch.
        size: their height and width in pixels.
        precision, engine: of ours.
        flops: floating-point operations of a pass, a multiply-add counted as two.
        bound_ms: the least time the roofline allows, summed over what `bound_of` says; None where no ceilings were
            given.
        eager_error: the error of torch's eager run in this precision, which decides what is right.
        entries: the contenders.
        failed: name of a contender that could not run, to the reason.
        bound_of: what counts by itself for `bound_ms`: the ``"launches"`` of ours, of which one may compute several
            operations, or in older records every one of the ``"operations"``.
    """

    model: str
    N: int
    size: int
    precision: str
    engine: str
    flops: int
    bound_ms: float | None
    eager_error: float
    entries: list[Entry]
    failed: dict[str, str] = field(default_factory=dict)
    bound_of: Literal["launches", "operations"] = "operations"

    @property
    def kind(self) -> Kind:
        """Which of the two ratios is the row's figure."""
        return "stream" if self.N >= STREAM_FROM else "latency"

    @property
    def ours(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.ours]

    @property
    def rivals(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.ours]

    def fastest_rival(self, kind: Kind) -> Entry | None:
        """The rival, of those whose results are right, with the smallest median; None if there is none."""
        found = fastest((entry.name, entry.summary(kind)) for entry in self.rivals if entry.wrong is None)
        return None if found is None else next(entry for entry in self.entries if entry.name == found[0])

    def ratio(self, entry: Entry, kind: Kind) -> Ratio:
        """How many times as fast `entry` is as the fastest rival, or why that is not said."""
        if entry.wrong is not None:
            return Ratio.refused(f"its results do not count: {entry.wrong}")
        rival = self.fastest_rival(kind)
        if rival is None:
            return Ratio.refused("there is no rival with right results")
        return ratio(entry.summary(kind), rival.summary(kind))

    def images_per_second(self, entry: Entry) -> float:
        """Of calls back to back."""
        return 1e3 * self.N / entry.stream.median

    def percent_of_bound(self, entry: Entry) -> float | None:
        """The least time that the roofline allows, in percent of the time of calls back to back."""
        return None if self.bound_ms is None else 100 * self.bound_ms / entry.stream.median


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole comparison.

    Args:
        machine: as `cupy_resnet.proof.machine.describe_machine` gives it.
        settings: samples, warm-up, seconds, threads and the like.
        rows: in the order they were measured.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        return {"format": FORMAT, **self.machine, "settings": self.settings, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returned.

        Raises:
            ValueError: it is something else; the message says what is missing or unknown.
        """
        if values.get("format") != FORMAT:
            raise ValueError(f"this is no comparison: its format is {values.get('format')!r}, not {FORMAT!r}")
        lacking = {"settings", "rows"} - values.keys()
        if lacking:
            raise ValueError(f"the report lacks {', '.join(sorted(lacking))}")
        rows = []
        for row in values["rows"]:
            entries = [_made(Entry, entry) for entry in row.get("entries", ())]
            rows.append(_made(Row, {**row, "entries": entries}))
        machine = {key: value for key, value in values.items() if key not in ("format", "settings", "rows")}
        return cls(machine=machine, settings=dict(values["settings"]), rows=rows)


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    known = {each.name: each for each in fields(kind)}
    needed = {name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING}
    wrong = sorted((values.keys() - known.keys()) | (needed - values.keys()))
    if wrong:
        raise ValueError(f"{kind.__name__.lower()} of a report: missing or unknown {', '.join(wrong)}")
    return kind(**values)


def read_report(path: Path) -> Report:
    """Reads a stored comparison.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a report of any kind, atomically: indented, numbers of a list on one line, floats to six digits.

    Raises:
        OSError: the file cannot be written.
        ValueError: a number is not finite, which JSON cannot hold.
    """
    text = json.dumps(_rounded(values), indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"\[\s+([-+\d.e,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    write_file(path, text.encode() + b"\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(part) for part in value]
    return value


def to_stored(report: Any, stored_format: str) -> dict[str, Any]:
    """Returns the fields of a report's dataclass as JSON holds them: those of its `machine` beside the others."""
    values = asdict(report)
    return {"format": stored_format, **values.pop("machine"), **values}


def from_stored(kind: type, values: Mapping[str, Any], stored_format: str, what: str) -> dict[str, Any]:
    """Returns the fields of the dataclass `kind` from what `to_stored` returned.

    Raises:
        ValueError: it is something else; the message calls what was expected `what`.
    """
    if values.get("format") != stored_format:
        raise ValueError(f"this is no {what}: its format is {values.get('format')!r}, not {stored_format!r}")
    own = {each.name for each in fields(kind)} - {"machine"}
    if missing := own - values.keys():
        raise ValueError(f"the {what} lacks {', '.join(sorted(missing))}")
    machine = {key: value for key, value in values.items() if key not in own | {"format"}}
    return {"machine": machine, **{key: values[key] for key in own}}
