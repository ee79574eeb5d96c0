"""Every environment variable the package reads, in one table, with one typed accessor each.

The variables are read when they are needed, never at import, so that a test or a notebook may set them late.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

ENGINES = ("auto", "cuda", "numpy")


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what holds when it is unset or empty, and what it means."""

    name: str
    default: str
    meaning: str


CACHE_DIR = Variable(
    "CUPY_RESNET_CACHE_DIR",
    "the user's cache folder, as platformdirs names it",
    "Folder of everything kept between runs: compiled kernels in its subfolder kernels, converted weights in weights, "
    "measured speeds of this machine in ceilings, the kernels that were fastest on it in tuned.",
)
DISK_CACHE = Variable(
    "CUPY_RESNET_DISK_CACHE",
    "1",
    "0 keeps compiled kernels in memory only: none is read from or written to the cache folder.",
)
ENGINE = Variable(
    "CUPY_RESNET_ENGINE",
    "auto",
    'What engine="auto" means: auto (cuda where a GPU can be used, else numpy), cuda, or numpy.',
)
CUDA_INCLUDE = Variable(
    "CUPY_RESNET_CUDA_INCLUDE",
    "none",
    f"Folders of CUDA headers searched before all others, separated by {os.pathsep!r}.",
)
TEST_DATA = Variable(
    "CUPY_RESNET_TEST_DATA",
    "../shared/data beside the source tree",
    "Folder of photographs, weights and stored logits for the tests; the package itself never reads it.",
)

VARIABLES = (CACHE_DIR, DISK_CACHE, ENGINE, CUDA_INCLUDE, TEST_DATA)
"""The table. A variable that is not in it does not exist."""


def _value(variable: Variable) -> str | None:
    """Returns the variable's text, None where it is unset or blank."""
    return os.environ.get(variable.name, "").strip() or None


def cache_dir() -> Path:
    """Returns the cache folder, which need not exist.

    The result is relative only where the system knows no home folder and the variable is unset; nothing may be
    written there.
    """
    value = _value(CACHE_DIR)
    return Path(value).expanduser().absolute() if value else platformdirs.user_cache_path("cupy_resnet")


def disk_cache() -> bool:
    """Returns whether compiled kernels are kept on disk.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = _value(DISK_CACHE) or DISK_CACHE.default
    if value not in ("0", "1"):
        raise ValueError(f"{DISK_CACHE.name} must be 0 or 1, got {value!r}")
    return value == "1"


def engine() -> str:
    """Returns ``"auto"``, ``"cuda"`` or ``"numpy"``.

    Raises:
        ValueError: the variable names no engine.
    """
    value = (_value(ENGINE) or ENGINE.default).lower()
    if value not in ENGINES:
        raise ValueError(f"{ENGINE.name} must be one of {', '.join(ENGINES)}, got {value!r}")
    return value


def cuda_include() -> tuple[Path, ...]:
    """Returns the header folders the user named, in the order given."""
    value = _value(CUDA_INCLUDE) or ""
    return tuple(Path(part).expanduser() for part in value.split(os.pathsep) if part.strip())


def test_data() -> Path:
    """Returns the tests' data folder, which need not exist."""
    value = _value(TEST_DATA)
    repository = Path(__file__).resolve().parent.parent
    return Path(value).expanduser().absolute() if value else repository.parent / "shared" / "data"
