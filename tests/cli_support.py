"""What the tests of the command line share: running it as a person does, in a process of its own or, quicker, here."""

import logging
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cupy_resnet import cli

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "cupy_resnet"]
MODEL = ("--model", "resnet20-cifar10", "--engine", "numpy")


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def environment(**variables: str) -> dict[str, str]:
    """The caller's environment with the source tree on the path, without color, and `variables`."""
    caller = {key: value for key, value in os.environ.items() if not key.startswith(("CUPY_RESNET_", "FORCE_COLOR"))}
    return caller | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | variables


def run(*arguments: str | Path, folder: Path, stdin: bytes = b"", **variables: str) -> Outcome:
    """Runs one command in `folder`, which also holds its cache."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        cwd=folder,
        env=environment(CUPY_RESNET_CACHE_DIR=str(folder / "cache"), **variables),
        timeout=100,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.decode(errors="surrogateescape"), done.stderr.decode())


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Runs one command in this process, where tests can put other things in its way; leaves logging as it was."""
    monkeypatch.setattr(sys, "argv", ["cupy-resnet", *arguments])
    logger = logging.getLogger("cupy_resnet")
    handlers, level = logger.handlers[:], logger.level
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
    output = capsys.readouterr()
    return Outcome(int(left.value.code or 0), output.out, output.err)


@contextmanager
def running(*arguments: str | Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command with pipes to stdin, stdout and stderr; killed at the end if it still runs.

    It can be interrupted, even if the tests are a background job, which a shell has ignore that.
    """
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment(CUPY_RESNET_CACHE_DIR=str(folder / "cache")),
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def on_terminal(*arguments: str | Path, folder: Path, columns: int) -> str:
    """What a command shows on a terminal, stdout and stderr together."""
    leader, follower = pty.openpty()
    variables = environment(COLUMNS=str(columns), TERM="xterm", CUPY_RESNET_CACHE_DIR=str(folder / "cache"))
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=follower, stderr=follower, cwd=folder, env=variables
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 1 << 16):
            shown += part
    except OSError:  # Linux's way to say that nobody writes any more
        pass
    os.close(leader)
    assert process.wait(60) in (0, 1)
    return shown.decode()
