"""What every command prints with: tables and JSON to stdout, messages and progress to stderr."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import jit


class Messages(logging.Handler):
    """Shows the package's log on stderr, as it is at the moment of each message."""

    @classmethod
    def install(cls, level: int) -> None:
        """Makes this the only handler of the package, for messages of `level` and above."""
        logger = logging.getLogger("cupy_resnet")
        logger.handlers[:] = [cls()]
        logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            typer.echo(f"{record.levelname.lower()}: {self.format(record)}", err=True)
        except Exception:
            self.handleError(record)


def prepare_streams() -> None:
    """Lets every name of a file be printed: in UTF-8 its own bytes, elsewhere what the encoding lacks is escaped."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    with contextlib.suppress(AttributeError):  # something else may stand in for stdout
        sys.stdout.reconfigure(errors="surrogateescape" if encoding == "utf8" else "backslashreplace")  # type: ignore[union-attr]


def say(message: str) -> None:
    """Prints a message to stderr."""
    typer.echo(message, err=True)


def print_json(value: Any) -> None:
    """Prints JSON to stdout: ASCII, so that it is the same in every locale."""
    typer.echo(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """Escapes what would move the cursor or cannot be printed: a file may have any name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def make_table(*columns: str, right: tuple[str, ...] = (), header: bool = True) -> Table:
    """Returns a table without lines; the columns named in `right` hold numbers, which are never folded."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
    for column in columns:
        number = column in right
        table.add_column(column, overflow="fold", justify="right" if number else "left", no_wrap=number)
    return table


def print_table(table: Table, file: TextIO | None = None) -> None:
    """Prints a table: a terminal that is too narrow folds its cells, a pipe or file gets whole lines.

    Args:
        table: as `make_table` returns it.
        file: by default stdout.
    """
    console = Console(file=file)
    if console.is_terminal:
        console.print(table)
        return
    console = Console(width=10_000, color_system=None)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), file=file)


def stacked(names: str) -> str:
    """Returns names that plus signs join: for a terminal one a line, since a column of them takes much of its width."""
    return names.replace(" + ", " +\n") if Console().is_terminal else names


def print_fields(fields: dict[str, str]) -> None:
    """Prints names and values in two columns."""
    table = make_table("", "", header=False)
    for name, value in fields.items():
        table.add_row(Text(name, "bold"), Text(value))
    print_table(table)


@contextlib.contextmanager
def working(doing: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's stderr what is being done, and which kernel is being compiled meanwhile.

    Yields:
        A function to call with what is done from now on.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda doing: None
        return
    now = doing
    with console.status(Text(now)) as status:
        # What is printed to stdout meanwhile belongs there; rich would send it to stderr.

        def draw(text: str) -> None:
            # With a spinner it is drawn at once, not at the spinner's next turn: what is soon done is seen, too.
            status.update(Text(text), spinner="dots")

        def show(doing: str) -> None:
            nonlocal now
            now = doing
            draw(now)

        def show_compilation(event: jit.CompileEvent) -> None:
            draw(f"compiling {event.name} for {event.arch}" if event.seconds is None else now)

        with jit.on_compile(show_compilation):
            yield show


@contextlib.contextmanager
def downloading(description: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Shows a download on a terminal's stderr; elsewhere yields None, which is no progress."""
    if not Console(stderr=True).is_terminal:
        yield None
        return
    from ..progress import download_progress

    with download_progress(description) as progress:
        yield progress
