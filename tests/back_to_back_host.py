"""conv2d_wgmma_b2b.cu as a program of the host: its own text; C++ plays barriers, accelerator and tensor cores.

A block runs with all threads of its consumers and one of its producer, taken in turns at random, in bfloat16 or TF32.
Boxes lie in shared memory as the accelerator leaves them, some time after they were asked for, and NaN does until then;
they are stored as they are found some time after that was begun; an instruction takes its operands, those in registers
as well, as the PTX ISA lays them out, at any time until it is waited for. Whatever is read too early makes a wrong
result.
"""

import math
import re

import numpy as np
from back_to_back_machine import HOST
from back_to_back_main import MAIN
from wgmma_host import IM2COL, HostSource, Program, headers, kernel_text, place

from cupy_resnet.conv2d import Conv2dProblem
from cupy_resnet.conv2d.back_to_back import interleaved
from cupy_resnet.conv2d.params import conv2d_params


def host_source() -> HostSource:
    """The program's text."""
    names = "stage_ring.cuh", "pair_epilogue.cuh", "back_to_back_producer.cuh", "back_to_back_consumer.cuh"
    text = kernel_text("conv2d_wgmma_b2b", {name: headers(name) for name in names})
    text = re.sub(r'asm volatile\("setmaxnreg.*?\);', "{}", text)
    assert "asm" not in text
    params = headers("conv2d_params.cuh", "turns.cuh")
    im2col = IM2COL.replace("32", "PER_ROW")  # channels
    return HostSource("\n".join([HOST, params, place()]), text, "conv2d_wgmma_b2b", f"{im2col}\n{MAIN}")


FILTERS = {"first", "second", "next", "shortcut"}


def run(
    program: Program,
    first: Conv2dProblem,
    second: Conv2dProblem,
    arrays: dict[str, np.ndarray],
    *,
    seed: int,
    grid: int,
    biases: bool,
    in_place: bool,
    relus: tuple[bool, ...],
    backwards: bool = False,
) -> list[np.ndarray] | str:
    """Runs all blocks of a launch, one after the other; returns the outputs, or what went wrong.

    Args:
        program: from `wgmma_host.build`.
        first, second: the convolutions.
        arrays: x, first, second, first_bias, second_bias, residual, and where there is a third convolution next, its
            filters, and next_bias; where there is a shortcut instead of the residual x0, its input, and shortcut, its
            filters; float32.
        seed: of the order.
        grid: blocks.
        biases: whether there are any.
        in_place: whether the output lies in the residual's place.
        relus: of the first, the second, and where there is one the third.
        backwards: whether tiles are taken from the last one on.
    """
    names = ("x", "first", "second", "first_bias", "second_bias", "residual", "next", "next_bias", "x0", "shortcut")
    shortcut = second.shortcut_alone(arrays["x0"].shape) if "x0" in arrays else second
    problems = zip((first, second, shortcut), (*relus[:2], False), strict=True)
    params = (conv2d_params(problem, relu, backwards).tobytes() for problem, relu in problems)
    if first.precision == "tf32":
        arrays = arrays | {name: interleaved(arrays[name]) for name in FILTERS & arrays.keys()}
    tensors = (np.ascontiguousarray(arrays[name], np.float32).tobytes() for name in names if name in arrays)
    head = np.array([seed, grid, biases, in_place, relus[-1]], np.int32)
    given = head.tobytes() + b"".join([*params, *tensors])
    done = program(given)
    if done.returncode:
        return done.stderr.decode() or f"exit status {done.returncode}"
    y, z = np.split(np.frombuffer(done.stdout, np.float32), [math.prod(second.output_shape)])
    N, P, Q, _ = second.output_shape
    return [y.reshape(second.output_shape), *([z.reshape(N, P, Q, -1)] if z.size else [])]
