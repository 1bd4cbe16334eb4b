"""Engines that implement the ports of `controlplane.core.ports`, real, simulated and scripted."""
