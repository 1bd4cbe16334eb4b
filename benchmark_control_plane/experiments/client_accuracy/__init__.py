"""Measurements of the benchmark client's accuracy."""
