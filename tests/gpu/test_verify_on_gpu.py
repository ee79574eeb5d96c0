"""Verification on the GPU: our kernels pass, and a kernel with a mistake in its source is found and located."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import normal
from verify_support import over

import cupy_resnet
from cupy_resnet import weights_store
from cupy_resnet.conv2d import VARIANTS, stem_choice
from cupy_resnet.jit import building, loading
from cupy_resnet.jit.sources import KernelSource, Program
from cupy_resnet.networks import describe, random_state_dict
from cupy_resnet.proof.verification import (
    Recording,
    check,
    check_steps,
    make_reference,
    read_dump,
    record,
    record_reference,
    verify,
    write_dump,
)
from gpu.half import KERNELS

pytestmark = pytest.mark.gpu

STATE = random_state_dict(describe("resnet18"), seed=3)
WEIGHTS = weights_store.resolve("resnet18", STATE)
X = normal((2, 3, 64, 64), 8)

Spoil = Callable[[str, str, str], None]


@pytest.fixture(scope="module")
def reference() -> Recording:
    """What torchvision computes on the CPU, where no mistake of a GPU's can be shared."""
    return record_reference(make_reference("torch", WEIGHTS), WEIGHTS, X)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Replaces text in a kernel's source or in a header of ours, wherever that is compiled from now on."""
    read = building.load_program
    mistakes: list[tuple[str, str, str]] = []

    def spoiled(name: str, text: str) -> str:
        for file, correct, wrong in mistakes:
            if name.endswith(f"/{file}") or name == file:
                assert correct in text, f"{file} does not say {correct!r} any more: spoil something else"
                text = text.replace(correct, wrong)
        return text

    def load_program(kernel: KernelSource) -> Program:
        program = read(kernel)
        headers = tuple((name, spoiled(name, text)) for name, text in program.headers)
        return replace(program, text=spoiled(program.name, program.text), headers=headers)

    def spoil(file: str, correct: str, wrong: str) -> None:
        mistakes.append((file, correct, wrong))
        monkeypatch.setattr(building, "load_program", load_program)
        # What is loaded already is correct and must not be used; the cache on disk goes by content.
        monkeypatch.setattr(loading, "_loaded", loading._Loaded())

    return spoil


def model(**options: Any) -> cupy_resnet.Model:
    return cupy_resnet.load("resnet18", STATE, engine="cuda", **options)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("kernel", "precision"), KERNELS)
def test_every_kernel_passes(reference: Recording, kernel: str, precision: str, fuse: bool, step: bool) -> None:
    with model(kernel=kernel, precision=precision, fuse=fuse) as loaded:
        report = check_steps(loaded, reference) if step else check(record(loaded, X), reference)
    assert report.passed, [(c.name, c.value_share, c.norm_share) for c in report.comparisons]


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "resnet110"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("step", [False, True])
def test_every_family_passes(name: str, step: bool, precision: str) -> None:
    state = random_state_dict(describe(name), seed=3)
    with cupy_resnet.load(name, state, engine="cuda", precision=precision) as loaded:
        outcome = verify(loaded, weights_store.resolve(name, state), "torch", step=step, size=64, batch=2)
    assert outcome.layers is not None
    assert outcome.passed, [(c.name, c.value_share, c.norm_share) for c in outcome.layers.comparisons]


