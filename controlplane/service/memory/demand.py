"""How urgent is each kind's work? The slack of every request that waits or runs and has a deadline.

A running answer's slack is how far it is ahead of its promised pace; before the first token, what is left
after the prefill. Embeddings are computed one after another, soonest deadline first: each waits for the work
before it. Half of what was promised is plenty: with that much left nothing is urgent, however
short the promise. What was turned away for want of memory has no slack left; it counts for some seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

from controlplane.core.clock import Duration, Instant, after, between, scaled, to_seconds
from controlplane.core.memory import Footprint
from controlplane.core.request import Kind, Owner, Request
from controlplane.core.view import Pace, Reserve
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.policy.sharing.quota import UrgencyOptions, urgency_of_all
from controlplane.service.ticket import Ticket
from predictors.load.embedding_load import EmbeddingLoad
from predictors.load.series import LEVELS, SeriesForecaster

_DECAY_SECONDS = 3.0


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
            found[Owner.LLM].append(_scaled_slack(left, promise, critical))
    pace = paces[Owner.EMBEDDING]
    ahead = 0
    for deadline, ticket in sorted(embeds, key=lambda e: (e[0], e[1].request.id)):
        ahead += ticket.request.prompt_tokens
        work = Duration(0) if pace is None else scaled(pace.per_prompt_token, ahead)
        promise = between(ticket.request.arrival, deadline)
        found[Owner.EMBEDDING].append(
            _scaled_slack(Duration(between(now, deadline) - work), promise, critical)
        )
    return found


def _scaled_slack(slack: Duration, promise: Duration | None, critical: Duration) -> Duration:
    if slack <= 0 or promise is None or promise >= 2 * critical:
        return slack
    return scaled(slack, 2 * critical / promise)


def _zeros() -> dict[Owner, float]:
    return dict.fromkeys(Owner, 0.0)


@dataclass(slots=True)
class RecentArrivals:
    """Requests that came, and those of them turned away for want of memory, fading."""

    arrived: dict[Owner, float] = field(default_factory=_zeros)
    lost: dict[Owner, float] = field(default_factory=_zeros)
    since: Instant | None = None

    def fade(self, now: Instant) -> None:
        if self.since is not None:
            kept = exp(-to_seconds(between(self.since, now)) / _DECAY_SECONDS)
            for counts in (self.arrived, self.lost):
                for owner in counts:
                    counts[owner] *= kept
        self.since = now


def urgencies(
    tickets: Iterable[Ticket],
    paces: Mapping[Owner, Pace | None],
    lately: RecentArrivals,
    now: Instant,
    options: UrgencyOptions,
) -> dict[Owner, float]:
    return {
        owner: urgency_of_all(each, options, lost=lately.lost[owner], came=lately.arrived[owner])
        for owner, each in slacks(tickets, paces, now, options.critical).items()
    }


# FOLDED foresight.py:
# What will ask for memory soon? Bytes to keep for embedding work, and for requests of the highest priority.
#
# The embedding load is forecast in tokens; what they take while they are computed is at most what the batches
# in flight can take. Of the generation requests, those of the highest priority are foreseen together by the
# bytes that they arrive with; what of it has come already is no longer kept, nor what will be given back
# before the first of them must start.

_NO_WAIT = Duration(0)


@dataclass(slots=True)
class MemoryDemandForecast:
    """Without a `level` nothing is kept. `high_priority` is None where all have the same; requests of it can
    wait for `max_wait`."""

    window: Duration
    level: float | None
    high_priority: int | None
    max_wait: Duration = _NO_WAIT
    load: EmbeddingLoad = field(init=False)
    high: SeriesForecaster = field(init=False, default_factory=SeriesForecaster)
    _high_bytes: int = field(init=False, default=0)
    _window_end: Instant | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.load = EmbeddingLoad(self.window)

    @property
    def horizon(self) -> Duration:
        """What is given back within it serves those that come in the next window."""
        return Duration(self.window + self.max_wait)

    def observe_arrival(self, request: Request, footprint: Footprint, now: Instant) -> None:
        if request.kind is Kind.EMBED:
            self.load.arrived(now, request.prompt_tokens)
        elif request.service_class.priority == self.high_priority:
            self._close_until(now)
            self._high_bytes += footprint.base

    def embedding_tokens(self, now: Instant) -> float:
        """That arrive in the next window at most, at the level asked for; 0 while nothing is known."""
        if self.level is None or (forecast := self.load.next_window(now)) is None:
            return 0.0
        return forecast.tokens_within(self.level)

    def reserve(self, now: Instant, *, released_bytes: int) -> Reserve | None:
        """For what of the highest priority is still to come in this window, at the level asked for, and will
        not find memory that others give back in time."""
        if self.level is None or self.high_priority is None:
            return None
        self._close_until(now)
        if self.high.quantiles is None:
            return None
        expected = next(q for at, q in zip(LEVELS, self.high.quantiles, strict=True) if at >= self.level)
        left = int(expected) - self._high_bytes - released_bytes
        return Reserve(left, self.high_priority) if left > 0 else None

    def _close_until(self, now: Instant) -> None:
        if self._window_end is None:
            self._window_end = after(now, self.window)
        while now >= self._window_end:
            self.high.observe(self._high_bytes)
            self._high_bytes = 0
            # After a long silence one window of it is as good as all.
            missed = max(1, between(self._window_end, now) // self.window)
            self._window_end = after(self._window_end, Duration(self.window * missed))
