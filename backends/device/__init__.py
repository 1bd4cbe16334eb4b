"""Memory of the device: probes of what is used, and how KV-cache memory is limited."""
