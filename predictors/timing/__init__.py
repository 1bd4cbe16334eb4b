"""Predictors of step times, time to first token and the cost of hidden states."""
