"""Exceptions with a name of their own: what a caller may want to catch apart from ValueError and TypeError."""


class EngineUnavailableError(RuntimeError):
    """An engine was asked for that this machine cannot run; the message says what is missing and how to get it."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel, or cannot be used; the message shows file and line, versions and headers searched."""


class UnsupportedProblemError(ValueError):
    """A kernel was demanded (``strict=True``) for a problem it does not solve, or a problem exceeds a hard limit."""


class CheckpointError(ValueError):
    """A state dict does not fit the network; the message lists what is missing, left over, or of another shape."""
