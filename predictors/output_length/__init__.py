"""Predictors of how many tokens a request will generate."""
