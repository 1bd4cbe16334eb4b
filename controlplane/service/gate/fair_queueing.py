"""Whose turn is it among tenants? The work that each has brought moves its next request back in the queue.

Rule (generalized processor sharing, Parekh and Gallager 1993): all tenants with work are served at once, each
by its weight's part of the engine. A tenant's clock says where in that service its work would end; it never
falls behind the present. A request goes back to when the work before it would be done if those with work now
kept it up. So they come to their parts however much a unit of work is thought to take, and one that comes new
passes what others have piled up. Never by more than the gate lets anyone wait, which bounds what a wrong
estimate can do. What never ran is given back. Nothing moves where no weight is stated, or while everybody's
work is done as it comes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, scaled
from controlplane.core.request import Owner
from controlplane.service.ticket import Ticket


@dataclass(slots=True)
class FairQueue:
    """One engine's. A tenant without a stated weight has 1."""

    weights: Mapping[str, float]
    _ends: dict[str, float] = field(init=False)
    _present: float = field(init=False, default=0.0)
    _since: Instant | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._ends = dict.fromkeys(self.weights, 0.0)

    def shift(self, tenant: str, work: Duration, now: Instant) -> Duration:
        """For a request that the whole engine would be busy with for so long."""
        if len(self.weights) < 2:
            return Duration(0)
        self._advance(now)
        start = max(self._present, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + work / self._weight(tenant)
        return scaled(Duration(1), (start - self._present) * self._served())

    def refund(self, tenant: str, work: Duration) -> None:
        """It was not done."""
        if tenant in self._ends:
            self._ends[tenant] -= work / self._weight(tenant)

    def _advance(self, now: Instant) -> None:
        """The present goes on as fast as those with work left are served together; without any it rests."""
        left = 0.0 if self._since is None else float(now - self._since)
        self._since = now
        for end in sorted(end for end in self._ends.values() if end > self._present):
            until_end = (end - self._present) * self._served()
            if until_end >= left:
                self._present += left / self._served()
                return
            self._present, left = end, left - until_end

    def _served(self) -> float:
        """The weights of all that have work left."""
        return sum(self._weight(name) for name, end in self._ends.items() if end > self._present)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


@dataclass(eq=False, slots=True)
class TenantQueues:
    """Turns for each owner, taken by tickets."""

    weights: Mapping[str, float]
    _queues: dict[Owner, FairQueue] = field(init=False)

    def __post_init__(self) -> None:
        self._queues = {owner: FairQueue(self.weights) for owner in Owner}

    def assign_delay(self, ticket: Ticket, work: Duration | None, longest: Duration, now: Instant) -> None:
        """`work` is None before anything was observed: it counts nothing then."""
        ticket.service_time = work or Duration(0)
        request = ticket.request
        ticket.tenant_delay = min(
            longest, self._queues[request.kind.owner].shift(request.tenant, ticket.service_time, now)
        )

    def refund(self, ticket: Ticket) -> None:
        """It never ran."""
        self._queues[ticket.request.kind.owner].refund(ticket.request.tenant, ticket.service_time)
