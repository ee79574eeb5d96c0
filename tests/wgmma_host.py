"""What the kernels that run as programs of the host share: C++ for both, and how a program is built and asked."""

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ConvCase, torch_conv2d

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.params import conv2d_params
from cupy_resnet.jit.sources import find_kernel

COMPILER = shutil.which("g++") or shutil.which("clang++")
"""Of C++; the tests that need it are skipped where there is none."""

WAITS = r"""
int this_warpgroup() { return threadIdx.x / 128; }
unsigned long long operand(unsigned address) { return (address & 0x3ffff) >> 4; }
void warpgroup_fence() {}
void warpgroup_commit() { self().groups.push_back(self().issued); }
template <int PENDING>
void warpgroup_wait() {
    const std::vector<long>& groups = self().groups;
    self().until = groups.size() > PENDING ? groups[groups.size() - 1 - PENDING] : 0;
    rest();
}
void barrier_wait(unsigned address, int parity) {
    self().barrier = address, self().parity = parity;
    rest();
    self().parity = -1;
}
void complete(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, ++barrier.phase;
}
void arrive(Barrier& barrier) {
    if (barrier.pending-- == 0) fail("a barrier has more arrivals than it counts");
    complete(barrier);
}
"""
"""Needs `Barrier`, `fail`, `rest`, and `self()`: of a thread, its groups of instructions and what it waits for."""

READ = r"""
void read(std::vector<float>& values, long count) {
    values.resize(count);
    if (long(fread(values.data(), 4, count, stdin)) != count) fail("too little input");
}
"""
"""Reads a tensor that the program is given; needs `fail`."""

IM2COL = (
    READ
    + r"""
std::vector<float> im2col_rows(const Conv2dParams& params, const std::vector<float>& x, int count, int c, int w, int h,
                               int n, int s, int r) {
    std::vector<float> rows(count * 32);
    int q = (w + params.pad_w) / params.stride_w, p = (h + params.pad_h) / params.stride_h;
    for (int row = 0; row < count; ++row) {
        const int column = q * params.stride_w - params.pad_w + s, line = p * params.stride_h - params.pad_h + r;
        if (n < params.N && column >= 0 && column < params.W && line >= 0 && line < params.H) {
            const float* const pixel = &x[((long(n) * params.H + line) * params.W + column) * params.C + c];
            for (int i = 0; i < 32; ++i) rows[row * 32 + i] = pixel[i];
        }
        if (++q == params.Q) q = 0, ++p;
        if (p == params.P) p = 0, ++n;
    }
    return rows;
}
std::vector<float> filter_rows(const std::vector<float>& filters, int count, int first, int end, int depth,
                               int column) {
    std::vector<float> rows(count * 32);
    for (int row = 0; row < count && first + row < end; ++row) {
        for (int i = 0; i < 32 && column + i < depth; ++i) {
            rows[row * 32 + i] = filters[long(first + row) * depth + column + i];
        }
    }
    return rows;
}
"""
)
"""What the accelerator brings of pixels and filters, 32 channels a row; needs `Conv2dParams`."""


def place() -> str:
    """Returns the text of `Place`, which the kernels share."""
    return _from_include("tensor_memory.cuh", r"^struct Place \{.*?^\};")


def staged_pair() -> str:
    """Returns the text of the function of that name, which tells where in a swizzled box two elements lie."""
    pattern = r"^template <typename Element, int BOX_BYTES = 0>\n[^\n]* staged_pair\(.*?^\}"
    return _from_include("tensor_memory.cuh", pattern)


def split_tf32() -> str:
    """Returns the text of the function of that name, which makes two TF32 operands of one of fp32."""
    return _from_include("tensor_core.cuh", r"^template <int WORDS>\n[^\n]* split_tf32\(.*?^\}\n")


def plain_operand() -> str:
    """Returns the text of the function of that name, which describes an operand that is not swizzled."""
    return _from_include("warpgroup.cuh", r"^[^\n]* plain_operand\(.*?^\}\n")


