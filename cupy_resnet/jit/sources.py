"""Finds the kernels' sources and everything they include.

A kernel is ``kernels_cu/<name>.cu``; what kernels share lies in ``kernels_cu/include`` and is included with quotes,
``#include "epilogue.cuh"``. The head comment of a ``.cu`` file has two lines that are read by machine::

    // @solves 2-D convolution, fp32, any shape
    // @arch sm_70

A form that needs more says so in a further line: ``// @arch_if ELEMENT=BFloat16 sm_80``.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError
from ..resources import folder
from .arch import Arch

FOLDER = "kernels_cu"

_TAG = re.compile(r"^//\s*@(solves|arch)\s+(\S.*?)\s*$", re.MULTILINE)
_ARCH_IF = re.compile(r"^//\s*@arch_if\s+(\w+)=(\S+)\s+(\w+)\s*$", re.MULTILINE)
_ANY_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and what its head declares.

    Args:
        name: the file's stem, which is also the name of its public ``extern "C"`` function.
        solves: one line for people: the problem the kernel solves.
        min_arch: the least architecture it runs on, as ``"sm_70"``.
        path: the file.
        conditions: (macro, value, architecture): the least architecture of the forms where the macro has that value.
    """

    name: str
    solves: str
    min_arch: str
    path: Path
    conditions: tuple[tuple[str, str, str], ...] = ()

    def min_arch_of(self, defines: Mapping[str, object]) -> str:
        """Returns the least architecture that the form with these macros runs on, as ``"sm_80"``."""
        met = [arch for macro, value, arch in self.conditions if str(defines.get(macro)) == value]
        return max((self.min_arch, *met), key=lambda arch: Arch.parse(arch).number)


@dataclass(frozen=True)
class Program:
    """What NVRTC is given: one main text and the headers it may include by name.

    Args:
        name: the main text's name in messages, as ``"kernels_cu/relu.cu"``.
        text: the main text.
        headers: (name as included, text) of every header of ours that is reached, sorted by name.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def needs_system_headers(self) -> bool:
        """Whether anything is included that is not ours and so has to come from the CUDA toolkit."""
        ours = {name for name, _ in self.headers}
        texts = (self.text, *(text for _, text in self.headers))
        return any(
            bracketed or quoted not in ours for text in texts for quoted, bracketed in _ANY_INCLUDE.findall(text)
        )


def list_kernels() -> list[KernelSource]:
    """Returns every kernel, sorted by name.

    Raises:
        CompileError: a file's head lacks ``@solves`` or ``@arch``.
        FileNotFoundError: the folder of kernels is missing.
    """
    return [_describe(path) for path in sorted(folder(FOLDER).glob("*.cu"))]


def find_kernel(name: str) -> KernelSource:
    """Returns the kernel `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
        CompileError: its head lacks ``@solves`` or ``@arch``.
    """
    # Compared with the folder's listing rather than joined to it: a name is not a path.
    for path in folder(FOLDER).glob("*.cu"):
        if path.stem == name:
            return _describe(path)
    known = ", ".join(sorted(path.stem for path in folder(FOLDER).glob("*.cu"))) or "none"
    raise ValueError(f"there is no kernel {name!r} in {folder(FOLDER)}; there are: {known}")


def load_program(kernel: KernelSource) -> Program:
    """Reads a kernel and every header of ours that it reaches through includes, conditional ones too."""
    text = kernel.path.read_text(encoding="utf-8")
    include_folder = kernel.path.parent / "include"
    headers: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        path = include_folder / name
        # What is not ours is left to NVRTC, which names file and line if it finds no such header either.
        if name in headers or not path.is_file():
            continue
        content = path.read_text(encoding="utf-8")
        headers[name] = f'#pragma once\n#line 1 "{FOLDER}/include/{name}"\n{content}'
        pending += _INCLUDE.findall(content)
    return Program(f"{FOLDER}/{kernel.path.name}", text, tuple(sorted(headers.items())))


def sources_digest() -> str:
    """Returns the sha256 (hex) of all CUDA sources: names and bytes of every ``.cu`` and ``.cuh`` file."""
    root = folder(FOLDER)
    files = sorted(path for path in root.rglob("*") if path.suffix in (".cu", ".cuh"))
    return digest(part for path in files for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()))


def digest(parts: Iterable[bytes]) -> str:
    """Returns the sha256 (hex) of a sequence of byte strings, each preceded by its length: no two sequences collide."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()


def _describe(path: Path) -> KernelSource:
    text = path.read_text(encoding="utf-8")
    tags = dict(_TAG.findall(text))
    for tag, example in (("solves", "2-D convolution, fp32"), ("arch", "sm_70")):
        if tag not in tags:
            raise CompileError(
                f"{path} does not say '// @{tag} …' in its head; write a line such as: // @{tag} {example}"
            )
    conditions = tuple(_ARCH_IF.findall(text))
    try:
        for arch in (tags["arch"], *(arch for _, _, arch in conditions)):
            Arch.parse(arch)
    except ValueError as error:
        raise CompileError(f"{path}, line '// @arch' or '// @arch_if': {error}") from error
    return KernelSource(path.stem, tags["solves"], tags["arch"], path, conditions)
