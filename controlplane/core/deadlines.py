"""Slack of a running generation, and whether it can still meet its SLO.

Every objective becomes a deadline of the next token:

- before the first token, TTFT: `arrival + ttft`;
- after it, TPOT: `first_token + tpot * output_tokens`. TPOT is a mean, so tokens that came early add slack;
- after it, the longest pause: `last_token + gap`;
- always, end-to-end time: `arrival + e2e` less a step for each token after the next one.

The slack is the time to the earliest, less the work before the next token. An objective that was missed for
good (a late first token, a pause that was too long) does not enter: the slack is about what the next token
can still miss. It is negative once a deadline has passed. Then the SLO cannot be met any more, except
for TPOT: a mean recovers while steps are shorter than it (`last_chance`).
"""

from typing import NamedTuple

from controlplane.core.clock import Duration, Instant
from controlplane.core.slo import Slo


class Progress(NamedTuple):
    """Times of the arrival and of the first and the last token of one generation, and its tokens so far."""

    arrival: Instant
    first_token: Instant | None = None
    last_token: Instant | None = None
    output_tokens: int = 0


def token_deadlines(
    slo: Slo, seen: Progress, remaining: int, step: Duration, *, catch_up: int = 0
) -> list[tuple[Duration, int]]:
    """The objectives that the next token can miss, each with the deadline that it sets.

    Args:
        slo: the objectives.
        seen: progress of the request.
        remaining: output tokens still to come, at least 1, at the quantile that the caller asks for.
        step: time of each token after the next one.
        catch_up: tokens after the next one over which time lost on TPOT may be regained at `step`; 0 requires
            the mean so far to meet TPOT.
    """
    arrival, first, last, done = seen
    found: list[tuple[Duration, int]] = []
    if first is None or last is None:
        if slo.ttft is not None:
            found.append((slo.ttft, arrival + slo.ttft))
    else:
        if slo.tpot is not None:
            regained = max(0, slo.tpot - step) * catch_up
            found.append((slo.tpot, first + slo.tpot * done + regained))
        if slo.gap is not None:
            found.append((slo.gap, last + slo.gap))
    if slo.e2e is not None:
        found.append((slo.e2e, arrival + slo.e2e - step * (remaining - 1)))
    return found


def next_token_deadline(
    slo: Slo, seen: Progress, remaining: int, step: Duration, *, catch_up: int = 0
) -> Instant | None:
    """The earliest of `token_deadlines`; None without an objective that the next token can miss."""
    found = token_deadlines(slo, seen, remaining, step, catch_up=catch_up)
    return Instant(min(deadline for _, deadline in found)) if found else None


def last_chance(slo: Slo, seen: Progress, likely: tuple[int, int], step: Duration) -> Instant | None:
    """The latest time of the next token with which the SLO can still be met; None without such a limit.

    It cannot be met if an objective is missed although every step takes only `step`. A step longer than TPOT
    counts as TPOT, because it shortens when the batch shrinks. `likely` are the fewest and the most output
    tokens in total: end-to-end time is missed at the fewest or more, TPOT at the most or fewer. With the
    quantiles 0.1 and 0.9 (`LengthForecast.likely_total`) each is missed with a probability of at least 0.9.
    """
    fewest, most = (max(1, tokens - seen.output_tokens) for tokens in likely)
    return next_token_deadline(slo, seen, fewest, step, catch_up=most - 1)
