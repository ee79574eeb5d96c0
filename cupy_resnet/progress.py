"""Progress bars on stderr for work that takes a while."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from . import jit


class _SpeedColumn(ProgressColumn):
    """Images per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s")


@contextlib.contextmanager
def image_progress(total: int | None, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Shows how many images are done, and which kernel is being compiled meanwhile.

    Args:
        total: number of images, None if unknown.
        console: where to show it, stderr by default.

    Yields:
        A function to call once per image.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _SpeedColumn())
    with _progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("images", total=total)

        def show_compilation(event: jit.CompileEvent) -> None:
            progress.update(task, description=f"compiling {event.name}" if event.seconds is None else "images")
            progress.refresh()

        with jit.on_compile(show_compilation):
            yield lambda: progress.advance(task)
        if total is None:
            progress.update(task, total=progress.tasks[0].completed)


@contextlib.contextmanager
def download_progress(description: str, console: Console | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Shows a download; nothing is shown before the first byte.

    Args:
        description: what is downloaded.
        console: where to show it, stderr by default.

    Yields:
        A function to call with the bytes that have arrived and the bytes there are, None if unknown.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with _progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(description, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def _progress(*columns: ProgressColumn, console: Console | None) -> Progress:
    # rich would send what the caller prints to stdout meanwhile to the bar's console, which is stderr.
    console = Console(stderr=True) if console is None else console
    return Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
