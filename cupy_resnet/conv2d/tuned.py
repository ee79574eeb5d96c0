"""Which configurations were fastest where they were timed: the tables that `heuristics.choose` looks into.

There are two kinds, of one format:

* The user's own, ``tuned/<GPU>-<digest>.json`` in the cache folder, written by `cupy_resnet.tuning`: for one GPU by its
  full name and for one state of the kernels' sources by their digest. A change of any kernel leaves it unused.
* Shipped ones, ``tuned_*.json`` beside this file: for all GPUs of one `family`, and for those with the same processor
  and another memory. Such a table names the digest that it
  was tuned with, but is only a hint, and is still followed after a kernel has changed.

The user's own is asked first. A batch size that neither knows follows the nearest that one of them knows, if that is
near enough (`nearest.FACTOR`); there the user's own comes first again. An entry whose configuration does
not exist any more, or does not apply to the GPU or the batch at hand, is passed over; a file that cannot be read is
ignored with one warning. Looking up imports no CuPy and measures nothing; a file that changes is read again within
`CHECK_SECONDS`.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

from .. import environment
from ..jit import sources_digest
from .configs import Config
from .nearest import by_batch_size, nearest, with_batch_size
from .problem import Conv2dPair, Conv2dProblem, Problem

logger = logging.getLogger(__name__)

FORMAT = 1
APART = "apart"
"""In place of a kernel's name: computed by no single kernel, a problem was faster in the pieces that it is made of."""

CHECK_SECONDS = 1.0
"""How long a table is used before its file is looked at again."""

Key = tuple[Problem, bool]
"""A convolution or a pair of them, and whether kernels that spread a NaN further than they should took part."""

SAME_PROCESSOR = (frozenset({"NVIDIA H100", "NVIDIA H200", "NVIDIA GH200"}),)
"""Families that differ in their memory alone: what is fastest on one is a good choice on the others."""

