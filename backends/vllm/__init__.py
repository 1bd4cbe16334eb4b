"""vLLM: the only package that imports it."""
