"""Tandem's control plane: admission, ordering, preemption and memory quotas on one GPU."""

__version__ = "0.1.0"
