"""jit.sources and jit.arch: finding kernels, reading their heads, following their includes."""

import pytest
from jit_support import KERNELS, use_kernels, write_kernels

from cupy_resnet import jit
from cupy_resnet.errors import CompileError
from cupy_resnet.jit.arch import Arch, best_for_device
from cupy_resnet.jit.sources import find_kernel, load_program


@pytest.fixture
def root(tmp_path, monkeypatch):
    use_kernels(monkeypatch, tmp_path)
    return write_kernels(tmp_path)


def test_lists_kernels_with_what_their_heads_say(root):
    listed = [(kernel.name, kernel.solves, kernel.min_arch) for kernel in jit.list_kernels()]
    assert listed == [
        ("hopper", "nothing: it moves registers between warps, which only sm_90a can", "sm_90a"),
        ("scale", "y = FACTOR * x", "sm_70"),
        ("wmma_tile", "one 16x16x16 tensor core product", "sm_70"),
    ]


@pytest.mark.parametrize("tag", ["solves", "arch"])
def test_a_head_without_a_tag_is_named(root, tag):
    text = "\n".join(line for line in KERNELS["scale.cu"].splitlines() if f"@{tag}" not in line)
    (root / "scale.cu").write_text(text)
    with pytest.raises(CompileError, match=rf"scale\.cu does not say '// @{tag}"):
        jit.list_kernels()


def test_a_misspelled_minimum_architecture_is_named(root):
    (root / "scale.cu").write_text("// @solves x\n// @arch 70\n")
    with pytest.raises(CompileError, match=r"scale\.cu.*sm_80.*'70'"):
        find_kernel("scale")


CONDITIONS = """\
// scale: multiplies by FACTOR.
// @solves y = FACTOR * x
// @arch sm_70
// @arch_if ELEMENT=BFloat16 sm_80
//   @arch_if   PRODUCTS=3   sm_90a
int f;  // @arch_if ELEMENT=Half sm_90
"""


@pytest.mark.parametrize(
    ("defines", "arch"),
    [
        ({}, "sm_70"),
        ({"ELEMENT": "Half"}, "sm_70"),  # what is no line of its own is no condition
        ({"ELEMENT": "BFloat16"}, "sm_80"),
        ({"ELEMENT": "BFloat16x"}, "sm_70"),
        ({"OTHER": "BFloat16"}, "sm_70"),
        ({"PRODUCTS": 3}, "sm_90a"),  # numbers as they are written
        ({"PRODUCTS": 30}, "sm_70"),
    ],
)
def test_a_form_that_needs_more_says_so(root, defines, arch):
    (root / "scale.cu").write_text(CONDITIONS)
    kernel = find_kernel("scale")
    assert kernel.min_arch == "sm_70"
    assert kernel.min_arch_of(defines) == arch


def test_of_two_conditions_the_higher_counts(root):
    (root / "scale.cu").write_text(CONDITIONS)
    assert find_kernel("scale").min_arch_of({"ELEMENT": "BFloat16", "PRODUCTS": 3}) == "sm_90a"


def test_a_condition_with_a_misspelled_architecture_is_named(root):
    (root / "scale.cu").write_text(CONDITIONS.replace("sm_80", "sm80"))
    with pytest.raises(CompileError, match=r"scale\.cu.*@arch_if.*'sm80'"):
        find_kernel("scale")


def test_a_form_is_refused_below_its_own_minimum_only(root):
    (root / "scale.cu").write_text(KERNELS["scale.cu"].replace("sm_70\n", "sm_70\n// @arch_if FACTOR=3 sm_90\n"))
    with pytest.raises(CompileError, match="kernel scale needs at least sm_90, but sm_80 was asked for"):
        jit.compile_kernel("scale", defines={"FACTOR": 3}, arch="sm_80")


@pytest.mark.parametrize("name", ["scael", "../scale", "include/scale", ""])
def test_an_unknown_kernel_lists_the_known(root, name):
    with pytest.raises(ValueError, match="hopper, scale, wmma_tile"):
        find_kernel(name)


def test_a_program_holds_the_headers_it_reaches_and_no_other(root):
    (root / "include/unused.cuh").write_text("int unused;")
    program = load_program(find_kernel("scale"))
    assert [name for name, _ in program.headers] == ["inner/factor.cuh", "scale.cuh"]
    assert not program.needs_system_headers
    assert load_program(find_kernel("wmma_tile")).needs_system_headers


def test_includes_may_be_circular(root):
    (root / "include/inner/factor.cuh").write_text('#include "scale.cuh"\n')
    assert len(load_program(find_kernel("scale")).headers) == 2


def test_a_quoted_header_that_is_not_ours_needs_the_toolkit(root):
    (root / "scale.cu").write_text('// @solves x\n// @arch sm_70\n#include "cuda_fp16.h"\n')
    assert load_program(find_kernel("scale")).needs_system_headers


def test_the_digest_covers_names_and_every_byte(root):
    digests = {jit.sources_digest()}
    (root / "include/inner/factor.cuh").write_text(KERNELS["include/inner/factor.cuh"] + " ")
    digests.add(jit.sources_digest())
    (root / "scale.cu").rename(root / "scale2.cu")
    digests.add(jit.sources_digest())
    assert len(digests) == 3
    (root / "README.md").write_text("not a source")
    assert jit.sources_digest() in digests


@pytest.mark.parametrize("text", ["sm_80", "sm_90a", "sm_120", "sm_100f"])
def test_architectures_are_read_and_written_alike(text):
    assert str(Arch.parse(text)) == text


@pytest.mark.parametrize("text", ["", "80", "sm80", "sm_8", "compute_80", "sm_90A", "sm_90a ", "sm_1000"])
def test_other_spellings_are_refused(text):
    with pytest.raises(ValueError, match="spelled like sm_80"):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("arch", "minimum", "compiled"),
    [
        ("sm_80", "sm_80", "sm_80"),
        ("sm_90", "sm_80", "sm_90"),
        ("sm_90a", "sm_80", "sm_90a"),
        ("sm_75", "sm_80", None),
        ("sm_100", "sm_90", "sm_100"),  # numbers, not texts, are compared
        ("sm_90", "sm_90a", "sm_90a"),
        ("sm_90a", "sm_90a", "sm_90a"),
        ("sm_100", "sm_90a", None),  # what has a letter runs nowhere else
        ("sm_100a", "sm_90a", None),
        ("sm_80", "sm_90a", None),
    ],
)
def test_what_is_compiled_for_a_kernel_with_a_minimum(arch, minimum, compiled):
    specialised = Arch.parse(arch).specialised(Arch.parse(minimum))
    assert (None if specialised is None else str(specialised)) == compiled


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((7, 0), None), ((13, 0), None)],
)
def test_a_device_gets_the_newest_architecture_that_runs_on_it(capability, expected):
    arch = best_for_device(capability, (75, 80, 86, 89, 90, 100, 120))
    assert (None if arch is None else str(arch)) == expected
