"""Runs experiments from YAML: planned workloads, open-loop load generation and analysis per service class."""
