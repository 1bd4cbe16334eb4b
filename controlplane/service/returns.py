"""When may each of those turned away come back, so that they do not all come at once?

Rule: nobody is told a time before the predicted drain, nor one at which somebody told earlier would still
be served: each takes as long as its part of the whole share does. Without this a burst turned away would
come back as the same burst.
"""

from collections.abc import Mapping
from dataclasses import replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds
from controlplane.core.decision import Reject
from controlplane.core.memory import MemoryLedger
from controlplane.core.request import Owner
from controlplane.service.ticket import Ticket
from controlplane.service.turns import alone
from predictors.step_time import ObservedPace, ReportedPace

# Those who come back find newcomers, and a drain that took longer than was thought.
_MARGIN = 3.0
_LATEST = seconds(2)


class Returns:
    def __init__(self, ledger: MemoryLedger, paces: Mapping[Owner, ObservedPace | ReportedPace]) -> None:
        self._ledger = ledger
        self._paces = paces
        self._taken_until: dict[Owner, Instant] = {}

    def spaced(self, reject: Reject, ticket: Ticket, now: Instant) -> Reject:
        request, footprint = ticket.request, ticket.footprint
        owner = request.kind.owner
        pace, ceiling = self._paces[owner].pace, self._ledger.ceiling(owner)
        if reject.retry_after is None or pace is None:
            return reject
        late = min(_LATEST, scaled(reject.retry_after, _MARGIN - 1))
        at = after(now, Duration(reject.retry_after + late))
        at = max(at, self._taken_until.get(owner, at))
        self._taken_until[owner] = after(at, scaled(alone(request, footprint, pace, ceiling), _MARGIN))
        return replace(reject, retry_after=between(now, at))
