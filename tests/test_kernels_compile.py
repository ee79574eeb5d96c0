"""Every kernel's forms compile without a GPU, spill nothing, and fit a multiprocessor as often as they promise.

Forms are compiled for one GPU, each kernel's default form for every architecture that the NVRTC here and the kernel
allow. A form for bfloat16 differs from that for fp16 in the names of a type and of an instruction: of these the first
of each kernel is compiled here, and all when the GPU's tests run.
"""

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cupy_resnet import environment, jit
from cupy_resnet.conv2d import H100, VARIANTS, stem, stem_wgmma, stem_wgmma_tf32
from cupy_resnet.conv2d.configs import (
    BACK_TO_BACK,
    IMPLICIT_GEMM,
    WGMMA,
    WGMMA_3XTF32,
    WGMMA_PATCH,
    WGMMA_PATCH_SPLIT_K,
    WGMMA_SPLIT_K,
    WINOGRAD,
    Config,
)
from cupy_resnet.errors import CompileError
from cupy_resnet.jit import toolchain
from cupy_resnet.jit.sources import find_kernel, load_program
from cupy_resnet.kernels import configurations

pytest.importorskip("cupy")

REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
SHARED_PER_SM = 228 << 10
SHARED_RESERVED = 1 << 10  # by the system, for every resident block
STATIC_SHARED = 48 << 10

Form = tuple[str, tuple[tuple[str, Any], ...], str]
"""Kernel, defines, architecture."""


def form(kernel: str, defines: dict[str, Any], arch: str) -> Form:
    return kernel, tuple(defines.items()), arch


def form_on_h100(kernel: str, defines: dict[str, Any]) -> Form:
    """With the letter of ``sm_90a`` where the kernel asks for it."""
    minimum = jit.Arch.parse(find_kernel(kernel).min_arch_of(defines))
    return form(kernel, defines, str(jit.Arch.parse(H100.arch).specialised(minimum)))


def is_compiled_here(kernel: str, defines: dict[str, Any]) -> bool:
    """Whether the tests compile a form: all but most of those for bfloat16, and of the stems', which differ in how
    pixels are read only.
    """
    if defines.get("ELEMENT") == "BFloat16":
        return defines == next(form for form in configurations(kernel) if form.get("ELEMENT") == "BFloat16")
    stems = (stem.SOURCE, stem_wgmma.SOURCE, stem_wgmma_tf32.SOURCE)
    commonest = defines.get("CHANNELS") == 3 and defines.get("PIXELS", 112) == 112
    return kernel not in stems or defines["INPUT"] == "float" or commonest


def compiled_here(kernel: str, configs: Iterable[Config]) -> list[Config]:
    """Those of a kernel's configurations whose forms the tests compile."""
    return [config for config in configs if is_compiled_here(kernel, dict(config.defines()))]


def describe(value: Form) -> str:
    kernel, defines, arch = value
    return "-".join([kernel, *(f"{name}={text}".replace(" ", "_") for name, text in defines), arch])


def default_forms() -> list[Form]:
    """Every kernel's first form, for every architecture that NVRTC and the kernel allow."""
    archs = [jit.Arch(number) for number in toolchain.supported_archs()]
    forms = []
    for kernel in jit.list_kernels():
        default = configurations(kernel.name)[0]
        minimum = jit.Arch.parse(kernel.min_arch_of(default))
        targets = {arch.specialised(minimum) for arch in archs} - {None}
        assert targets, f"this NVRTC knows no architecture that {kernel.name} runs on"
        forms += [form(kernel.name, default, str(target)) for target in sorted(targets, key=str)]
    return forms


FORMS = [
    form_on_h100(kernel.name, defines)
    for kernel in jit.list_kernels()
    for defines in configurations(kernel.name)
    if is_compiled_here(kernel.name, defines)
]
DEFAULT_FORMS = default_forms()


class Compilations(dict[Form, Future[jit.Compiled]]):
    """What is not there is compiled when it is asked for."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.pool = pool

    def __missing__(self, key: Form) -> Future[jit.Compiled]:
        kernel, defines, arch = key
        self[key] = self.pool.submit(jit.compile_kernel, kernel, defines=dict(defines), arch=arch)
        return self[key]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compilations]:
    """Compiles everything on all cores, in the order of the tests, into the cache of all tests.

    Under pytest-xdist other processes have the other cores, and some of the tests: there nothing is compiled ahead.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(environment.DISK_CACHE.name, raising=False)
        pool = ThreadPoolExecutor(os.cpu_count())
        compilations = Compilations(pool)
        if not hasattr(request.config, "workerinput"):
            for key in [*FORMS, *DEFAULT_FORMS]:
                compilations[key]
        yield compilations
        pool.shutdown(cancel_futures=True)


