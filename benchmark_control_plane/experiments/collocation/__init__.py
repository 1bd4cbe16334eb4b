"""Measurements of an LLM and embedding models on one machine."""
