"""Writes docs/results.md and the results in README.md from the committed results files."""
