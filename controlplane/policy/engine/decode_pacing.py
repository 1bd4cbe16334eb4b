"""Delays decode steps while an embedding pass is under way, without breaking a TPOT objective.

Fewer, larger decode steps cost less device time. While a pass is under way, the next step starts no earlier
than `share` of the tightest objective among the running requests after the start of the previous one;
the rest of the objective absorbs prediction error. A request behind `share` of its mean TPOT, for example
after a long step, shortens the delay until it has caught up, because a response that barely meets its TPOT in
the engine misses it at the client. So does a request whose lead over its mean TPOT is less than the longest
recent step: one such step must not make it late. A request with an e2e objective counts with the time left
per token that it may still produce. A request without its first token, or late, removes the delay. The delay
is at most 50 ms. The host ends it when the pass ends.

Delayed requests hold their memory longer. Where a step takes s times as long, s times as many requests run at
once, and the memory that they hold grows as much (Little's law). So a step starts at most as long after the
previous one as a step takes, times half of the memory over the memory in use. The other half is for requests
that grow and arrive unevenly. The delay also shrinks with the share of the memory that is free.
"""

from collections.abc import Iterable

from controlplane.core.clock import Duration, Instant, after, between, milliseconds, scaled
from controlplane.policy.engine.request_state import RequestState

_LONGEST = milliseconds(50)
_USED_SHARE = 0.5
"""Share of the memory up to which delayed requests may fill it (docs/decisions/0092)."""


def next_step_start(
    running: Iterable[RequestState],
    previous_start: Instant,
    now: Instant,
    share: float,
    *,
    free_share: float,
    longest_step: Duration,
    step: Duration,
) -> Instant:
    """Earliest start of the next decode step.

    Args:
        running: requests in the batch.
        previous_start: start of the previous step.
        now: current time.
        share: part of the tightest TPOT to use, 0 <= share < 1; 0 never delays.
        free_share: share of the KV-cache quota that is free, from 0 to 1.
        longest_step: the longest of the recent steps.
        step: time of a step of the present batch; 0 if unknown, then the memory in use sets no limit.
    """
    shortest: Duration | None = None
    for state in running:
        if (first_token := state.first_token) is None:
            return previous_start
        allowed = _allowed(state, first_token, now, share, longest_step)
        if allowed is not None and (shortest is None or allowed < shortest):
            shortest = allowed
    if shortest is None:
        return previous_start
    delay = min(_LONGEST, scaled(shortest, free_share))
    if step and (used := 1.0 - free_share) > 0.0:
        delay = min(delay, scaled(step, _USED_SHARE / used))
    return after(previous_start, delay)


def _allowed(
    state: RequestState, first_token: Instant, now: Instant, share: float, longest_step: Duration
) -> Duration | None:
    """Longest time between the starts of two steps for one request; None without an objective."""
    slo, deadline = state.request.slo, state.deadline()
    if deadline is not None and deadline < now:
        return Duration(0)
    allowed = [] if slo.gap is None else [scaled(slo.gap, share)]
    if slo.tpot is not None:
        gap = scaled(slo.tpot, share)
        # The next step is assumed to take as long as the last one.
        until_due = between(now, Instant(first_token + gap * state.done))
        lead = between(now, Instant(first_token + slo.tpot * state.done)) - longest_step
        allowed.append(max(Duration(0), min(gap, until_due, Duration(lead))))
    if slo.e2e is not None:
        left = between(now, after(state.request.arrival, slo.e2e))
        max_remaining = max(1, state.request.max_output_tokens - state.done)
        allowed.append(scaled(Duration(max(0, left) // max_remaining), share))
    return min(allowed, default=None)
