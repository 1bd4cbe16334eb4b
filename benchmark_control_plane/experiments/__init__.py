"""Research: one command per measurement, on the simulator, on vLLM's scheduler or on real servers."""
