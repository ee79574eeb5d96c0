"""Compiles many kernels for many architectures and tells what each takes: the command ``cupy-resnet kernels``."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CompileError
from .arch import Arch
from .building import Defines, compile_kernel
from .ptxas import KernelResources
from .sources import KernelSource


@dataclass(frozen=True)
class Report:
    """The outcome for one kernel, configuration and architecture.

    Args:
        kernel: its name.
        arch: what it was compiled for, or would have been.
        defines: the configuration.
        status: ``"ok"``, ``"spills"``, ``"failed"`` or ``"skipped"`` (the architecture is below the kernel's minimum).
        detail: why it failed or was skipped.
        functions: resources by entry function.
    """

    kernel: str
    arch: str
    defines: Mapping[str, int | bool | str]
    status: str
    detail: str = ""
    functions: Mapping[str, KernelResources] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether this is no reason for exit status 1."""
        return self.status in ("ok", "skipped")

    def as_dict(self) -> dict[str, Any]:
        """Returns what ``--json`` prints."""
        return asdict(self)


def compile_reports(
    kernels: Iterable[KernelSource],
    archs: Sequence[str],
    configurations: Callable[[str], Iterable[Defines]],
    *,
    jobs: int,
) -> Iterator[Report]:
    """Compiles every configuration of every kernel for every architecture; yields reports in that order.

    An architecture stands for its GPUs: for a kernel that needs ``sm_90a``, ``sm_90`` is compiled as ``sm_90a``.

    Args:
        kernels: what to compile.
        archs: as ``["sm_80", "sm_90"]``.
        configurations: gives a kernel's sets of defines.
        jobs: threads; NVRTC compiles in parallel.

    Raises:
        ValueError: a misspelled architecture.
        EngineUnavailableError: no CuPy.
    """
    targets = [Arch.parse(arch) for arch in archs]
    tasks: list[tuple[KernelSource, Defines, Arch, Arch | None]] = []
    for kernel in kernels:
        for defines in configurations(kernel.name):
            minimum = Arch.parse(kernel.min_arch_of(defines))
            # sm_90 and sm_90a may come to the same.
            pairs = {target.specialised(minimum) or target: target.specialised(minimum) for target in targets}
            tasks += [(kernel, defines, *pair) for pair in pairs.items()]
    with ThreadPoolExecutor(max_workers=max(jobs, 1)) as pool:
        try:
            yield from pool.map(lambda task: _report(*task), tasks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _report(kernel: KernelSource, defines: Defines, arch: Arch, special: Arch | None) -> Report:
    if special is None:
        return Report(kernel.name, str(arch), defines, "skipped", f"needs {kernel.min_arch_of(defines)}")
    try:
        compiled = compile_kernel(kernel.name, defines=defines, arch=str(special))
    except CompileError as error:
        return Report(kernel.name, str(special), defines, "failed", str(error))
    functions = compiled.resources
    if not functions:
        return Report(kernel.name, str(special), defines, "failed", "it has no __global__ function")
    spills = any(resources.spills for resources in functions.values())
    return Report(kernel.name, str(special), defines, "spills" if spills else "ok", functions=functions)
