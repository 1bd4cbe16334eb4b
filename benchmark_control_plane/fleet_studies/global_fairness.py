"""Two tenants of equal weight on a fleet that is too small for both: what each is served, of the whole fleet.

Every box has its fair queue, as it is served. With an exchange, the routing library's `TenantCounters` adds
the tokens that all boxes served, and every box moves a tenant back in addition by the time in which the fleet
would serve what the tenant leads, as it was at the last exchange. Boxes do not have that rule.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from benchmark_control_plane.fleet_studies.client_sections import FairnessStudy
from benchmark_control_plane.fleet_studies.joined_workloads import joined
from benchmark_control_plane.simulator.cluster.oracle import FleetClients, simulate_exactly
from benchmark_control_plane.simulator.cluster.scenario import FleetOutcome, FleetWorkload, RoutingPolicy
from controlplane.core.clock import Duration, Instant, seconds
from controlplane.fleet.tenant_counters import TenantCounters
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.service import Service
from controlplane.service.ticket import Ticket

TENANTS = ("wide", "narrow")
SECTIONS = {
    "scheduling": {"ordering": "fcfs", "priority_head_start_ms": 0},
    "tenants": {
        name: {"api_keys_sha256": [sha256(name.encode()).hexdigest()], "weight": 1.0} for name in TENANTS
    },
}


class FleetQueues(TenantQueues):
    """The fair queues of a box, which move a tenant back by its lead in the fleet, too."""

    def __init__(self, own: TenantQueues, exchange: "CounterExchange") -> None:
        super().__init__(own.weights)
        self._queues = own._queues
        self._exchange = exchange

    def assign_delay(
        self, ticket: Ticket, service_time: Duration | None, longest: Duration, now: Instant
    ) -> None:
        """Sets `tenant_delay`, at most `longest`."""
        super().assign_delay(ticket, service_time, longest, now)
        lead = seconds(self._exchange.lead_seconds(ticket.request.tenant))
        ticket.tenant_delay = min(longest, Duration(ticket.tenant_delay + lead))


class CounterExchange:
    """Adds up the tenants' tokens of all boxes every `period` seconds."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._counters = TenantCounters()
        self._served = self._elapsed = 0.0

    async def run(self, services: Sequence[Service]) -> None:
        """Exchanges until it is cancelled."""
        for service in services:
            dispatcher = service.gate.dispatcher
            dispatcher._tenants = FleetQueues(dispatcher._tenants, self)
        while True:
            await asyncio.sleep(self._period)
            self._elapsed += self._period
            for box, service in enumerate(services):
                served = service.gate.dispatcher.accounting.served_tokens
                self._served += sum(self._counters.heard(str(box), "one start", served).values())
            self._counters.set_active(
                ticket.request.tenant for service in services for ticket in service.gate.tickets()
            )

    def lead_seconds(self, tenant: str) -> float:
        """Seconds in which the fleet serves what the tenant leads; 0 before anything was served."""
        return self._counters.lead(tenant) * self._elapsed / self._served if self._served else 0.0


def global_fairness(study: FairnessStudy) -> dict[str, Any]:
    """A row for each policy and age of the counters; means over the seeds."""
    return {
        "study": study.name.removeprefix("fleet-"),
        "boxes": [study.fleet.boxes],
        "rate_per_box": 2 * study.rate_per_box,
        "seconds": study.seconds,
        "warm_up": study.warm_up,
        "seeds": list(study.seeds),
        "rows": [_row(study, policy, period) for policy, period in product(study.policies, study.exchange_s)],
    }


def _row(study: FairnessStudy, policy: RoutingPolicy, period: float | None) -> dict[str, Any]:
    found = [_figures(study, policy, period, seed) for seed in study.seeds]
    means = {name: round(fmean(each[name] for each in found), 2) for name in found[0]}
    shares = [each["narrow_percent"] for each in found]
    spread = round(max(shares) - min(shares), 2)
    return {"policy": policy.name, "exchange_s": period, **means, "narrow_spread": spread}


def _figures(
    study: FairnessStudy, policy: RoutingPolicy, period: float | None, seed: int
) -> dict[str, float]:
    rate, prefix = study.rate_per_box * study.fleet.boxes, study.prefix_tokens
    wide = FleetWorkload.drawn(rate, study.seconds, (seed, 0))
    narrow = FleetWorkload.drawn(rate, study.seconds, (seed, 1), groups=study.prefixes, shared_tokens=prefix)
    workload, part = joined(wide, narrow)
    clients = FleetClients(tenant_of=lambda number: TENANTS[part[number]])
    beside = None if period is None else CounterExchange(period).run
    scenario = replace(study.fleet.scenario(), policy=policy, seed=seed)
    result = simulate_exactly(scenario, workload, SECTIONS, clients, beside)
    is_counted = workload.at >= study.warm_up
    is_served = is_counted & np.isin(result.outcome, (FleetOutcome.MET, FleetOutcome.LATE))
    tokens = (workload.prompt_tokens - result.cached + workload.output_tokens) * is_served
    return {
        "narrow_percent": 100 * float(tokens[part == 1].sum()) / float(tokens.sum()),
        "met_percent": 100 * float(np.mean(result.outcome[is_counted] == FleetOutcome.MET)),
        "tokens_per_s": float(tokens.sum()) / (study.seconds - study.warm_up),
    }
