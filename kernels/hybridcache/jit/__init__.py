"""Triton kernels. Parameters are pointers, numbers or constants by what is passed, so they are not typed."""
