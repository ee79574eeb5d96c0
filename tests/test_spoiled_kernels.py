"""GPU tests that spoil a kernel quote its text: without a GPU too it is noticed when that has changed."""

import pytest
from gpu.test_verify_on_gpu import EPILOGUES, MISTAKES

from cupy_resnet.jit.sources import find_kernel

FOLDER = find_kernel("conv2d_direct").path.parent
QUOTES = [mistake[:2] for mistake in (*MISTAKES.values(), *EPILOGUES)]


@pytest.mark.parametrize(("file", "correct"), QUOTES)
def test_what_is_spoiled_is_there(file: str, correct: str) -> None:
    folder = FOLDER / "include" if file.endswith(".cuh") else FOLDER
    assert correct in (folder / file).read_text(encoding="utf-8")
