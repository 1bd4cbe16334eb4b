"""When will a request that starts now see its first token, and how good were such forecasts?

Rule: what is said when a request is sent to the engine is judged when its first token appears. Only an
undisturbed first start teaches: one that was preempted before its first token says nothing of the work.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from prometheus_client import Gauge

from controlplane.core.clock import Duration, Instant, between, to_milliseconds
from controlplane.core.memory import LeaseTable, MemoryLedger
from controlplane.core.ports import Generator
from controlplane.core.request import Kind, Owner, Phase
from controlplane.metrics import Metrics
from controlplane.policy.ordering import work_before_deadline
from controlplane.service.ticket import Starting, Ticket
from predictors.calibration import LEVEL, Calibration
from predictors.first_token import Ahead, FirstTokenTime
from predictors.step_time import ObservedPace, ReportedPace


class FirstTokens:
    """`calibration` is in milliseconds, from arrival, by class."""

    def __init__(
        self,
        generators: Mapping[str, Generator],
        paces: Mapping[Owner, ObservedPace | ReportedPace],
        ledger: MemoryLedger,
        tickets: Mapping[str, Ticket],
    ) -> None:
        self._ledger = ledger
        self._tickets = tickets
        self._generators = generators
        self._paces = paces
        self._time = FirstTokenTime()
        self.calibration = Calibration()

    def started(self, ticket: Ticket, wait: Duration, now: Instant) -> None:
        """The ticket, which has its lease, goes to the engine, which makes it wait so long if it orders."""
        request = ticket.request
        pace = self._paces[request.kind.owner].pace
        if pace is None:
            return
        if request.kind is Kind.EMBED:
            work = work_before_deadline(request, ticket.footprint, pace)
            ticket.predicted_ttft = Duration(between(request.arrival, now) + work)
            return
        generator = self._generators[request.model]
        if generator.orders:
            ahead = Ahead(request.prompt_tokens, turn=wait)
        else:
            ahead = _ahead(
                ticket, self._ledger.table(Owner.LLM), self._tickets.values(), generator.max_running
            )
        said = self._time.predict(ahead, pace)
        ticket.starting = Starting(now, ahead, pace, said)
        waited = between(request.arrival, now)
        ticket.predicted_ttft = Duration(waited + said.median)
        stated = (to_milliseconds(ticket.predicted_ttft), to_milliseconds(Duration(waited + said.upper)))
        self.calibration.stated(request.id, (0.5, LEVEL), stated)

    def appeared(self, ticket: Ticket, now: Instant) -> None:
        """Its first token."""
        starting, request = ticket.starting, ticket.request
        if starting is None:
            return
        ticket.starting = None
        took = between(starting.at, now)
        self._time.observe(starting.ahead, starting.pace, starting.said, took)
        since_arrival = to_milliseconds(between(request.arrival, now))
        self.calibration.happened(request.id, request.service_class.name, round(since_arrival))

    def gauges(self, metrics: Metrics) -> Mapping[Gauge, Mapping[str, float]]:
        errors = self.calibration.mean_absolute_error()
        return {
            metrics.ttft_coverage: self.calibration.coverage(),
            metrics.ttft_error: {name: error / 1_000 for name, error in errors.items()},
        }


def _ahead(ticket: Ticket, leases: LeaseTable, others: Iterable[Ticket], slots: int) -> Ahead:
    """Those that have no first token yet are read before it; those that go by rank first start first."""
    unread, decoding, earlier = ticket.request.prompt_tokens, 0, 0
    for other in others:
        if other is ticket or other.lease is None or other.footprint.per_step == 0:
            continue
        if other.phase is Phase.DECODE:
            decoding += 1
        elif other.phase is Phase.PREFILL and other.rank <= ticket.rank:
            earlier += 1
            unread += other.request.prompt_tokens
    place = decoding + earlier - slots
    if place < 0 or not len(leases):
        return Ahead(unread)
    steps = np.partition(leases.steps, min(place, len(leases) - 1))
    return Ahead(unread, float(steps[min(place, len(leases) - 1)]))
