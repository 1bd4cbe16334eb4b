"""Fleets of boxes in virtual time: gate-exact on a few boxes, and by compiled step counters on thousands."""
