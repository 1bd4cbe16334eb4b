"""Measurements of the engine policies on vLLM's scheduler in virtual time."""
