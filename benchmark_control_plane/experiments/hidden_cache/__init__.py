"""Measurements of the hidden-state cache: attainment, decode cost and kernels."""
