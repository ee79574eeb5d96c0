"""Finds the CUDA headers that fit the NVRTC in use.

A wheel-only installation scatters them: ``cuda_fp16.h`` and ``mma.h`` are in one package, ``crt/mma.h``, which the
latter includes, in another, and packages of two CUDA majors may lie side by side. So candidates are filtered by the
major of the NVRTC that is really loaded, and looked into for the two files that tell whether they are complete.
"""

import importlib.util
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import environment
from . import toolchain

_PROBES = ("cuda_fp16.h", "crt/mma.h")

_PACKAGES = {
    12: {"cuda_fp16.h": "nvidia-cuda-runtime-cu12", "crt/mma.h": "nvidia-cuda-nvcc-cu12"},
    13: {"cuda_fp16.h": "'nvidia-cuda-runtime==13.*'", "crt/mma.h": "'nvidia-cuda-crt==13.*'"},
}

_WHEEL_FOLDERS = {12: ("cuda_runtime/include", "cuda_nvcc/include"), 13: ("cu13/include",)}
_VERSION = re.compile(r"^\s*#\s*define\s+(?:CUDART_VERSION|CUDA_VERSION)\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Headers:
    """Where headers were looked for, and what was found.

    Args:
        major: the CUDA major they have to be of.
        folders: include folders for NVRTC, in order.
        searched: every folder considered, with the reason where it was passed over.
        missing: of ``cuda_fp16.h`` and ``crt/mma.h``, those that no folder holds.
    """

    major: int
    folders: tuple[Path, ...]
    searched: tuple[str, ...]
    missing: tuple[str, ...]

    def report(self) -> str:
        """Returns lines for an error message: what was searched, what is missing, and the command that installs it."""
        lines = [f"CUDA {self.major} headers were searched in:"]
        lines += [f"  {line}" for line in self.searched] or ["  no folder at all"]
        if self.missing:
            known = _PACKAGES.get(self.major, _PACKAGES[max(_PACKAGES)])
            packages = " ".join(known[name] for name in self.missing)
            lines.append(f"{' and '.join(self.missing)} not found there. Install with: pip install {packages}")
            lines.append(f"or name a folder that has them in {environment.CUDA_INCLUDE.name}.")
        return "\n".join(lines)


def find_headers() -> Headers:
    """Looks for the headers of the loaded NVRTC's major.

    Searched in this order: the folders the user named, NVIDIA's wheels, ``$CUDA_HOME``, ``$CUDA_PATH``,
    ``/usr/local/cuda``, what ``cuda.pathfinder`` knows (conda and system packages), and last CuPy's own copy of
    libcu++ for ``cuda/std`` and ``nv/target``. The search never fails: kernels without system includes need none.

    Raises:
        EngineUnavailableError: no CuPy.
        CompileError: no NVRTC.
    """
    major = toolchain.nvrtc_version()[0]
    folders: list[Path] = []
    searched: list[str] = []

    def consider(path: Path, *, trusted: bool) -> None:
        if path in folders:
            return
        if not path.is_dir():
            searched.append(f"{path} (no such folder)")
            return
        found = None if trusted else _cuda_major(path)
        if trusted or found == major:
            folders.append(path)
            searched.append(str(path))
        else:
            reason = f"of CUDA {found}" if found else "tells no CUDA version"
            searched.append(f"{path} ({reason}, passed over)")

    for path in environment.cuda_include():
        consider(path, trusted=True)
    for root in _wheel_roots():
        for part in _WHEEL_FOLDERS.get(major, (f"cu{major}/include",)):
            consider(root / part, trusted=True)
    for path in _toolkits():
        consider(path, trusted=False)
    for path in _pathfinder_folders():
        consider(path, trusted=False)
    missing = tuple(name for name in _PROBES if not any((path / name).is_file() for path in folders))

    extras = [path / "cccl" for path in folders] + [_bundled_libcudacxx()]
    folders += [path for path in extras if path.is_dir()]
    return Headers(major, tuple(folders), tuple(searched), missing)


@cache
def _cuda_major(path: Path) -> int | None:
    """Returns the CUDA major an include folder is of, None where it does not say."""
    for name in ("cuda_runtime_api.h", "cuda.h"):
        header = path / name
        if header.is_file():
            match = _VERSION.search(header.read_text(encoding="utf-8", errors="replace"))
            if match:
                return int(match[1]) // 1000
    return None


def _wheel_roots() -> list[Path]:
    """Returns every ``site-packages/nvidia``: a namespace package, so there may be several."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _toolkits() -> list[Path]:
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [Path(place) / "include" for place in named if place]


def _pathfinder_folders() -> list[Path]:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return []
    folders = []
    for component in ("cudart", "nvcc"):
        try:
            place = find_nvidia_header_directory(component)
        except (RuntimeError, OSError, KeyError):
            place = None
        if place:
            folders.append(Path(place))
    return folders


def _bundled_libcudacxx() -> Path:
    return Path(toolchain.import_cupy().__file__).parent / "_core/include/cupy/_cccl/libcudacxx"
