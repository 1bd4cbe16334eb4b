"""vLLM's real engine with a latency model in place of the model."""
