"""Scripted engines for tests of the gate and of policies."""
