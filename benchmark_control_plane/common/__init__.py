"""Servers, HTTP client, files and statistics that the benchmarks share."""
