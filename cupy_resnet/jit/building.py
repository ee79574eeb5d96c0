"""From a kernel's name and defines to a cubin, through the cache."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from .. import environment
from ..errors import CompileError
from . import toolchain
from .arch import Arch
from .cache import Entry, KernelCache
from .compiler import COMMON_OPTIONS, compile_source
from .ptxas import KernelResources, parse_resources
from .sources import KernelSource, Program, digest, find_kernel, load_program

logger = logging.getLogger(__name__)

_FORMAT = "1"
"""Part of every key: raised when entries of an older layout must not be read any more."""

Defines = Mapping[str, int | bool | str]
"""Preprocessor macros by name; a bool counts as 1 or 0."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        name: the kernel's.
        arch: what it was compiled for, as ``"sm_90a"``.
        key: the cache key, a sha256 in hex.
        entry: cubin, log and file, as the cache keeps them.
    """

    name: str
    arch: str
    key: str
    entry: Entry

    @property
    def cubin(self) -> bytes:
        """The machine code, an ELF file's bytes."""
        return self.entry.cubin

    @property
    def log(self) -> str:
        """NVRTC's log; kept in the cache, so it is there on a cache hit too."""
        return self.entry.log

    @cached_property
    def resources(self) -> dict[str, KernelResources]:
        """Registers, shared memory and spills by entry function."""
        return parse_resources(self.log)


@dataclass(frozen=True)
class CompileEvent:
    """A compilation that begins (`seconds` is None) or has ended; cache hits have no event.

    Args:
        name, arch, defines: what is compiled.
        seconds: how long it took.
        failed: whether it ended with an error.
    """

    name: str
    arch: str
    defines: tuple[tuple[str, int | bool | str], ...]
    seconds: float | None = None
    failed: bool = False


compile_listeners: list[Callable[[CompileEvent], None]] = []
"""Called, on the thread that compiles, at the beginning and at the end of every compilation."""


@contextlib.contextmanager
def on_compile(listener: Callable[[CompileEvent], None]) -> Iterator[None]:
    """Has `listener` called at the beginning and end of every compilation inside the block, in any thread."""
    compile_listeners.append(listener)
    try:
        yield
    finally:
        compile_listeners.remove(listener)


def compile_kernel(name: str, *, defines: Defines | None = None, arch: str) -> Compiled:
    """Compiles a kernel, or takes it from the cache. Needs no GPU.

    The key holds every byte of the source and of the headers of ours it reaches, all options, NVRTC's version and
    the architecture. Headers of the CUDA toolkit are represented by NVRTC's version.

    Args:
        name: of a file ``kernels_cu/<name>.cu``.
        defines: macros, as ``{"TILE_M": 64}``.
        arch: as ``"sm_90"``, ``"sm_90a"``.

    Raises:
        EngineUnavailableError: no CuPy.
        CompileError: `arch` is below the kernel's minimum or unknown to NVRTC, or the source has an error.
        ValueError: no such kernel, a misspelled architecture, or a define whose name is no identifier.
    """
    kernel = find_kernel(name)
    target, minimum = Arch.parse(arch), Arch.parse(kernel.min_arch_of(defines or {}))
    if not target.provides(minimum):
        exactly = "exactly " if minimum.suffix else "at least "
        raise CompileError(f"kernel {name} needs {exactly}{minimum}, but {arch} was asked for")
    program = load_program(kernel)
    options = _define_options(defines or {})
    key = _key(program, options, target)
    entry = kernel_cache().get(key, name, lambda: _build(kernel, program, options, target, defines or {}))
    return Compiled(name, str(target), key, entry)


def kernel_cache() -> KernelCache:
    """Returns the cache that the environment variables name at this moment."""
    return _cache_at(environment.cache_dir() / "kernels" if environment.disk_cache() else None)


@cache
def _cache_at(folder: Path | None) -> KernelCache:
    return KernelCache(folder)


if hasattr(os, "register_at_fork"):
    # A lock that another thread held at the fork would never be released in the child.
    os.register_at_fork(after_in_child=_cache_at.cache_clear)


def _define_options(defines: Defines) -> tuple[str, ...]:
    options = []
    for name, value in sorted(defines.items()):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{name!r} cannot be defined: it is no C identifier")
        options.append(f"-D{name}={int(value) if isinstance(value, bool) else value}")
    return tuple(options)


def _key(program: Program, options: tuple[str, ...], arch: Arch) -> str:
    headers = [part for header in program.headers for part in header]
    major, minor = toolchain.nvrtc_version()
    parts = [
        _FORMAT,
        f"{major}.{minor}",
        str(arch),
        str(len(COMMON_OPTIONS) + len(options)),
        *COMMON_OPTIONS,
        *options,
        program.name,
        program.text,
        *headers,
    ]
    return digest(part.encode() for part in parts)


def _build(
    kernel: KernelSource, program: Program, options: tuple[str, ...], arch: Arch, defines: Defines
) -> tuple[bytes, str]:
    event = CompileEvent(kernel.name, str(arch), tuple(sorted(defines.items())))
    _notify(event)
    begin = time.perf_counter()
    failed = True
    try:
        result = compile_source(program, options, arch)
        failed = False
    finally:
        seconds = time.perf_counter() - begin
        _notify(CompileEvent(event.name, event.arch, event.defines, seconds, failed))
    logger.info("compiled %s for %s %s in %.2f s", kernel.name, arch, " ".join(options), seconds)
    return result


def _notify(event: CompileEvent) -> None:
    for listener in tuple(compile_listeners):
        listener(event)