MISTAKES = {
    "one tap": (
        *(
            "conv2d_direct.cu",
            "if (h < 0 ||",
            "if ((r == 2 && s == 2 && params.C == 64 && params.K == 128) || h < 0 ||",
        ),
        *({"kernel": "conv2d_direct"}, {"layer2.0"}),
    ),
    "padding": (
        *("conv2d_direct.cu", "params.stride_w - params.pad_w", "params.stride_w - params.pad_w - (params.C == 512)"),
        *({"kernel": "conv2d_direct"}, {"layer4.0", "layer4.1"}),
    ),
    "epsilon": (
        *("batch_norm2d.cu", "(variances[v] + eps)", "(variances[v] + (C == 256 ? 0.1f : eps))"),
        *({"fuse": False, "precision": "fp32"}, {"layer3.0", "layer3.1"}),
    ),
    "padding of the pool": ("pool2d.cuh", "- params.pad_w", "- params.pad_w + 1", {"precision": "fp32"}, {"stem"}),
    "padding on tensor cores": (
        *("implicit_gemm.cuh", "params.stride_w - params.pad_w", "params.stride_w - params.pad_w - (params.C == 512)"),
        *({"kernel": "conv2d_mma"}, {"layer4.0", "layer4.1"}),
    ),
    "one tap on tensor cores": (
        *(
            "implicit_gemm.cuh",
            "return static_cast<unsigned>(h) < static_cast<unsigned>(params.H) &&",
            "return !(position.r == 2 && position.s == 2 && params.C == 64 && params.K == 128) &&\n"
            "    static_cast<unsigned>(h) < static_cast<unsigned>(params.H) &&",
        ),
        *({"kernel": "conv2d_mma"}, {"layer2.0"}),
    ),
    "padding of the stem": (
        *("conv2d_stem.cu", "2 * (2 * tile.q0 - 1) - 3;", "2 * (2 * tile.q0 - 1) - 2;"),
        *({"precision": "fp16"}, {"stem"}),
    ),
    "padding of the stem's pool": (
        *("conv2d_stem.cu", "{q > 0 ? 0 : 1,", "{0,"),
        *({"precision": "fp16"}, {"stem"}),
    ),
    "padding of the stem on wgmma": (
        *(
            "stem_pixels.cuh",
            "w = 2 * (pair.column + static_cast<int>(threadIdx.x)) - 3 + column",
            "w = 2 * (pair.column + static_cast<int>(threadIdx.x)) - 2 + column",
        ),
        *({"precision": "fp16"}, {"stem"}),
    ),
    "odd columns of the stem's pool on wgmma": (
        *("stem_pool.cuh", "row[m][2 * j + 1], 0x7632)", "row[m][2 * j + 1], 0x5410)"),
        *({"precision": "fp16"}, {"stem"}),
    ),
    "odd columns of the stem's pool on wgmma in TF32": (
        *("conv2d_stem_wgmma_tf32.cu", "odd = odd_exists ? odd : even;", "odd = even;"),
        *({"precision": "tf32"}, {"stem"}),
    ),
    "borders of the stem's groups on wgmma in fp32-tc": (
        *("stem_pool_rows.cuh", "(i > 0 ? added : own)", "(i > 1 ? added : own)"),
        *({"precision": "fp32-tc"}, {"stem"}),
    ),
}
"""What is wrong → file, correct text, wrong text, how the model is loaded, and the blocks that compute with it."""


