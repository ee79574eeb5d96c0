"""Says what CuPy's errors leave out: after some of them the process cannot use the GPU any more."""

from collections.abc import Iterator
from contextlib import contextmanager

_STICKY = (700, 710, 714, 715, 716, 717, 718, 719)
"""Numbers of CUDA's errors that end the context: illegal address, failed assertion, and what else a kernel dies of."""


@contextmanager
def lost_context_explained() -> Iterator[None]:
    """Turns an error after which CUDA refuses all further work in this process into one that says so.

    Such an error surfaces at whatever call comes next, which need not be the one that caused it. CuPy is recognised by
    its errors' module, not imported.

    Raises:
        RuntimeError: in place of such an error, which is its cause.
    """
    try:
        yield
    except Exception as error:
        from_cupy = type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends")
        if not from_cupy or getattr(error, "status", None) not in _STICKY:
            raise
        raise RuntimeError(
            f"a kernel failed on the GPU, this call's or an earlier one's: {error}. CUDA refuses all further work in "
            "this process: restart it. CUDA_LAUNCH_BLOCKING=1 makes the failing launch the one that raises."
        ) from error
