"""Engines behind the ports of controlplane.core.ports."""
