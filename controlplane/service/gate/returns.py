"""When may each of those turned away come back, so that they do not all come at once?

Rule: nobody is told a time before the predicted drain, nor one at which somebody told earlier would still
be served: each takes as long as its part of the whole share does. Without this a burst turned away would
come back as the same burst.
"""

from dataclasses import replace

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds
from controlplane.core.decision import Reject
from controlplane.core.request import Owner

# Those who come back find newcomers, and a drain that took longer than was thought.
_MARGIN = 3.0
_LATEST = seconds(2)


class Returns:
    def __init__(self) -> None:
        self._taken_until: dict[Owner, Instant] = {}

    def spaced(self, reject: Reject, owner: Owner, work: Duration | None, now: Instant) -> Reject:
        """For a request that the owner would be busy with for so long, if that is known."""
        if reject.retry_after is None or work is None:
            return reject
        late = min(_LATEST, scaled(reject.retry_after, _MARGIN - 1))
        at = after(now, Duration(reject.retry_after + late))
        at = max(at, self._taken_until.get(owner, at))
        self._taken_until[owner] = after(at, scaled(work, _MARGIN))
        return replace(reject, retry_after=between(now, at))
