"""The example of docs/writing-a-policy.md: an ordering and an LLM backend for Tandem."""
