"""Weighted fair queueing of tenants (generalized processor sharing, Parekh and Gallager 1993).

In the fluid model all tenants with work are served at once, each at its weight's share of the engine. A
tenant's virtual finish time is where in that service its work ends; it is never earlier than the present. A
request is moved back in the waiting queue to the time at which its tenant's earlier work would be finished if
the tenants that have a backlog now did not empty it. Shares are right even if the unit of work is estimated
wrongly, and a tenant without backlog overtakes the backlog of the others. The delay is at most the gate's
longest wait, which bounds the effect of a wrong estimate. The work of a request that never ran is refunded.
Nothing is delayed if no weight is configured, or while no tenant has a backlog.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, scaled
from controlplane.core.request import Owner
from controlplane.service.ticket import Ticket


@dataclass(slots=True)
class FairQueue:
    """The virtual finish times of all tenants at one owner; a tenant without a weight has weight 1."""

    weights: Mapping[str, float]
    _finish_times: dict[str, float] = field(init=False)
    _virtual_time: float = field(init=False, default=0.0)
    _since: Instant | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._finish_times = dict.fromkeys(self.weights, 0.0)

    def shift(self, tenant: str, work: Duration, now: Instant) -> Duration:
        """Adds a request to its tenant's backlog and returns how far it is moved back.

        `work` is the time for which the request would occupy the whole engine.
        """
        if len(self.weights) < 2:
            return Duration(0)
        self._advance(now)
        start = max(self._virtual_time, self._finish_times.get(tenant, 0.0))
        self._finish_times[tenant] = start + work / self._weight(tenant)
        return scaled(Duration(1), (start - self._virtual_time) * self._active_weight())

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replaces the weights; the backlog of tenants that remain stays as it is."""
        self.weights = weights
        self._finish_times = {name: self._finish_times.get(name, 0.0) for name in weights}

    def refund(self, tenant: str, work: Duration) -> None:
        """Takes work that was not done out of the tenant's backlog."""
        if tenant in self._finish_times:
            self._finish_times[tenant] -= work / self._weight(tenant)

    def _advance(self, now: Instant) -> None:
        """Moves virtual time to `now`, as fast as the tenants with a backlog are served together.

        It stands while no tenant has a backlog.
        """
        left = 0.0 if self._since is None else float(now - self._since)
        self._since = now
        for end in sorted(end for end in self._finish_times.values() if end > self._virtual_time):
            until_finish = (end - self._virtual_time) * self._active_weight()
            if until_finish >= left:
                self._virtual_time += left / self._active_weight()
                return
            self._virtual_time, left = end, left - until_finish

    def _active_weight(self) -> float:
        """The sum of the weights of the tenants that have a backlog."""
        return sum(self._weight(name) for name, end in self._finish_times.items() if end > self._virtual_time)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


@dataclass(eq=False, slots=True)
class TenantQueues:
    """One fair queue for each owner; delays tickets behind their tenant's earlier work."""

    weights: Mapping[str, float]
    _queues: dict[Owner, FairQueue] = field(init=False)

    def __post_init__(self) -> None:
        self._queues = {owner: FairQueue(self.weights) for owner in Owner}

    def assign_delay(
        self, ticket: Ticket, service_time: Duration | None, longest: Duration, now: Instant
    ) -> None:
        """Sets `tenant_delay`, at most `longest`. An unknown service time (None) counts as zero."""
        ticket.service_time = service_time or Duration(0)
        request = ticket.request
        delay = self._queues[request.kind.owner].shift(request.tenant, ticket.service_time, now)
        ticket.tenant_delay = min(longest, delay)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replaces the weights for the requests that arrive from now on."""
        for queue in self._queues.values():
            queue.set_weights(weights)

    def refund(self, ticket: Ticket) -> None:
        """Returns the work of a request that was never dispatched."""
        self._queues[ticket.request.kind.owner].refund(ticket.request.tenant, ticket.service_time)
