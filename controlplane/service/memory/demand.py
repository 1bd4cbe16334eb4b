"""How urgent is each kind's work? The slack of every request that waits or runs and has a deadline.

A running answer's slack is how far it is ahead of its promised pace; before the first token, what is left
after the prefill. Embeddings are computed one after another, soonest deadline first: each waits for the work
before it. Half of what was promised is plenty: with that much left nothing is urgent, however
short the promise. What was turned away for want of memory has no slack left; it counts for some seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

from controlplane.core.clock import Duration, Instant, between, scaled, to_seconds
from controlplane.core.request import Kind, Owner
from controlplane.core.view import Pace
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.policy.sharing.quota import UrgencyOptions, urgency_of_all
from controlplane.service.ticket import Ticket

_FADING_SECONDS = 3.0


def slacks(
    tickets: Iterable[Ticket], paces: Mapping[Owner, Pace | None], now: Instant, critical: Duration
) -> dict[Owner, list[Duration]]:
    """Where half the promise is shorter than `critical`, slack is stretched by as much."""
    embeds: list[tuple[Instant, Ticket]] = []
    found: dict[Owner, list[Duration]] = {owner: [] for owner in Owner}
    for ticket in tickets:
        request, begun = ticket.request, ticket.timeline.first_token
        deadline = request.slo.first_token_deadline(request.arrival)
        if request.kind is Kind.EMBED:
            if deadline is not None:
                embeds.append((deadline, ticket))
        elif (slack := ticket.slack(now)) is not None:
            promise = request.slo.tpot if begun is not None else between(request.arrival, deadline or now)
            work = work_before_deadline(request, ticket.footprint, paces[Owner.LLM])
            left = slack if begun is not None else Duration(slack - work)
            found[Owner.LLM].append(_stretched(left, promise, critical))
    pace = paces[Owner.EMBEDDING]
    ahead = 0
    for deadline, ticket in sorted(embeds, key=lambda e: (e[0], e[1].request.id)):
        ahead += ticket.request.prompt_tokens
        work = Duration(0) if pace is None else scaled(pace.per_prompt_token, ahead)
        promise = between(ticket.request.arrival, deadline)
        found[Owner.EMBEDDING].append(_stretched(Duration(between(now, deadline) - work), promise, critical))
    return found


def _stretched(slack: Duration, promise: Duration | None, critical: Duration) -> Duration:
    if slack <= 0 or promise is None or promise >= 2 * critical:
        return slack
    return scaled(slack, 2 * critical / promise)


def _nobody() -> dict[Owner, float]:
    return dict.fromkeys(Owner, 0.0)


@dataclass(slots=True)
class Lately:
    """Requests that came, and those of them turned away for want of memory, fading."""

    came: dict[Owner, float] = field(default_factory=_nobody)
    lost: dict[Owner, float] = field(default_factory=_nobody)
    since: Instant | None = None

    def fade(self, now: Instant) -> None:
        if self.since is not None:
            kept = exp(-to_seconds(between(self.since, now)) / _FADING_SECONDS)
            for counts in (self.came, self.lost):
                for owner in counts:
                    counts[owner] *= kept
        self.since = now


def urgencies(
    tickets: Iterable[Ticket],
    paces: Mapping[Owner, Pace | None],
    lately: Lately,
    now: Instant,
    options: UrgencyOptions,
) -> dict[Owner, float]:
    return {
        owner: urgency_of_all(each, options, lost=lately.lost[owner], came=lately.came[owner])
        for owner, each in slacks(tickets, paces, now, options.critical).items()
    }
