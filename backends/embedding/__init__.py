"""Embedding models served with sentence-transformers in a process of their own."""
