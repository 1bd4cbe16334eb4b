"""The OpenAI-compatible endpoints for chat, completions and embeddings."""
