"""Engines without a model that run in virtual time on a simulated device."""
