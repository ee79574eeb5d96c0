"""What the tests of the kernels on Hopper's warpgroup instructions share."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cupy_resnet.conv2d import tensor_core_variants, tensor_maps
from cupy_resnet.conv2d.variants import Filter, Operands
from cupy_resnet.jit import Arch
from cupy_resnet.jit.compiler import compile_source
from cupy_resnet.jit.sources import find_kernel, load_program

STATIC_SHARED = 1024
"""Bytes of static shared memory, the barriers, so that the dynamic part begins at a multiple of 1024."""


class Gpus:
    """CuPy with two GPUs of 132 and 78 multiprocessors; `asked` is which were asked for what they have."""

    def __init__(self) -> None:
        self.current = 0
        self.asked: list[int] = []
        self.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: self.current), Device=self._device)

    def _device(self, number: int) -> SimpleNamespace:
        self.asked.append(number)
        attributes = {
            "MultiProcessorCount": (132, 78)[number],
            "MaxSharedMemoryPerBlockOptin": (227 << 10, 180 << 10)[number],
        }
        return SimpleNamespace(attributes=attributes)


@contextmanager
def two_gpus(monkeypatch: pytest.MonkeyPatch, *more: Callable[..., Any]) -> Iterator[Gpus]:
    """CuPy is `Gpus` meanwhile. What was asked before is not remembered: a device's multiprocessors, and `more`."""
    fake = Gpus()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    caches: Any = (tensor_core_variants._multiprocessors_of, *more)
    for cached in caches:
        cached.cache_clear()
    yield fake
    for cached in caches:
        cached.cache_clear()


def collected_launches(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, maps: Iterable[str]
) -> list[tuple[Any, ...]]:
    """(kernel, grid, block, arguments, options) of what is launched; kernels and maps are what they were made from.

    Args:
        monkeypatch: undoes it.
        module: whose `jit` launches.
        maps: functions of `tensor_maps`.
    """
    made: list[tuple[Any, ...]] = []
    jit = SimpleNamespace(
        get_function=lambda name, *, defines: (name, defines),
        launch=lambda kernel, grid, block, arguments, **options: made.append((kernel, grid, block, arguments, options)),
    )
    monkeypatch.setattr(module, "jit", jit)
    for name in maps:
        monkeypatch.setattr(
            tensor_maps, name, lambda *arguments, name=name, **options: (name, *arguments, *options.items())
        )
    return made


def operands(bias: bool, residual: bool, relu: bool = True) -> Operands:
    """Operands that are names."""
    return Operands("x", Filter("weight"), "bias" if bias else None, "residual" if residual else None, "y", relu)


def parameters(kernel: str) -> list[str]:
    """The declarations of a kernel's parameters, in order."""
    (signature,) = re.findall(rf"\s{kernel}\(([^{{]*?)\) \{{", load_program(find_kernel(kernel)).text, re.DOTALL)
    return [re.sub(r"\s+", " ", parameter).strip() for parameter in signature.split(",")]


def assert_constants(kernel: str, defines: Mapping[str, int | str], expected: Mapping[str, int], *more: str) -> None:
    """Has NVRTC compare constants: it is given the kernel's declarations with assertions in place of the kernel.

    Args:
        kernel: its name.
        defines: of a form.
        expected: expression of the kernel's file → value.
        more: conditions.
    """
    program = load_program(find_kernel(kernel))
    declarations, body, _ = program.text.partition('extern "C" __global__')
    assert body
    conditions = [*(f"{expression} == {value}" for expression, value in expected.items()), *more]
    assertions = [f'static_assert({condition}, "{condition}");' for condition in conditions]
    text = "\n".join([declarations, *assertions, 'extern "C" __global__ void nothing() {}'])
    options = [f"-D{name}={value}" for name, value in defines.items()]
    compile_source(replace(program, text=text), options, Arch(90, "a"))
