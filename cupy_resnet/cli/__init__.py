"""The command ``cupy-resnet``: parses, calls the library, prints. Results go to stdout, all else to stderr.

Exit status: 0 all went well; 1 something failed, be it one image of many; 2 the command line is wrong.
"""

import logging
import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import CompileError, EngineUnavailableError
from .bench import bench
from .console import Messages, prepare_streams
from .kernel_list import kernels
from .machine import demo, doctor
from .networks import explain, info, models
from .photographs import predict
from .profile import profile
from .tuning import tune
from .verify import verify
from .weights import convert

logger = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="ResNets on hand-written CUDA kernels: what is in a photograph, and which kernels found it out.",
    epilog="`cupy-resnet demo` shows what this machine can do; `cupy-resnet doctor` what it lacks.",
)  # fmt: skip

for _command in (predict, demo, info, models, explain, convert, kernels, tune, verify, bench, profile, doctor):
    app.command()(_command)


def main() -> None:
    """Runs the command line; an error that a user can act on is one message and exit status 1."""
    prepare_streams()
    try:
        app(prog_name="cupy-resnet")
    except (OSError, ValueError, TypeError, ImportError, MemoryError, CompileError, EngineUnavailableError) as error:
        _fail(error)
    except RuntimeError as error:
        from ..weights_store import WeightsUnavailableError

        from_cuda = type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends")
        if not (from_cuda or isinstance(error, WeightsUnavailableError)):
            raise
        _fail(error)


def _fail(error: BaseException) -> None:
    logger.debug("where it was raised", exc_info=error)
    typer.echo(f"error: {str(error) or type(error).__name__}", err=True)
    sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cupy-resnet {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what is done, and where errors come from, on stderr.")
    ] = False,
) -> None:
    Messages.install(logging.DEBUG if verbose else logging.WARNING)