def headers(*names: str) -> str:
    """The text of some of the kernels' headers, without what they include."""
    return "\n".join(re.sub(r'#include "[^"]+"|#pragma once', "", _header(name)) for name in names)


def kernel_text(kernel: str, included: Mapping[str, str]) -> str:
    """A kernel's text with shared memory of the host's, and of its headers these, as they are given."""
    text = find_kernel(kernel).path.read_text(encoding="utf-8")
    for name, header in included.items():
        assert text.count(f'#include "{name}"') == 1, name
        text = text.replace(f'#include "{name}"', header)
    text = re.sub(r'#include "[^"]+"|extern __shared__.*;', "", text)
    return text.replace("__shared__", "static")


def _header(name: str) -> str:
    return (find_kernel("conv2d_wgmma").path.parent / "include" / name).read_text("utf-8")


def _from_include(file: str, pattern: str) -> str:
    (text,) = re.findall(pattern, _header(file), re.DOTALL | re.MULTILINE)
    return str(text)


Defines = Mapping[str, int | str]
Mistake = tuple[str, str]
"""A text that occurs once in a kernel, and what stands in its place."""


@dataclass(frozen=True)
class HostSource:
    """A program's text.

    Args:
        before: C++ that plays the GPU.
        kernel: the kernel's own text.
        entry: of its functions, the one to call.
        after: C++ that calls it, by the name of KERNEL, after it has set `kernel_number`.
    """

    before: str
    kernel: str
    entry: str
    after: str

    def with_mistake(self, mistake: Mistake) -> "HostSource":
        right, wrong = mistake
        assert self.kernel.count(right) == 1, right
        return replace(self, kernel=self.kernel.replace(right, wrong))

    def text(self, mistakes: Sequence[Mistake] = ()) -> str:
        """Kernel 0 is right, those behind it have a mistake each: what plays the GPU, most of it, is compiled once."""
        kernels = [self.kernel, *(self.with_mistake(mistake).kernel for mistake in mistakes)]
        names = [f"kernel_{number}" for number in range(len(kernels))]
        spaces = [f"namespace {name} {{\n{text}\n}}" for name, text in zip(names, kernels, strict=True)]
        entries = [f"(decltype(&{names[0]}::{self.entry}))&{name}::{self.entry}" for name in names]
        table = [
            f"using namespace {names[0]};",
            f"decltype(&{self.entry}) const numbered_kernels[] = {{{', '.join(entries)}}};",
            "int kernel_number;",
            "#define KERNEL numbered_kernels[kernel_number]",
        ]
        # Of functions with C's names there can be only one.
        return "\n".join([self.before, *(space.replace('extern "C" ', "") for space in spaces), *table, self.after])


@dataclass(frozen=True)
class Program:
    """What was compiled, a program or a library, and which of its kernels to run: 0, or one with a mistake."""

    path: Path
    kernel_number: int = 0

    @property
    def without_mistake(self) -> "Program":
        return Program(self.path)

    def __call__(self, given: bytes) -> subprocess.CompletedProcess[bytes]:
        """Runs a program with this input."""
        command = [self.path, str(self.kernel_number)]
        return subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)


def build(compiler: str, folder: Path, text: str, name: str, defines: Defines) -> Program:
    """Compiles a program."""
    (folder / f"{name}.cpp").write_text(text, encoding="utf-8")
    options = ["-std=c++20", "-O1", "-w", *(f"-D{key}={value}" for key, value in defines.items())]
    subprocess.run([compiler, *options, f"{name}.cpp", "-o", name], cwd=folder, check=True)
    return Program(folder / name)


def programs(source: Callable[[], HostSource], forms: Mapping[str, Defines]) -> Any:
    """Returns a module's fixture: what gives the program of a form, by its name.

    A form is compiled when it is first asked for: each of several processes has only some.
    """

    @pytest.fixture(scope="module")
    def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
        assert COMPILER is not None
        compiler, folder = COMPILER, tmp_path_factory.mktemp("host")
        return cache(lambda name: build(compiler, folder, source().text(), name, forms[name]))

    return program