_FORM = re.compile(r"[ -](\d+GB|HBM\d\w*|PCIe|NVL|SXM\d?)\b.*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fastest of the configurations that were timed on one problem.

    Args:
        problem: the convolution, or several in a row that one kernel may compute; its epilogue, bias and ReLU and
            perhaps a residual, makes no difference, but a shortcut does.
        spread_nan: as in `heuristics.choose`: what was allowed when it was timed.
        variant: name of the fastest kernel, or `APART`.
        config: the fields of its configuration.
        microseconds: median time alone; by that an entry that was chosen in the network need not be the fastest.
        next_microseconds: of the second fastest, None where there was only one, or the choice was made in the network.
        candidates: how many configurations were timed.
    """

    problem: Problem
    spread_nan: bool
    variant: str
    config: Mapping[str, int | str | bool]
    microseconds: float
    next_microseconds: float | None
    candidates: int

    @property
    def key(self) -> Key:
        return self.problem, self.spread_nan

    def reason(self, near: str = "") -> str:
        """Why it is followed where it was measured; without times if `near` says that it was for another batch size."""
        in_network = self.next_microseconds is None and self.candidates > 1
        best = f"{'best in the network' if in_network else 'fastest'} of {self.candidates} timed on this GPU{near}"
        if near:
            return best
        following = "" if self.next_microseconds is None else f" (next best {self.next_microseconds:.1f})"
        return f"{best}, {self.microseconds:.1f} µs{' alone' if in_network else following}"

    def config_among(self, candidates: Sequence[Config]) -> Config | None:
        """Returns the first candidate with the fields of `config`, or None.

        A field with a default that `config` lacks is newer than the table, and may have any value.
        """
        return next((candidate for candidate in candidates if _has(candidate, self.config)), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry as it is written to JSON; fields of the problem that have their default are left out.

        Of convolutions in a row ``problem`` is the first, and has what a `Conv2dPair` says beside it as ``then``.
        """
        problem = _changed(_first(self.problem))
        if isinstance(self.problem, Conv2dPair):
            problem["then"] = {name: value for name, value in _changed(self.problem).items() if name != "first"}
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"problem": problem, "config": dict(self.config)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `as_dict`.

        Raises:
            TypeError, ValueError: fields that are missing, unknown or of a wrong type.
        """
        following = values.get("next_microseconds")
        of_first = dict(values.get("problem", {}))
        then = of_first.pop("then", None)
        first = Conv2dProblem(**of_first)
        problem = first if then is None else Conv2dPair(first, **then)
        entry = cls(**{**values, "problem": problem, "next_microseconds": following})
        numbers = [entry.microseconds, entry.candidates, *([] if following is None else [following])]
        if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
            raise ValueError(f"times and counts must be numbers from 0, got {numbers}")
        if not (isinstance(entry.variant, str) and isinstance(entry.config, dict)):
            raise TypeError(f"variant must be a string and config an object, got {entry.variant!r}, {entry.config!r}")
        if not isinstance(entry.spread_nan, bool):
            raise TypeError(f"spread_nan must be true or false, got {entry.spread_nan!r}")
        return entry


def _first(problem: Problem) -> Conv2dProblem:
    return problem.first if isinstance(problem, Conv2dPair) else problem


def _changed(problem: Problem) -> dict[str, Any]:
    """The fields of a convolution or a pair that do not have their default."""
    values = ((f, getattr(problem, f.name)) for f in fields(problem))
    return {f.name: value for f, value in values if value != f.default}


def _place(entry: Entry) -> tuple[Any, ...]:
    """By which entries are sorted: a pair comes behind the first of its convolutions."""
    pair = entry.problem if isinstance(entry.problem, Conv2dPair) else None
    after = (0, 0, 0, 0) if pair is None else (pair.K, pair.shortcut_channels, pair.shortcut_stride, pair.following)
    return *astuple(_first(entry.problem)), *after, entry.spread_nan


def config_fields(config: Config) -> dict[str, Any]:
    """Returns a configuration's fields, by which tables name it."""
    return asdict(config)  # type: ignore[call-overload]  # configurations are dataclasses


def _has(config: Config, named: Mapping[str, Any]) -> bool:
    """Whether a configuration has the fields `named`, and no others without a default."""
    newer = {f.name for f in fields(config) if f.default is not MISSING} - named.keys()  # type: ignore[arg-type]
    return {name: value for name, value in config_fields(config).items() if name not in newer} == named


@dataclass(frozen=True)
class Table:
    """What one file holds.

    Args:
        gpu: name of the GPU; in a shipped table that of its `family`.
        sources_digest: of the kernels that were timed, as `kernels_digest` gives it.
        entries: by key.
    """

    gpu: str
    sources_digest: str
    entries: Mapping[Key, Entry] = field(default_factory=dict)

    def merged(self, entries: Iterable[Entry]) -> "Table":
        """Returns the table with `entries` in place of those with the same key."""
        return Table(self.gpu, self.sources_digest, {**self.entries, **{entry.key: entry for entry in entries}})

    def dump(self) -> bytes:
        """Returns the content of the table's file: JSON, an entry a line, always in the same order."""
        ordered = sorted(self.entries.values(), key=_place)
        lines = ",".join(f"\n  {json.dumps(entry.as_dict())}" for entry in ordered)
        head = {"format": FORMAT, "gpu": self.gpu, "sources_digest": self.sources_digest}
        start = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in head.items())
        return f'{{\n{start} "entries": [{lines}\n ]\n}}\n'.encode()

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads what `dump` wrote; entries that mean nothing to this version are left out.

        Raises:
            ValueError: not such a file.
        """
        document = json.loads(content)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"not a table of tuned convolutions of format {FORMAT}")
        gpu, sources, listed = (document.get(name) for name in ("gpu", "sources_digest", "entries"))
        if not (isinstance(gpu, str) and isinstance(sources, str) and isinstance(listed, list)):
            raise ValueError("gpu, sources_digest or entries is missing")
        entries = {}
        for values in listed:
            try:
                entry = Entry.from_dict(values)
            except (TypeError, ValueError, AttributeError) as error:
                logger.debug("an entry of the table for %s is passed over: %s", gpu, error)
            else:
                entries[entry.key] = entry
        return cls(gpu, sources, entries)


@dataclass(frozen=True, eq=False)
class Lookup:
    """What is known for one GPU. Two are equal only if they are the same: a decision made with one stays valid for it.

    Args:
        own: the user's entries.
        shipped: tables for the GPU's family, then those for families with the same processor.
    """

    own: Mapping[Key, Entry]
    shipped: Sequence[Table]

    def found(self, problem: Problem, spread_nan: bool) -> Iterator[tuple[Entry, str]]:
        """Yields entries for a convolution or a pair, the most trustworthy first, each with the reason to follow it.

        Those for its very batch size come first, then those for the `nearest` that any table has: what is fastest is
        rather another kernel for other batches than on another GPU of the family. So all parts of a network that were
        tuned together follow one batch size, in what is fused, too.

        Where kernels that spread a NaN are not allowed, an entry for which they took part comes second: if one that
        does not spread it won, it is the fastest without them, too. Whoever asks must check that, and that the
        configuration solves the problem.
        """
        yield from self.exact(problem, spread_nan)
        keys = _keys(with_batch_size(problem, 0), spread_nan)
        N = nearest(problem.N, {N for key in keys for N in self._batch_sizes.get(key, ())})
        if N is not None:
            yield from self._of(with_batch_size(problem, N), spread_nan, f" for N = {N}, the nearest")

    def exact(self, problem: Problem, spread_nan: bool) -> Iterator[tuple[Entry, str]]:
        """Yields those of `found` that are for the very batch size, so that their times are those of the problem."""
        return self._of(problem, spread_nan, "")

    def _of(self, problem: Problem, spread_nan: bool, near: str) -> Iterator[tuple[Entry, str]]:
        keys = _keys(problem, spread_nan)
        for key in keys:
            if key in self.own:
                yield self.own[key], self.own[key].reason(near)
        for table in self.shipped:
            changed = "" if table.sources_digest == kernels_digest() else ", before its kernels changed"
            for key in keys:
                if key in table.entries:
                    yield table.entries[key], f"tuned on {table.gpu}{near}{changed}"

    @cached_property
    def _batch_sizes(self) -> dict[Key, set[int]]:
        """Those that any table knows, by key with a problem of no images."""
        return by_batch_size(chain(self.own, *(table.entries for table in self.shipped)))


def _keys(problem: Problem, spread_nan: bool) -> list[Key]:
    return [(problem, True)] if spread_nan else [(problem, False), (problem, True)]


def family(gpu: str) -> str:
    """Returns which GPUs a shipped table for `gpu` is for: its name up to the size of its memory or its form.

    ``"NVIDIA H100 80GB HBM3"``, ``"NVIDIA H100 PCIe"`` and ``"NVIDIA H100 NVL"`` are all ``"NVIDIA H100"``. A part of a
    GPU, as ``"NVIDIA H100 80GB HBM3 MIG 1g.10gb"``, has fewer multiprocessors and is a family of its own.
    """
    return gpu if "MIG" in gpu.split() else _FORM.sub("", gpu)


def _shipped_for(gpu: str) -> list[Table]:
    own = family(gpu)
    alike = [own, *sorted(name for names in SAME_PROCESSOR if own in names for name in names if name != own)]
    return [table for name in alike for table in _shipped() if table.gpu == name]


@cache
def kernels_digest() -> str:
    """Returns the digest of the kernels' sources, read once per process, or again after `forget`."""
    return sources_digest()


