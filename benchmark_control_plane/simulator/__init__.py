"""Runs the live service on simulated engines in virtual time."""