def assert_sound(result: jit.Compiled) -> None:
    """The cubin is there, its public function too; no function spills, takes what no GPU gives, or has a warpgroup's
    products wait for each other.
    """
    assert "serialized" not in result.log, result.log
    assert result.cubin.startswith(b"\x7fELF")
    assert result.name in result.resources
    for function, used in result.resources.items():
        assert not used.spills, f"{function} for {result.arch}: {used}"
        assert 0 < used.registers <= REGISTERS_PER_THREAD, function
        assert used.shared_memory <= STATIC_SHARED, function


@pytest.mark.parametrize("key", FORMS, ids=describe)
def test_every_form(compiled: Compilations, key: Form) -> None:
    assert_sound(compiled[key].result())


@pytest.mark.parametrize("key", DEFAULT_FORMS, ids=describe)
def test_default_form_on_every_architecture(compiled: Compilations, key: Form) -> None:
    result = compiled[key].result()
    assert result.arch == key[2]
    assert_sound(result)


def resources(compiled: Compilations, kernel: str, config: Config) -> jit.KernelResources:
    return compiled[form_on_h100(kernel, dict(config.defines()))].result().resources[kernel]


@pytest.mark.parametrize("config", IMPLICIT_GEMM, ids=str)
def test_as_many_blocks_of_implicit_gemm_are_resident_as_the_cost_model_counts(compiled, config) -> None:
    used = resources(compiled, "conv2d_implicit_gemm", config)
    assert used.registers * config.threads * config.min_blocks <= REGISTERS_PER_SM
    shared = used.shared_memory + getattr(config, "shared_memory", 0)
    assert shared <= H100.shared_memory_per_block
    assert (shared + SHARED_RESERVED) * config.min_blocks <= SHARED_PER_SM


@pytest.mark.parametrize("config", WINOGRAD, ids=str)
def test_a_block_of_winograd_fits(compiled, config) -> None:
    used = resources(compiled, "conv2d_winograd", config)
    assert used.registers * VARIANTS["conv2d_winograd"].THREADS <= REGISTERS_PER_SM
    assert used.shared_memory + config.shared_memory <= H100.shared_memory_per_block


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        (kernel, config)
        for kernel, configs in (
            ("conv2d_wgmma", WGMMA),
            ("conv2d_wgmma_patch", WGMMA_PATCH),
            ("conv2d_wgmma_3xtf32", WGMMA_3XTF32),
        )
        for config in compiled_here(kernel, configs)
    ],
    ids=lambda value: value if isinstance(value, str) else f"{getattr(value, 'precision', '')} {value}".strip(),
)
def test_a_block_of_wgmma_fits_and_has_the_registers_that_its_warpgroups_share(compiled, kernel, config) -> None:
    used = resources(compiled, kernel, config)
    assert used.shared_memory <= 1024  # beside what is dynamic, which begins at a multiple of that
    if kernel != "conv2d_wgmma_patch":  # whose depends on the problem
        assert 1024 + config.shared_memory <= H100.shared_memory_per_block
    assert used.registers * config.threads <= REGISTERS_PER_SM
    # Consumers wait until the producer's warpgroup has given back enough: they would wait for ever for more.
    text = load_program(find_kernel(kernel)).text
    consumers = config.threads // 128 - 1
    if kernel in ("conv2d_wgmma", "conv2d_wgmma_patch"):
        second = consumers == 3 if kernel == "conv2d_wgmma_patch" else config.tile_m * config.tile_n <= 128 * 128
        of_both = re.findall(r"(?:PRODUCER|CONSUMER)_REGISTERS = (?:CONSUMERS ==|SUMS >) \d+ \? (\d+) : (\d+)", text)
        consumer, producer = (int(numbers[second]) for numbers in of_both)
    else:
        ((producer,), (consumer,)) = (
            map(int, re.findall(rf"setmaxnreg\.{way}\.sync\.aligned\.u32 (\d+);", text)) for way in ("dec", "inc")
        )
    assert producer < used.registers < consumer
    assert 128 * (producer + consumers * consumer) <= used.registers * config.threads


@pytest.mark.parametrize(
    "config",
    compiled_here("conv2d_wgmma_split_k", WGMMA_SPLIT_K),
    ids=lambda config: f"{config.precision} {config}",
)
def test_a_block_of_wgmma_split_k_fits(compiled, config) -> None:
    used = resources(compiled, "conv2d_wgmma_split_k", config)
    assert used.shared_memory <= 1024  # beside what is dynamic, which begins at a multiple of that
    assert 1024 + config.shared_memory <= H100.shared_memory_per_block
    fitting = SHARED_PER_SM // (used.shared_memory + config.shared_memory + SHARED_RESERVED)
    assert used.registers * config.threads * fitting <= REGISTERS_PER_SM


