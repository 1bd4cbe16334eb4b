"""Renders benchmark results as an HTML page, compares two results, and checks them against bounds."""
