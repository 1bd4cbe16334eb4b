"""The fault suite: faults injected into a server under load, with every request accounted for."""
