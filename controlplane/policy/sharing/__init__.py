"""Division of GPU memory and device time between the LLM and the embedding models."""