@pytest.mark.parametrize(("file", "correct", "wrong", "options", "guilty"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_located(
    monkeypatch: pytest.MonkeyPatch,
    reference: Recording,
    spoil: Spoil,
    file: str,
    correct: str,
    wrong: str,
    options: dict[str, Any],
    guilty: set[str],
) -> None:
    import cupy

    if file in ("stem_pixels.cuh", "stem_pool.cuh", "stem_pool_rows.cuh", "conv2d_stem_wgmma_tf32.cu"):
        if cupy.cuda.Device().compute_capability != "90":
            pytest.skip("runs on compute capability 9.0 only")
        monkeypatch.setattr(stem_choice, "FEW_OUTPUTS", 0)
    spoil(file, correct, wrong)
    with model(**options) as loaded:
        first = min(guilty, key=loaded.checkpoint_names.index)
        report = check(record(loaded, X), reference)
        assert over(report)[0] == first
        assert set(over(check_steps(loaded, reference))) == guilty


FORGETFUL = "({k} < {last} ? epilogue : {type}{{epilogue.bias, nullptr, epilogue.with_relu}})"
WIDE = "Epilogue8<ELEMENT>"
EPILOGUES = [
    ("epilogue.cuh", "load_residual(offset));", "k < 508 ? load_residual(offset) : 0.0f);"),
    *(
        (file, "epilogue.load_residual", FORGETFUL.format(k="k", last=508, type="Epilogue") + ".load_residual")
        for file in ("conv2d_implicit_gemm.cu", "sgemm.cu", "conv2d_winograd.cu")
    ),
    (
        "conv2d_wgmma.cu",
        "finish<ELEMENT, true>(sums, biases_of_piece, staged, piece, params.relu);",
        "n0 + TILE_N < 512 ? finish<ELEMENT, true>(sums, biases_of_piece, staged, piece, params.relu)\n"
        "         : finish<ELEMENT, false>(sums, biases_of_piece, staged, piece, params.relu);",
    ),
    (
        "conv2d_wgmma_3xtf32.cu",
        "biases[j], shortcuts[j][f], ",
        "biases[j], n0 + j * 8 < 504 ? shortcuts[j][f] : float2{}, ",
    ),
    ("conv2d_wgmma_3xtf32.cu", "= residual ? *pair", "= residual && n0 + j * 8 < 504 ? *pair"),
    (
        "conv2d_wgmma_patch.cu",
        "residuals, barrier, tile.k, 0",
        "residuals, barrier, tile.k < 448 ? tile.k : params.K, 0",
    ),
    *(
        (file, "epilogue.load_residual<", FORGETFUL.format(k=k, last=504, type=WIDE) + ".load_residual<")
        for file, k in (
            ("mma_tile.cuh", "k"),
            ("conv2d_wmma.cu", "k"),
            ("partial_sums.cuh", "k"),
            ("conv2d_wgmma_patch_split_k.cu", "k + i * 8"),
        )
    ),
]
"""File, correct text, and one that forgets the residual for the last of 512 filters."""


@pytest.mark.parametrize("kernel", VARIANTS)
def test_a_mistake_in_any_kernels_epilogue_is_found(reference: Recording, spoil: Spoil, kernel: str) -> None:
    """A kernel that adds a downsample itself has one residual less."""
    guilty = {"layer4.1"} if VARIANTS[kernel].adds_shortcut else {"layer4.0", "layer4.1"}
    for mistake in EPILOGUES:
        spoil(*mistake)
    with model(kernel=kernel) as loaded:
        assert {step.kernel for step in loaded.explain(X.shape) if step.layer == "layer4.1.conv2"} == {kernel}
        assert over(check(record(loaded, X), reference))[0] == min(guilty)
        assert set(over(check_steps(loaded, reference))) == guilty


def test_the_spoiled_kernels_are_gone(reference: Recording) -> None:
    for kernel, precision in (("conv2d_direct", "fp32"), ("conv2d_mma", "fp16"), ("auto", "fp32"), ("auto", "fp16")):
        for fuse in (False, True):
            with model(kernel=kernel, precision=precision, fuse=fuse) as loaded:
                assert check(record(loaded, X), reference).passed


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_dump_of_the_gpu_is_compared_on_the_cpu(precision: str, tmp_path: Any) -> None:
    with model(precision=precision) as loaded:
        write_dump(tmp_path / "gpu", record(loaded, X))
    on_cpu = cupy_resnet.load("resnet18", STATE, engine="numpy")
    outcome = verify(on_cpu, WEIGHTS, tmp_path / "gpu")
    assert outcome.passed
    assert read_dump(tmp_path / "gpu").computed_by.startswith(f"cuda engine, kernel auto, {precision}, fused")


def test_torch_on_the_gpu_computes_without_tf32() -> None:
    """Against float64: TF32 would use a thousand times as much of the tolerance."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    torch.backends.cudnn.allow_tf32 = True
    on_gpu = record_reference(make_reference("torch", WEIGHTS, device="cuda"), WEIGHTS, X)
    exact = record_reference(make_reference("numpy", WEIGHTS), WEIGHTS, X)
    assert check(on_gpu, exact).passed
    assert torch.backends.cudnn.allow_tf32
    np.testing.assert_array_equal(on_gpu.input, exact.input)
