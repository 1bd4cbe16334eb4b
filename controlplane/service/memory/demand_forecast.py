"""Demand for memory: the urgency of each owner's requests, and the forecast of embeddings to come.

Urgency follows from the deadline slack of every waiting or running request. `core.deadlines` gives that of a
generation; before the first token it is what the prefill leaves. Embeddings are computed one after another,
earliest deadline first, so each one waits for the work before it. A request with half of its objective left
is not urgent, however short the objective. A request rejected for lack of memory has no slack; it counts for
some seconds after its rejection.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

from controlplane.core.clock import Duration, Instant, between, scaled, to_seconds
from controlplane.core.deadlines import token_deadlines
from controlplane.core.pool_view import Pace
from controlplane.core.request import Kind, Owner, Request
from controlplane.policy.sharing.quota import UrgencyOptions, urgency_of_all
from controlplane.service.ticket import Ticket
from predictors.load.embedding_load import EmbeddingLoad

_DECAY_SECONDS = 3.0


def slacks(
    tickets: Iterable[Ticket],
    paces: Mapping[Owner, Pace | None],
    remaining: Mapping[str, int],
    now: Instant,
    critical: Duration,
) -> dict[Owner, list[Duration]]:
    """The slack of each owner's requests that have a deadline.

    If half of a request's objective is shorter than `critical`, its slack is scaled up accordingly.

    Args:
        tickets: requests that wait or run.
        paces: observed times of a step and of a prompt token.
        remaining: predicted steps to come of the generations that hold a lease, by request id.
        now: present time.
        critical: slack below which a request is urgent.
    """
    embeddings: list[tuple[Instant, Ticket]] = []
    found: dict[Owner, list[Duration]] = {owner: [] for owner in Owner}
    for ticket in tickets:
        request = ticket.request
        if request.kind is Kind.GENERATE:
            found[Owner.LLM] += _generation_slack(
                ticket, remaining.get(request.id), paces[Owner.LLM], now, critical
            )
        elif (deadline := request.first_deadline) is not None:
            embeddings.append((deadline, ticket))
    pace = paces[Owner.EMBEDDING]
    ahead = 0
    for deadline, ticket in sorted(embeddings, key=lambda e: (e[0], e[1].request.id)):
        ahead += ticket.request.prompt_tokens
        work = Duration(0) if pace is None else Duration(pace.step + scaled(pace.per_prompt_token, ahead))
        objective = between(ticket.request.arrival, deadline)
        found[Owner.EMBEDDING].append(
            _scaled_slack(Duration(between(now, deadline) - work), objective, critical)
        )
    return found


def _generation_slack(
    ticket: Ticket, remaining: int | None, pace: Pace | None, now: Instant, critical: Duration
) -> list[Duration]:
    """The least scaled slack of a generation; empty without an objective.

    Without a lease (`remaining` is None) all steps of its footprint are to come; after a preemption these are
    what was left then.
    """
    request, seen = ticket.request, ticket.timeline.progress
    step = work = Duration(0)
    if pace is not None:
        step = pace.step
        is_begun = seen.first_token is not None
        work = Duration(0 if is_begun else step + scaled(pace.per_prompt_token, request.prefill_tokens))
    steps = max(1, ticket.footprint.steps if remaining is None else remaining)
    found = token_deadlines(request.slo, seen, steps, step)
    slacks = [_scaled_slack(Duration(deadline - now - work), limit, critical) for limit, deadline in found]
    return [min(slacks)] if slacks else []


def _scaled_slack(slack: Duration, objective: Duration, critical: Duration) -> Duration:
    if slack <= 0 or objective >= 2 * critical:
        return slack
    return scaled(slack, 2 * critical / objective)


def _zeros() -> dict[Owner, float]:
    return dict.fromkeys(Owner, 0.0)


@dataclass(slots=True)
class RecentArrivals:
    """Requests that arrived and those rejected for lack of memory, as exponentially decaying counts."""

    arrived: dict[Owner, float] = field(default_factory=_zeros)
    rejected: dict[Owner, float] = field(default_factory=_zeros)
    since: Instant | None = None

    def fade(self, now: Instant) -> None:
        """Decays the counts up to `now`."""
        if self.since is not None:
            decay = exp(-to_seconds(between(self.since, now)) / _DECAY_SECONDS)
            for counts in (self.arrived, self.rejected):
                for owner in counts:
                    counts[owner] *= decay
        self.since = now


def urgencies(
    tickets: Iterable[Ticket],
    paces: Mapping[Owner, Pace | None],
    remaining: Mapping[str, int],
    recent: RecentArrivals,
    now: Instant,
    options: UrgencyOptions,
) -> dict[Owner, float]:
    """The urgency of each owner, from the slack of its requests (`slacks`) and its recent rejections."""
    return {
        owner: urgency_of_all(each, options, rejected=recent.rejected[owner], arrived=recent.arrived[owner])
        for owner, each in slacks(tickets, paces, remaining, now, options.critical).items()
    }


@dataclass(slots=True)
class EmbeddingDemand:
    """Forecasts the embedding tokens of the next window.

    Attributes:
        window: length of a forecast window.
        level: quantile of the forecasts; None turns them off.
    """

    window: Duration
    level: float | None
    load: EmbeddingLoad = field(init=False)

    def __post_init__(self) -> None:
        self.load = EmbeddingLoad(self.window)

    def observe_arrival(self, request: Request, now: Instant) -> None:
        """Adds an arriving embedding request to the series; ignores any other."""
        if request.kind is Kind.EMBED:
            self.load.arrived(now, request.prompt_tokens)

    def tokens(self, now: Instant) -> float:
        """Tokens that arrive in the next window, at the quantile `level`; 0 while nothing is known."""
        if self.level is None or (forecast := self.load.next_window(now)) is None:
            return 0.0
        return forecast.tokens_within(self.level)
