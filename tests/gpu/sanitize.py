"""Launches every kernel on small shapes, for NVIDIA's compute-sanitizer to watch. A script, not a test:

    compute-sanitizer --tool memcheck  --error-exitcode 1 --report-api-errors no python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py --wait-together
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool initcheck --error-exitcode 1 python tests/gpu/sanitize.py

(cuda-bindings asks the driver for functions that it may not have, which memcheck would report as errors of the API.)
The package must be importable, as are the tests' helpers: with PYTHONPATH=.:tests in front. It prints what it launched,
and fails if a kernel file was left out. With ``--only STEP``, once or more, several processes share the work, and
nobody looks whether a file was left out. With ``--break TOOL`` it launches one kernel with a fault of the kind that the
tool is for, and nothing else: proof that the tool would have seen one.

racecheck (of CUDA 13.0) never returns from a kernel some of whose warps wait for their cluster long after others have:
a few lines of such a kernel show it. ``--wait-together`` has all warps of the two kernels that do so wait at the same
place, and changes nothing else in them.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupy_resnet
from cupy_resnet import jit, networks
from cupy_resnet.conv2d import PRECISIONS, VARIANTS, Conv2dPair, Conv2dProblem
from cupy_resnet.conv2d.back_to_back import (
    BackToBackOperands,
    Following,
    back_to_back_candidates,
    configurations,
    launch_back_to_back,
)
from cupy_resnet.conv2d.stem import pooled_shape
from cupy_resnet.conv2d.stem_choice import STEM_LAUNCHES, STEM_SUPPORTS
from cupy_resnet.conv2d.variants import Filter, Operands, Shortcut
from cupy_resnet.engines.cuda_engine import CudaEngine, describe_device
from cupy_resnet.jit import building

FAULTS = {
    "memcheck": ("float* y", "y[32 + threadIdx.x] = 1.0f;"),  # y has 32 floats
    "racecheck": (
        "float* y",  # of two warps, one reads what the other writes, with no barrier between
        "__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; y[threadIdx.x % 32] = s[63 - threadIdx.x];",
    ),
    "synccheck": ("float* y", "if (threadIdx.x % 2) __syncthreads(); y[threadIdx.x % 32] = 1.0f;"),
    "initcheck": ("float* y", "y[threadIdx.x % 32] += 1.0f;"),  # nobody has written y
}
"""Tool → parameters and body of a kernel that it must complain of."""

ALIGNED = Conv2dProblem(N=2, H=7, W=9, C=160, K=72, R=3, S=3, pad_h=1, pad_w=1)
"""Tiles in part empty, several slices of depth, several slices of channels."""

POINTWISE = replace(ALIGNED, R=1, S=1, pad_h=0, pad_w=0)
UNALIGNED = Conv2dProblem(N=2, H=9, W=8, C=5, K=7, R=3, S=2, stride_h=2, pad_h=2, pad_w=1, dilation_w=2)
SHALLOW = Conv2dProblem(N=2, H=12, W=12, C=8, K=16, R=3, S=3, pad_h=1, pad_w=1)
"""A single slice of channels: launched with every tile, since what lies behind it in shared memory differs."""

WIDE = replace(ALIGNED, C=128, stride_w=2)
DENSE = replace(WIDE, stride_w=1)
"""Whole slices of 128 bytes."""

DEEP = replace(DENSE, N=3, C=512, S=1, pad_w=0)
"""As many slices of channels as a cluster has blocks, and three images in the largest tile."""

SHORTCUT = replace(DENSE, shortcut_channels=64, shortcut_stride=2)
GROUPED = Conv2dProblem(N=2, H=7, W=6, C=64, K=64, R=3, S=3, pad_h=1, pad_w=1, groups=16)


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, name: str, launches: Counter[str]) -> None:
        vars(self).update(_kernel=kernel, _name=name, _launches=launches)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._launches[self._name] += 1
        self._kernel(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kernel, name, value)


def count_launches() -> Counter[str]:
    """Has every kernel that is handed out from now on counted, by the name of its file."""
    launches: Counter[str] = Counter()
    get_function = jit.get_function

    def counted(name: str, *args: Any, **kwargs: Any) -> Counted:
        return Counted(get_function(name, *args, **kwargs), name, launches)

    jit.get_function = counted  # type: ignore[assignment]
    return launches


def numbers(shape: tuple[int, ...], dtype: Any) -> Any:
    """A CuPy array of small numbers; as uint16, of bfloat16's between 0.5 and 1."""
    import cupy

    values = np.random.default_rng(0).integers(-2, 3, shape)
    if dtype == np.uint16:
        return cupy.asarray((0x3F00 + (values & 0x7F)).astype(np.uint16))
    return cupy.asarray(values.astype(dtype))


