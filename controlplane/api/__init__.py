"""The door: OpenAI-compatible HTTP."""