def wrong_programs(
    source: Callable[[], HostSource],
    mistakes: Mapping[str, Mistake],
    defines_of: Callable[[str], Defines],
    build: Callable[[str, Path, str, str, Defines], Program] = build,
) -> Any:
    """Returns a module's fixture: what gives the program with a mistake, by its name.

    Programs are compiled when they are first asked for, those of the same form together.

    Args:
        source: what is right.
        mistakes: by name.
        defines_of: of a mistake's name, the form that shows it.
        build: compiles a text.
    """

    @pytest.fixture(scope="module")
    def wrong(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
        assert COMPILER is not None
        compiler, folder, right = COMPILER, tmp_path_factory.mktemp("wrong"), source()
        forms = {name: tuple(defines_of(name).items()) for name in mistakes}

        @cache
        def built(form: tuple[tuple[str, int | str], ...]) -> dict[str, Program]:
            names = [name for name in mistakes if forms[name] == form]
            text = right.text([mistakes[name] for name in names])
            path = build(compiler, folder, text, f"wrong_{list(mistakes).index(names[0])}", dict(form)).path
            return {name: Program(path, number) for number, name in enumerate(names, 1)}

        return lambda name: built(forms[name])[name]

    return wrong


def wrong_programs_in_forms(source: Callable[[], HostSource], mistakes: Mapping[str, tuple[Any, str, str]]) -> Any:
    """The same, of mistakes that each come with the configuration of the form that shows it."""
    return wrong_programs(
        source,
        {name: (right, wrong) for name, (_, right, wrong) in mistakes.items()},
        lambda name: mistakes[name][0].defines(),
    )


def random_epilogue(draw: random.Random, *, in_place: float) -> dict[str, bool]:
    """Returns which of bias, residual and relu there are, and whether the output lies in the residual's place.

    Args:
        draw: the source of chance.
        in_place: how likely that last is.
    """
    bias, placed, relu = draw.random() < 0.7, draw.random() < in_place, draw.random() < 0.5
    return {"bias": bias, "residual": placed or draw.random() < 0.5, "in_place": placed, "relu": relu}


def expected_output(
    problem: Conv2dProblem, arrays: Mapping[str, np.ndarray], epilogue: Mapping[str, bool]
) -> np.ndarray:
    """Returns what torch makes of x, weight, bias and residual, of the latter two what the epilogue has."""
    given = {**arrays, **{name: arrays[name] if epilogue[name] else None for name in ("bias", "residual")}}
    return torch_conv2d(given, ConvCase(problem, relu=epilogue["relu"]).arguments)


def run_blocks(
    program: Program,
    problem: Conv2dProblem,
    arrays: Mapping[str, np.ndarray],
    *more: int,
    seed: int,
    grid: int,
    bias: bool,
    residual: bool,
    in_place: bool,
    relu: bool,
    backwards: bool = False,
) -> np.ndarray | str:
    """Runs all blocks or clusters of a launch, one after the other; returns the output, or what went wrong.

    Args:
        program: from `build`.
        problem: the convolution.
        arrays: what it reads, in this order, float32.
        more: what it reads of numbers behind those below.
        seed: of the order.
        grid: blocks, or clusters.
        bias, residual, relu: the epilogue.
        in_place: whether the output lies in the residual's place.
        backwards: whether tiles are taken from the last one on, where they are taken in turn.
    """
    head = np.array((seed, grid, bias, residual, in_place, *more), np.int32).tobytes()
    tensors = b"".join(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays.values())
    done = program(head + conv2d_params(problem, relu, backwards).tobytes() + tensors)
    if done.returncode:
        return done.stderr.decode() or f"exit status {done.returncode}"
    return np.frombuffer(done.stdout, np.float32).reshape(problem.output_shape)


def run_with_shortcut(
    program: Program, problem: Conv2dProblem, arrays: dict[str, np.ndarray], **options: Any
) -> np.ndarray | str:
    """Runs a launch on x, weight, bias, residual, x0 and weight0, with the options of `run_blocks`."""
    read = {name: arrays[name] for name in ("x", "weight", "bias", "residual", "x0", "weight0")}
    return run_blocks(program, problem, read, *arrays["x0"].shape[1:3], **options)
