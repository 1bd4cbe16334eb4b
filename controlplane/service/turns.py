"""Whose turn is it among tenants? The work that each has brought moves its next request back in the queue.

Rule (after start-time fair queueing, Goyal, Vin and Cheng 1996): a tenant's clock is where its work would end
if it had its weight's part of the engine; it never falls behind the present. A request goes back by as far as
its tenant's clock is ahead of the one furthest behind, in seconds of that one's work, so that both come to
their parts while both have work; never by more than `most`, which bounds the wait. What never ran is
given back. Nothing moves where no weight is stated, or while everybody's work is done as it comes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, scaled, seconds
from controlplane.core.memory import Footprint
from controlplane.core.request import Kind, Owner, Request
from controlplane.core.view import Pace
from controlplane.service.ticket import Ticket

_LONGEST = seconds(10)


@dataclass(slots=True)
class Turns:
    """One engine's. A tenant without a stated weight has 1."""

    weights: Mapping[str, float]
    most: Duration
    _ends: dict[str, float] = field(init=False)
    _present: float = field(init=False, default=0.0)
    _since: Instant | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._ends = dict.fromkeys(self.weights, 0.0)

    def shift(self, tenant: str, work: Duration, now: Instant) -> Duration:
        """For a request that the whole engine would be busy with for so long."""
        if not self.weights:
            return Duration(0)
        self._advance(now)
        start = max(self._present, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + work / self._weight(tenant)
        others = [(max(self._present, end), name) for name, end in self._ends.items() if name != tenant]
        behind, name = min(others, default=(start, tenant))
        return min(self.most, scaled(Duration(1), max(0.0, start - behind) * self._weight(name)))

    def give_back(self, tenant: str, work: Duration) -> None:
        """It was not done."""
        if tenant in self._ends:
            self._ends[tenant] -= work / self._weight(tenant)

    def _advance(self, now: Instant) -> None:
        """The present goes on as fast as those with work left are served together."""
        if self._since is not None:
            busy = sum(self._weight(name) for name, end in self._ends.items() if end > self._present)
            self._present += (now - self._since) / max(busy, min(map(self._weight, self._ends)))
        self._since = now

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


@dataclass(eq=False, slots=True)
class Tenants:
    """Turns for each owner, taken by tickets."""

    weights: Mapping[str, float]
    _turns: dict[Owner, Turns] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = {owner: Turns(self.weights, _LONGEST) for owner in Owner}

    def take_turn(self, ticket: Ticket, pace: Pace | None, quota_bytes: int, now: Instant) -> None:
        """Before anything was observed work counts nothing."""
        request = ticket.request
        if pace is not None:
            ticket.work = alone(request, ticket.footprint, pace, quota_bytes)
        ticket.turn = self._turns[request.kind.owner].shift(request.tenant, ticket.work, now)

    def give_back(self, ticket: Ticket) -> None:
        """It never ran."""
        self._turns[ticket.request.kind.owner].give_back(ticket.request.tenant, ticket.work)


def alone(request: Request, footprint: Footprint, pace: Pace, quota_bytes: int) -> Duration:
    """How long its owner would be busy with it: by tokens where they are worked off one after another, else
    by its part of the memory over its steps."""
    if request.kind is Kind.EMBED:
        return scaled(pace.per_prompt_token, request.prompt_tokens)
    return scaled(pace.step, footprint.area / max(1, quota_bytes))