def few(candidates: Any) -> Iterator[Any]:
    """Of a variant's configurations the largest and the smallest tile, whole and with the depth cut in three, and two
    whose blocks form clusters, of each size; beside these the smallest of the others, and all with filters as rows.
    """
    groups: dict[int, dict[Any, Any]] = {}
    for config in candidates:
        form = repr(sorted((config.defines() | {"SPLIT_K_CLUSTER": 1}).items()))
        groups.setdefault(getattr(config, "merged_groups", 1), {}).setdefault(form, []).append(config)
    for forms in groups.values():
        tiles = list(forms.values())
        clustered = [tile for tile in tiles if any(getattr(config, "cluster", False) for config in tile)]
        transposed = [tile for tile in tiles if any(getattr(config, "transposed", False) for config in tile)]
        others = [tile for tile in tiles if tile not in clustered and tile not in transposed]
        chosen = (tiles[0], tiles[-1], *clustered[:1], *clustered[-1:], *others[-1:], *transposed)
        for configs in {id(tile): tile for tile in chosen}.values():
            yield from (c for c in configs if getattr(c, "cluster", False) or slices_of(c) in (1, 3))


def slices_of(config: Any) -> int:
    """Into how many slices a configuration cuts the depth."""
    return int(getattr(config, "split_k_slices", 1))


def launch_convolutions(name: str) -> None:
    """A variant in each of its precisions."""
    import cupy

    device, variant = describe_device(cupy.cuda.runtime.getDevice()), VARIANTS[name]
    launched = set()
    for shape in (ALIGNED, POINTWISE, UNALIGNED, GROUPED, WIDE, DENSE, DEEP, SHORTCUT, SHALLOW):
        for precision in variant.precisions:
            problem = replace(shape, precision=precision)
            if not variant.supports(problem, device)[0]:
                continue
            storage = problem.arithmetic.storage
            x, residual = numbers(problem.input_shape, storage), numbers(problem.output_shape, storage)
            filter, bias = Filter(numbers(problem.filter_shape, storage)), numbers((problem.K,), np.float32)
            second = None
            if problem.shortcut_channels:
                x0, filter0 = (numbers(s, storage) for s in (problem.shortcut_shape, problem.shortcut_filter_shape))
                second = Shortcut(x0, Filter(filter0))
            candidates = variant.candidates(problem, device)
            if shape is SHALLOW:
                chosen = [config for config in candidates if slices_of(config) == 1]
            else:
                chosen = list(few(candidates))
            if shape is DEEP:  # so much that tools take long: for what no other shape is deep enough for
                chosen = [config for config in chosen if getattr(config, "cluster", False) and config not in launched]
            launched.update(chosen)
            for config in chosen:
                y = cupy.empty(problem.output_shape, storage)
                variant.launch(problem, Operands(x, filter, bias, residual, y, True, second), config)
            for config in chosen[-1:]:
                y = cupy.empty(problem.output_shape, storage)
                variant.launch(problem, Operands(x, filter, None, None, y, False, second, backwards=True), config)


