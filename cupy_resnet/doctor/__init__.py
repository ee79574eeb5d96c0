"""What this machine has of what the package can use, and for each thing amiss the command that mends it."""

import logging
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__, environment
from . import cuda, storage
from .finding import STATUSES, Finding, version_of

__all__ = ["STATUSES", "Diagnosis", "Finding", "examine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings.

    Args:
        findings: in the order in which one thing needs the other.
        engine: what ``engine="auto"`` means here: ``"cuda"`` or ``"numpy"``.
        works: whether that engine works.
    """

    findings: tuple[Finding, ...]
    engine: str
    works: bool

    @property
    def verdict(self) -> str:
        """One sentence."""
        name = {"cuda": "CUDA", "numpy": "NumPy"}[self.engine]
        if self.works:
            return f"Ready: predictions run on the {name} engine."
        if self.engine == "numpy":
            return "Not ready: something stands in the way of every engine; see above."
        return (
            f"Not ready: the {name} engine would be used, and it cannot work; see above. "
            f"Until then use the NumPy engine: export {environment.ENGINE.name}=numpy"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns what ``--json`` prints."""
        return {
            "works": self.works,
            "engine": self.engine,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(show: Callable[[str], None] = lambda doing: None) -> Diagnosis:
    """Looks at everything. Changes nothing, except that a kernel which ran on a GPU is kept in the cache.

    Args:
        show: told what is being looked at.
    """
    findings: list[Finding] = []
    for name, check in (
        ("package", _package),
        ("engine", _engine),
        ("driver", cuda.examine_driver),
        ("CuPy", cuda.examine_cupy),
        ("GPU", cuda.examine_gpu),
        ("NVRTC", cuda.examine_nvrtc),
        ("headers", cuda.examine_headers),
        ("compiling", cuda.examine_compiling),
        ("running", cuda.examine_running),
        ("cache", storage.examine_cache),
        ("torch", storage.examine_torch),
        ("weights", storage.examine_weights),
        ("embedded", storage.examine_embedded),
    ):
        show(f"examining {name}")
        try:
            findings += check()
        except Exception as error:  # whatever is broken here is to be told, not to end the examination
            logger.debug("%s", name, exc_info=error)
            detail = f"cannot be examined: {error!r}"
            findings.append(Finding(name=name, status="warning", detail=detail, fix="cupy-resnet --verbose doctor"))
    broken = {finding.name for finding in findings if finding.status == "missing"}
    engine = _default_engine()
    needed = {"cuda": {"engine", "CuPy", "GPU", "NVRTC", "compiling", "running"}, "numpy": {"engine"}}[engine]
    return Diagnosis(findings=tuple(findings), engine=engine, works=not broken & needed)


def _default_engine() -> str:
    try:
        wanted = environment.engine()
    except ValueError:
        wanted = "auto"
    return wanted if wanted != "auto" else "numpy" if cuda.obstacle() else "cuda"


def _package() -> Iterator[Finding]:
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("numpy", "pillow"))
    detail = f"cupy-resnet {__version__}, Python {platform.python_version()}, {versions}, {sys.platform}"
    yield Finding(name="package", status="ok", detail=detail)


def _engine() -> Iterator[Finding]:
    try:
        wanted = environment.engine()
    except ValueError as error:
        yield Finding(name="engine", status="missing", detail=str(error), fix=f"unset {environment.ENGINE.name}")
        return
    engine = _default_engine()
    why = f", since {environment.ENGINE.name}={wanted}" if wanted != "auto" else ""
    if engine == "numpy" and not why:
        why = ", the reference on the processor, since no GPU can be used"
    yield Finding(name="engine", status="ok", detail=f"{engine}{why}")
