"""The request path: intake, rate limits, queueing, scheduling cycle, token stream and release."""
