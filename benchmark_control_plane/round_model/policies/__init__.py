"""Policies of the round model."""
