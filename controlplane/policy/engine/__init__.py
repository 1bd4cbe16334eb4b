"""Decisions taken before every engine step: which requests start and which are preempted."""
