"""Embedding models in a process of their own."""
