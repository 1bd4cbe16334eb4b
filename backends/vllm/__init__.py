"""The vLLM backend: the only package that imports vLLM."""
