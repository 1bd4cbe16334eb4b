"""When may the next decode step begin, if the device has something else to do meanwhile?

Rule: a reader who was promised 20 ms a token is served no better with 4, and fewer steps with more answers
in each cost less. While embeddings want the device, steps follow each other at a share of the shortest
promise of those that run; the rest of it absorbs what was guessed wrongly. A promise for the mean is kept by
its line: whom a long step set behind that share, waits the less until it has caught up, for an answer that
only just keeps its promise breaks it on the way to its reader. What has a promise for its whole
answer counts with the time left for each token that it may still ask for. Who waits for a first token, or
is late, is not made to wait for anybody: then the next step begins at once. No wait is long: meanwhile the
other may have finished.
"""

from collections.abc import Iterable

from controlplane.core.clock import Duration, Instant, after, between, milliseconds, scaled
from controlplane.policy.engine.request_state import RequestState

_LONGEST = milliseconds(50)


def next_step_start(
    running: Iterable[RequestState], previous_start: Instant, now: Instant, share: float
) -> Instant:
    """The earliest begin of the next step where the last began at `last`. 0 <= `share` < 1."""
    shortest: Duration | None = None
    for state in running:
        if (first_token := state.first_token) is None:
            return previous_start
        allowed = _allowed(state, first_token, now, share)
        if allowed is not None and (shortest is None or allowed < shortest):
            shortest = allowed
    return previous_start if shortest is None else after(previous_start, min(_LONGEST, shortest))


def _allowed(state: RequestState, first_token: Instant, now: Instant, share: float) -> Duration | None:
    """From the begin of one step to that of the next; None if nothing is promised."""
    slo, deadline = state.request.slo, state.deadline()
    if deadline is not None and deadline < now:
        return Duration(0)
    allowed = [] if state.gap is None else [scaled(state.gap, share)]
    if slo.tpot is not None:
        gap = scaled(slo.tpot, share)
        # The next step is taken to last as long as the one that has just ended.
        until_due = between(now, Instant(first_token + gap * state.done))
        allowed.append(max(Duration(0), min(gap, until_due)))
    if slo.e2e is not None:
        left = between(now, after(state.request.arrival, slo.e2e))
        max_remaining = max(1, state.request.max_output_tokens - state.done)
        allowed.append(scaled(Duration(max(0, left) // max_remaining), share))
    return min(allowed, default=None)