@pytest.mark.parametrize(
    "config",
    compiled_here("conv2d_wgmma_patch_split_k", WGMMA_PATCH_SPLIT_K),
    ids=lambda config: f"{config.precision} {config}",
)
def test_a_block_of_wgmma_patch_split_k_fits(compiled, config) -> None:
    used = resources(compiled, "conv2d_wgmma_patch_split_k", config)
    assert used.shared_memory <= 1024  # beside what is dynamic, which begins at a multiple of that
    assert used.registers * config.threads <= REGISTERS_PER_SM


def test_two_blocks_of_the_stem_on_wgmma_fit_and_have_the_registers_that_their_warpgroups_share(compiled) -> None:
    text = load_program(find_kernel(stem_wgmma.SOURCE)).text
    ((producer,), (consumer,)) = (
        re.findall(rf"setmaxnreg\.{way}\.sync\.aligned\.u32 (\d+);", text) for way in ("dec", "inc")
    )
    for defines in filter(lambda defines: is_compiled_here(stem_wgmma.SOURCE, defines), stem_wgmma.configurations()):
        used = compiled[form_on_h100(stem_wgmma.SOURCE, defines)].result().resources[stem_wgmma.SOURCE]
        assert used.registers * stem_wgmma.THREADS * 2 <= REGISTERS_PER_SM
        assert int(producer) < used.registers < int(consumer)
        assert stem_wgmma.THREADS // 2 * (int(producer) + int(consumer)) <= used.registers * stem_wgmma.THREADS
        shared = used.shared_memory + stem_wgmma.shared_memory(
            int(defines["PIXELS"]), str(defines["INPUT"]), int(defines["CHANNELS"])
        )
        assert (shared + SHARED_RESERVED) * 2 <= SHARED_PER_SM


def test_a_block_of_the_stem_for_fp32_fits_and_has_the_registers_that_its_warpgroups_share(compiled) -> None:
    text = load_program(find_kernel(stem_wgmma_tf32.SOURCE)).text
    ((other,), (consumer,)) = (
        re.findall(rf"setmaxnreg\.{way}\.sync\.aligned\.u32 (\d+);", text) for way in ("dec", "inc")
    )
    others = stem_wgmma_tf32.THREADS // stem_wgmma_tf32.WARPGROUP - stem_wgmma_tf32.CONSUMERS
    registers = stem_wgmma_tf32.WARPGROUP * (others * int(other) + stem_wgmma_tf32.CONSUMERS * int(consumer))
    for defines in filter(
        lambda defines: is_compiled_here(stem_wgmma_tf32.SOURCE, defines), stem_wgmma_tf32.configurations()
    ):
        used = compiled[form_on_h100(stem_wgmma_tf32.SOURCE, defines)].result().resources[stem_wgmma_tf32.SOURCE]
        assert registers <= used.registers * stem_wgmma_tf32.THREADS <= REGISTERS_PER_SM
        assert int(other) < used.registers < int(consumer)
        products, pixels, channels = (int(defines[name]) for name in ("PRODUCTS", "PIXELS", "CHANNELS"))
        shared = stem_wgmma_tf32.shared_memory(products, pixels, str(defines["INPUT"]), channels)
        assert used.shared_memory + shared <= H100.shared_memory_per_block


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("conv2d_wgmma", WGMMA[0]),
        ("conv2d_wgmma_split_k", WGMMA_SPLIT_K[0]),
        ("conv2d_wgmma_patch", WGMMA_PATCH[0]),
        ("conv2d_wgmma_patch_split_k", WGMMA_PATCH_SPLIT_K[0]),
        ("conv2d_wgmma_3xtf32", WGMMA_3XTF32[0]),
        ("conv2d_wgmma_b2b", BACK_TO_BACK[0]),
    ],
)
def test_wgmma_is_compiled_for_sm_90a_only(name: str, config: Config) -> None:
    for forms in (FORMS, DEFAULT_FORMS):
        assert {arch for kernel, _, arch in forms if kernel == name} == {"sm_90a"}
    with pytest.raises(CompileError, match=rf"^kernel {name} needs exactly sm_90a, but sm_90 was asked for$"):
        jit.compile_kernel(name, defines=dict(config.defines()), arch="sm_90")


@pytest.mark.parametrize(("kernel", "threads"), [("conv2d_direct", 256), ("conv2d_shared", 1024), ("sgemm", 256)])
def test_a_block_of_the_lower_rungs_fits(compiled, kernel: str, threads: int) -> None:
    for defines in configurations(kernel):
        used = compiled[form_on_h100(kernel, defines)].result().resources[kernel]
        assert used.registers * threads <= REGISTERS_PER_SM


def test_every_kernel_of_a_variant_is_there() -> None:
    kernels = {kernel.name for kernel in jit.list_kernels()}
    for variant in VARIANTS.values():
        assert kernels.issuperset(variant.sources), variant.name
        assert len(set(variant.configurations())) == len(variant.configurations()), variant.name
