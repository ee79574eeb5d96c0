"""What the tests of the kernels on Hopper's warpgroup instructions share."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

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
