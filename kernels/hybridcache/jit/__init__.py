"""Triton kernels; their parameters are untyped, because Triton infers the types from the arguments."""
