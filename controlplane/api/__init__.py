"""The HTTP server: OpenAI-compatible endpoints, operations endpoints, errors."""
