"""Attention over a cache of hidden states: references and kernels."""
