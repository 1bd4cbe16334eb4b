"""Forecasts of the embedding load."""
