"""Predictions as a table, JSON, JSON lines or CSV, on stdout or in a file that appears as a whole or not at all."""

import contextlib
import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

from rich.text import Text

from ..prediction import Prediction
from ..weights_store.writing import temporary_file
from .console import make_table, print_table, printable

CSV_COLUMNS = ("index", "path", "rank", "class_index", "wnid", "label", "probability", "error")


class Writer(Protocol):
    """Takes predictions one by one."""

    def add(self, prediction: Prediction) -> None:
        """Writes a prediction, or keeps it until the end."""

    def finish(self) -> None:
        """Writes what was kept; called once, after the last prediction."""


class JsonLinesWriter:
    """One JSON object a line, written as predictions come; ASCII, so that it is the same in every locale."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def add(self, prediction: Prediction) -> None:
        self._file.write(json.dumps(prediction.to_dict()) + "\n")
        self._file.flush()

    def finish(self) -> None:
        pass


class JsonWriter:
    """One JSON array."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._values: list[dict[str, object]] = []

    def add(self, prediction: Prediction) -> None:
        self._values.append(prediction.to_dict())

    def finish(self) -> None:
        self._file.write(json.dumps(self._values, indent=2) + "\n")
        self._file.flush()


class CsvWriter:
    """A line for each class named, written as predictions come; an image that failed has one line with its error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rows = csv.writer(file, lineterminator="\n")
        self._rows.writerow(CSV_COLUMNS)

    def add(self, prediction: Prediction) -> None:
        image = (prediction.index, prediction.path)
        if prediction.error is not None:
            self._rows.writerow((*image, None, None, None, None, None, prediction.error))
        wnids = prediction.wnids or (None,) * len(prediction.labels)
        ranking = zip(prediction.class_indices, wnids, prediction.labels, prediction.probabilities, strict=True)
        for rank, named in enumerate(ranking, 1):
            self._rows.writerow((*image, rank, *named, None))
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()


class TableWriter:
    """A table for people, printed at the end, when the widths of its columns are known."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._table = make_table("image", "prob.", "class", "index", right=("prob.", "index"))

    def add(self, prediction: Prediction) -> None:
        name = Text(printable(prediction.path or f"image {prediction.index}"))
        if prediction.error is not None:
            self._table.add_row(
                name, "error", Text(printable(prediction.error.removeprefix(f"{prediction.path}: ")), "red"), ""
            )
        ranking = zip(prediction.labels, prediction.probabilities, prediction.class_indices, strict=True)
        for rank, (label, probability, index) in enumerate(ranking):
            style = "" if rank else "bold"
            self._table.add_row(
                name if not rank else "", f"{probability:.1%}", Text(printable(label), style), str(index)
            )

    def finish(self) -> None:
        print_table(self._table, self._file)


FORMATS: dict[str, type[TableWriter | JsonWriter | JsonLinesWriter | CsvWriter]] = {
    "table": TableWriter,
    "json": JsonWriter,
    "jsonl": JsonLinesWriter,
    "csv": CsvWriter,
}
STREAMING = ("jsonl", "csv")

_STDOUT = (None, "-", "/dev/stdout")
"""What `--output` calls stdout. The last may be a file by another name, which must not be replaced under its owner."""


def is_stdout(output: str | None) -> bool:
    """Returns whether results go to stdout."""
    return output in _STDOUT


def format_of(output: str | None) -> str:
    """Returns the format that a file's name asks for: ``"table"`` unless it ends in another one's name."""
    suffix = Path(output or "").suffix.lower().removeprefix(".")
    return suffix if suffix in FORMATS else "table"


@contextlib.contextmanager
def opened(output: str | None) -> Iterator[TextIO]:
    """Gives the file to write results to: stdout by any of its names, a device or pipe as it is, else a temporary file.

    The last lies in the folder of `output` and takes its place at the end of the block, unless that raises: whoever
    reads `output` sees what was there before or everything, also if this process is killed.

    Raises:
        OSError: the folder does not exist or cannot be written, or `output` is a folder.
    """
    if output is None or is_stdout(output):
        yield sys.stdout
        return
    path = Path(output).expanduser()
    if path.is_dir():
        raise IsADirectoryError(f"--output {output} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        with _open_text(path) as file:
            yield file
        return
    path = path.resolve()  # a link stays one
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: there is no folder {path.parent}")
    with temporary_file(path.parent) as temporary:
        with _open_text(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _open_text(path: Path) -> TextIO:
    # Names of files may hold bytes that are no UTF-8; they are written as they are.
    return path.open("w", encoding="utf-8", errors="surrogateescape", newline="")


def on_terminal(output: str | None) -> bool:
    """Returns whether results appear on the terminal while they are written."""
    return is_stdout(output) and sys.stdout.isatty()
