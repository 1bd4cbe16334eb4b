"""Decisions taken once per request at the gate: ordering, admission and preemption."""
