"""Chooses a box for each request of a fleet: pure functions and state, without I/O, clock or randomness.

A box is one server of Tandem with its engines. Times are float seconds: reports come from other hosts, whose
clocks are never compared, so that a report states ages and durations only. `now` is the router's own
monotonic time, and random draws are arguments, each uniform in [0, 1).
"""
