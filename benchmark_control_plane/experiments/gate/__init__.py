"""Measurements of the gate: overhead, overload, Retry-After and the memory monitor."""
