"""Experiments on many boxes behind routers."""
