"""Experiments that prove or refute what Tandem claims."""
