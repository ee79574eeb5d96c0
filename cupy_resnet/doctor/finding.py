"""`Finding`: one thing that was looked at."""

from dataclasses import dataclass
from importlib import metadata

STATUSES = ("ok", "warning", "missing")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: what, in a word or two.
        status: one of `STATUSES`; ``"missing"`` is for what is not there or does not work, needed or not.
        detail: what was found.
        fix: a command, or an instruction where no command can do it; None if nothing is to be done.
    """

    name: str
    status: str
    detail: str
    fix: str | None = None


def version_of(distribution: str) -> str:
    """Returns the version of an installed distribution, in words if it has none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"
