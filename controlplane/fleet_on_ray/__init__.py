"""Boxes as replicas of Ray Serve behind its HAProxy, chosen by the routing library. Needs the extra `ray`."""
