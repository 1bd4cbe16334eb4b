"""Request models and headers of the HTTP API; imports nothing else of the control plane."""