def own_path(gpu: str) -> Path:
    """Returns where the user's own table for `gpu` and the present kernels lies; it need not exist."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_")
    return environment.cache_dir() / "tuned" / f"{name}-{kernels_digest()[:16]}.json"


def read_own(gpu: str) -> Table:
    """Reads the user's own table for `gpu` and the present kernels; an empty one where there is none to be used."""
    path = own_path(gpu)
    empty = Table(gpu, kernels_digest())
    if not path.is_absolute():  # this system knows no home folder
        return empty
    try:
        table = Table.parse(path.read_bytes())
        if (table.gpu, table.sources_digest) != (empty.gpu, empty.sources_digest):
            raise ValueError(f"it is for {table.gpu} and kernels {table.sources_digest[:16] or 'unknown'}")
    except FileNotFoundError:
        return empty
    except (OSError, ValueError, RecursionError) as error:
        if path not in _warned:
            _warned.add(path)
            logger.warning("%s is ignored and will be replaced by the next tuning: %s", path, error)
        return empty
    return table


def lookup(gpu: str) -> Lookup:
    """Returns what is known for the GPU named `gpu`: a dictionary's look-up, unless a file has to be read."""
    known = _known.get(gpu)
    if known is None or time.monotonic() >= known.until:
        with _lock:
            known = _refreshed(gpu)
    return known.lookup


def forget(gpu: str | None = None) -> None:
    """Reads the user's own table for one GPU anew at the next look-up; by default all tables and kernels' sources."""
    with _lock:
        if gpu is not None:
            _known.pop(gpu, None)
            return
        _known.clear()
        kernels_digest.cache_clear()
        _shipped.cache_clear()


def keep(gpu: str, entries: Iterable[Entry]) -> None:
    """Adds entries for as long as the process lives: for where no file can be written."""
    with _lock:
        _kept.setdefault(gpu, {}).update({entry.key: entry for entry in entries})
    forget(gpu)


@contextmanager
def trying(gpu: str, entries: Iterable[Entry]) -> Iterator[None]:
    """Follows entries for as long as the block under it runs, whatever ends it.

    Meanwhile other threads follow them too, and what they capture stays as it is: right, but perhaps not fastest.

    Args:
        gpu: name of the GPU.
        entries: in place of others for the same problems.
    """
    new = {entry.key: entry for entry in entries}
    with _lock:
        before = {key: entry for key, entry in _kept.get(gpu, {}).items() if key in new}
    keep(gpu, new.values())
    try:
        yield
    finally:
        with _lock:
            kept = _kept[gpu]
            for key, entry in new.items():
                if kept.get(key) is not entry:  # another thread has kept what it measured meanwhile
                    continue
                if key in before:
                    kept[key] = before[key]
                else:
                    del kept[key]
        forget(gpu)


@dataclass
class _Known:
    lookup: Lookup
    signature: tuple[Any, ...]
    until: float


_lock = threading.RLock()
_known: dict[str, _Known] = {}
_kept: dict[str, dict[Key, Entry]] = {}
_warned: set[Path] = set()


def _refreshed(gpu: str) -> _Known:
    path = own_path(gpu)
    try:
        stat = path.stat()
        signature: tuple[Any, ...] = (path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except OSError:
        signature = (path,)
    known = _known.get(gpu)
    if known is None or known.signature != signature:
        own = {**read_own(gpu).entries, **_kept.get(gpu, {})}
        known = _Known(Lookup(own, _shipped_for(gpu)), signature, 0.0)
        _known[gpu] = known
    known.until = time.monotonic() + CHECK_SECONDS
    return known


@cache
def _shipped() -> tuple[Table, ...]:
    return tuple(Table.parse(path.read_bytes()) for path in sorted(Path(__file__).parent.glob("tuned_*.json")))