def launch_back_to_backs() -> None:
    """The ends of bottlenecks in every form, tiles in part empty; the output beside the residual and in its place."""
    import cupy

    device = describe_device(cupy.cuda.runtime.getDevice())
    launched = set()
    for precision in ("fp16", "bf16", "tf32"):
        for K in (64, 128, 256):
            first = replace(WIDE, K=K, N=3, precision=precision)
            pair = Conv2dPair(first, max(K, 128))
            second = pair.second
            storage = first.arithmetic.storage
            x, residual = numbers(first.input_shape, storage), numbers(second.output_shape, storage)
            filters = Filter(numbers(first.filter_shape, storage)), Filter(numbers(second.filter_shape, storage))
            biases = numbers((K,), np.float32), numbers((pair.K,), np.float32)
            adding = replace(pair, shortcut_channels=K, shortcut_stride=2, following=K)
            alone = adding.second.shortcut_alone()
            shortcut = Shortcut(numbers(alone.input_shape, storage), Filter(numbers(alone.filter_shape, storage)))
            for whole in (pair, replace(pair, following=K), replace(pair, following=2 * K), adding):
                for config in back_to_back_candidates(whole, device):
                    for y in (cupy.empty(second.output_shape, storage), residual):
                        operands = BackToBackOperands(x, filters, biases, residual, y, (True, True))
                        if whole.shortcut_channels:
                            operands = operands._replace(residual=None, shortcut=shortcut)
                        if whole.third is not None:
                            third = Filter(numbers(whole.third.filter_shape, storage))
                            bias = numbers((whole.following,), np.float32)
                            z = cupy.empty(whole.third.output_shape, storage)
                            operands = operands._replace(following=Following(third, bias, True, z))
                        launch_back_to_back(whole, operands, config)
                    launched.add(config)
    assert launched == set(configurations()), "the shapes leave out a form"


def launch_stems() -> None:
    """The stems' kernels in every precision, from every kind of pixels; tiles that the image does not fill."""
    import cupy

    device = describe_device(cupy.cuda.runtime.getDevice())

    mean, std = numbers((3,), np.float32), cupy.ones(3, cupy.float32)
    for precision in PRECISIONS.values():
        if not precision.tensor_cores:
            continue
        filter, bias = Filter(numbers((64, 7, 7, 3), precision.storage)), numbers((64,), np.float32)
        for dtype in (np.uint8, np.float32, np.float16, np.uint16)[: 4 if precision.name == "fp16" else 1]:
            for size in ((37, 33), (5, 1)):
                x = numbers((2, *size, 3), dtype)
                y = cupy.empty(pooled_shape(x.shape, 64), precision.storage)
                turned = numbers((2, 3, *size), dtype).transpose(0, 2, 3, 1)
                for name, launch in STEM_LAUNCHES.items():
                    if STEM_SUPPORTS[name](precision, x.shape, (64, 7, 7, 3), device)[0]:
                        launch(x, filter, bias, mean, std, y, precision)
                        launch(turned, filter, bias, None, None, y, precision)


