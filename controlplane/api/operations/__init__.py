"""Health, readiness, metrics and the admin endpoints."""
