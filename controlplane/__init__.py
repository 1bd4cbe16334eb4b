"""Tandem's control plane: what is admitted, in which order, onto which memory."""

__version__ = "0.1.0"
