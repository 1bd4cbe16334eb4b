"""Forecasts of lengths and times while requests are served, their training, and their failures."""
