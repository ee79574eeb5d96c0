"""Proof that a person can check: how fast the kernels are, and what they are compared with."""
