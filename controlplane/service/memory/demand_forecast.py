"""Demand for memory: the urgency of each owner's requests, and the forecast of requests to come.

Urgency follows from the deadline slack of every waiting or running request. A running generation's slack is
its lead over its TPOT; before the first token it is the time left after the prefill. Embeddings are computed
one after another, earliest deadline first, so each one waits for the work before it. A request with half of
its objective left is not urgent, however short the objective. A request rejected for lack of memory has no
slack; it counts for some seconds after its rejection.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

from controlplane.core.clock import Duration, Instant, after, between, scaled, to_seconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace, Reserve
from controlplane.core.request import Kind, Owner, Request
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.policy.sharing.quota import UrgencyOptions, urgency_of_all
from controlplane.service.ticket import Ticket
from predictors.load.embedding_load import EmbeddingLoad
from predictors.load.series import LEVELS, SeriesForecaster

_DECAY_SECONDS = 3.0


def slacks(
    tickets: Iterable[Ticket], paces: Mapping[Owner, Pace | None], now: Instant, critical: Duration
) -> dict[Owner, list[Duration]]:
    """The slack of each owner's requests that have a deadline; `paces` are the observed step rates.

    If half of a request's objective is shorter than `critical`, its slack is scaled up accordingly.
    """
    embeddings: list[tuple[Instant, Ticket]] = []
    found: dict[Owner, list[Duration]] = {owner: [] for owner in Owner}
    for ticket in tickets:
        request, begun = ticket.request, ticket.timeline.first_token
        deadline = request.slo.first_token_deadline(request.arrival)
        if request.kind is Kind.EMBED:
            if deadline is not None:
                embeddings.append((deadline, ticket))
        elif (slack := ticket.slack(now)) is not None:
            objective = request.slo.tpot if begun is not None else between(request.arrival, deadline or now)
            work = work_before_deadline(request, ticket.footprint, paces[Owner.LLM])
            left = slack if begun is not None else Duration(slack - work)
            found[Owner.LLM].append(_scaled_slack(left, objective, critical))
    pace = paces[Owner.EMBEDDING]
    ahead = 0
    for deadline, ticket in sorted(embeddings, key=lambda e: (e[0], e[1].request.id)):
        ahead += ticket.request.prompt_tokens
        work = Duration(0) if pace is None else scaled(pace.per_prompt_token, ahead)
        objective = between(ticket.request.arrival, deadline)
        found[Owner.EMBEDDING].append(
            _scaled_slack(Duration(between(now, deadline) - work), objective, critical)
        )
    return found


def _scaled_slack(slack: Duration, objective: Duration | None, critical: Duration) -> Duration:
    if slack <= 0 or objective is None or objective >= 2 * critical:
        return slack
    return scaled(slack, 2 * critical / objective)


def _zeros() -> dict[Owner, float]:
    return dict.fromkeys(Owner, 0.0)


@dataclass(slots=True)
class RecentArrivals:
    """Requests that arrived and those rejected for lack of memory, as exponentially decaying counts."""

    arrived: dict[Owner, float] = field(default_factory=_zeros)
    lost: dict[Owner, float] = field(default_factory=_zeros)
    since: Instant | None = None

    def fade(self, now: Instant) -> None:
        """Decays the counts up to `now`."""
        if self.since is not None:
            decay = exp(-to_seconds(between(self.since, now)) / _DECAY_SECONDS)
            for counts in (self.arrived, self.lost):
                for owner in counts:
                    counts[owner] *= decay
        self.since = now


def urgencies(
    tickets: Iterable[Ticket],
    paces: Mapping[Owner, Pace | None],
    recent: RecentArrivals,
    now: Instant,
    options: UrgencyOptions,
) -> dict[Owner, float]:
    """The urgency of each owner, from the slack of its requests and its recent rejections."""
    return {
        owner: urgency_of_all(each, options, lost=recent.lost[owner], came=recent.arrived[owner])
        for owner, each in slacks(tickets, paces, now, options.critical).items()
    }


_NO_WAIT = Duration(0)


@dataclass(slots=True)
class MemoryDemandForecast:
    """Forecasts the embedding tokens and the high-priority bytes of the next window.

    The embedding load is forecast in tokens. Generation requests of the highest priority are forecast
    together, by the bytes of their footprints on arrival; bytes that have arrived, or that running requests
    will free in time, are not reserved again.

    Attributes:
        window: length of a forecast window.
        level: quantile of the forecasts; None turns them off.
        high_priority: the highest priority; None if all classes have the same.
        max_wait: how long a request of high priority can wait before it must start.
    """

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
        """Memory that is freed within this time serves the requests of the next window."""
        return Duration(self.window + self.max_wait)

    def observe_arrival(self, request: Request, footprint: Footprint, now: Instant) -> None:
        """Adds an arriving request to the series of its kind."""
        if request.kind is Kind.EMBED:
            self.load.arrived(now, request.prompt_tokens)
        elif request.service_class.priority == self.high_priority:
            self._close_until(now)
            self._high_bytes += footprint.base

    def embedding_tokens(self, now: Instant) -> float:
        """Tokens that arrive in the next window, at the quantile `level`; 0 while nothing is known."""
        if self.level is None or (forecast := self.load.next_window(now)) is None:
            return 0.0
        return forecast.tokens_within(self.level)

    def reserve(self, now: Instant, *, released_bytes: int) -> Reserve | None:
        """The memory to reserve for high-priority requests that are still expected in this window.

        `released_bytes` will be freed by running requests in time, and are not reserved.
        """
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
            # After a long gap one empty window is observed instead of all.
            missed = max(1, between(self._window_end, now) // self.window)
            self._window_end = after(self._window_end, Duration(self.window * missed))
