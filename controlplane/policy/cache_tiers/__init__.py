"""Allocation of KV cache and hidden states, the two cache tiers of the hybrid cache."""