def launch_operations() -> None:
    """The engine's other kernels, for every type of activation, by 16 bytes and element by element."""
    for precision in ("fp32", "fp16", "bf16"):
        ops: Any = CudaEngine(precision=precision)
        storage = PRECISIONS[precision].storage
        for C in (16, 3):
            x = numbers((2, 7, 6, C), storage)
            vector = numbers((C,), np.float32)
            ops.relu(x), ops.add(x, x), ops.add_relu(x, x)
            ops.batch_norm2d(x, vector, vector, vector, ops._cupy.ones(C, np.float32))
            ops.max_pool2d(x, 3, 2, 1), ops.avg_pool2d(x, 3, 2, 1)
            ops.pad_channels(x, C // 2, C // 2, stride=2)
            ops.nhwc_to_nchw(x)
            mean, std = [0.5] * C, [0.25] * C
            for dtype in (np.uint8, np.float32, np.float16, np.uint16):
                ops.nchw_to_nhwc(numbers((2, C, 7, 6), dtype), mean=mean, std=std)
                ops.normalize(numbers((2, 7, 6, C), dtype), mean, std)
            features = ops.global_avg_pool2d(x)
            logits = ops.linear(features, numbers((10, C), np.float32), numbers((10,), np.float32))
            ops.linear(numbers((1, C), np.float32), numbers((10, C), np.float32))
            ops.softmax(logits)
            ops.prefetch([Filter(x)])()


def run_networks() -> None:
    """Forward passes as a user has them: captured and replayed, launches that overlap included."""
    state = networks.random_state_dict(networks.describe("resnet20"), seed=0)
    for precision in ("fp16", "fp32-tc"):
        with cupy_resnet.load("resnet20", weights=state, engine="cuda", precision=precision) as model:
            for _ in range(2):
                model(np.zeros((2, 3, 16, 16), np.float32))


def wait_together() -> None:
    """Has producers wait for their cluster where consumers do, in kernels that are compiled from now on."""
    read = building.load_program
    together = (
        ("    if (consumer == CONSUMERS) {", "    cluster_wait();\n    if (consumer == CONSUMERS) {"),
        ("        cluster_wait();\n        return;", "        return;"),
        ("    cluster_wait();  // all blocks have begun", "    // all blocks have begun"),
    )

    def load_program(kernel: jit.KernelSource) -> Any:
        program = read(kernel)
        if kernel.name in ("conv2d_wgmma_split_k", "conv2d_wgmma_patch_split_k"):
            for apart, waiting in together:
                assert program.text.count(apart) == 1, f"{kernel.name} waits for its cluster elsewhere"
                program = replace(program, text=program.text.replace(apart, waiting))
        return program

    building.load_program = load_program


def launch_fault(tool: str) -> None:
    """Launches a kernel that `tool` must complain of."""
    import cupy

    parameters, body = FAULTS[tool]
    kernel = cupy.RawKernel(f'extern "C" __global__ void fault({parameters}) {{ {body} }}', "fault")
    y = cupy.empty(32, cupy.float32)
    if tool != "initcheck":
        y.fill(0)
    kernel((1,), (32 if tool != "racecheck" else 64,), (y,))
    cupy.cuda.Device().synchronize()


STEPS: dict[str, Callable[[], None]] = {
    **{name: partial(launch_convolutions, name) for name in VARIANTS},
    "back-to-backs": launch_back_to_backs,
    "stems": launch_stems,
    "operations": launch_operations,
    "networks": run_networks,
}


def main(arguments: list[str] | None = None) -> int:
    import cupy

    parser = argparse.ArgumentParser(description="Launches every kernel on small shapes, for compute-sanitizer.")
    parser.add_argument("--break", dest="fault", choices=FAULTS, help="launch one faulty kernel for this tool instead")
    parser.add_argument("--only", action="append", choices=STEPS, help="launch just this part; may be given again")
    parser.add_argument("--wait-together", action="store_true", help="let racecheck return from kernels in clusters")
    given = parser.parse_args(arguments)
    cupy.cuda.set_allocator(None)  # each array its own allocation: the pool's larger blocks would hide an overrun
    if given.fault is not None:
        launch_fault(given.fault)
        print(f"launched a kernel that {given.fault} must complain of")
        return 0
    if given.wait_together:
        wait_together()
    launches = count_launches()
    for step in given.only or STEPS:
        STEPS[step]()
        cupy.cuda.Device().synchronize()
    for name, count in sorted(launches.items()):
        print(f"{name:24} {count:5}")
    missing = {kernel.name for kernel in jit.list_kernels()} - launches.keys()
    left_out = "not asked" if given.only else ", ".join(sorted(missing)) or "none"
    print(f"{launches.total()} launches of {len(launches)} kernel files; left out: {left_out}")
    return 1 if missing and not given.only else 0


if __name__ == "__main__":
    sys.exit(main())
