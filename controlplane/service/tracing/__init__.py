"""OpenTelemetry traces, built from the timeline of a request after its end."""
