"""Measurements of the forecasts of lengths, TTFT and embedding load."""
