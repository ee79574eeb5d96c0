"""The engines: the same operations (`base.Ops`) in NumPy and in this project's CUDA kernels."""
