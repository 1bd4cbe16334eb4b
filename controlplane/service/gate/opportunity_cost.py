"""Estimates what a second of the device's time is worth to generations that are not in the engine yet."""

from math import exp

from controlplane.core.clock import Instant, between, to_seconds
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind
from controlplane.service.ticket import Ticket

_MEMORY_SECONDS = 10.0
# So many miss their SLO by chance while time is left (decision 0082).
_CHANCE_SHARE = 0.005


class OpportunityCost:
    """Weighted SLOs that generations lose for each second in which the engine does not run.

    While 99.5 % of the generations meet their SLO, time is left and costs nothing. While all but few miss it,
    a second more would have met as many as other seconds do. In between the rate at which SLOs are met counts
    by the share of the missed ones beyond that half percent. Both are exponential means over ten seconds,
    weighted by class.
    """

    def __init__(self) -> None:
        self._met = self._missed = 0.0
        self._at = Instant(0)

    def request_ended(self, ticket: Ticket) -> None:
        """Counts a generation that has ended, unless its client left."""
        at = ticket.timeline.finished
        if at is None or ticket.request.kind is not Kind.GENERATE or ticket.outcome is Outcome.ABORTED:
            return
        self._decay(at)
        if ticket.outcome is Outcome.MET:
            self._met += ticket.request.service_class.weight
        else:
            self._missed += ticket.request.service_class.weight

    def per_second(self, now: Instant) -> float:
        """Weighted SLOs lost per second; 0 while at most 0.5 % are missed."""
        self._decay(now)
        ended = self._met + self._missed
        missed = max(0.0, self._missed / ended - _CHANCE_SHARE) if ended else 0.0
        return self._met / _MEMORY_SECONDS * missed

    def _decay(self, now: Instant) -> None:
        left = exp(-to_seconds(between(self._at, now)) / _MEMORY_SECONDS)
        self._met, self._missed, self._at = left * self._met, left * self._missed, now
