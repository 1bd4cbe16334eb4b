"""Finds the embedding calls that cost generations more SLOs than they meet themselves.

Where the device's time is short, a call of many inputs takes the time of several generations. Whether it is
worth that follows from the price of a second: the weighted SLOs that generations meet in it, once a second
more would be used. A call whose class weighs less than its own seconds cost is rejected when it arrives.

The price decides only whether a call is computed. A call that will be computed is not delayed by it, since a
delay saves no time; that is the business of `pass_size` (decision 0097).
"""

from math import exp

from controlplane.core.clock import Duration, Instant, between, seconds, to_seconds
from controlplane.core.pool_view import Share, Waiting

PRICE_CHANGES_WITHIN: Duration = seconds(3)
_MEMORY_SECONDS = to_seconds(PRICE_CHANGES_WITHIN)
# Seconds of generations that must be remembered before they have a price.
_LEAST_NEEDED_SECONDS = 0.1
# So many SLOs are missed by chance while time is left; from the second share on, a second more is used in
# full.
_CHANCE_SHARE, _WHOLE_PRICE_SHARE = 0.05, 0.5


class TimePrice:
    """Weighted SLOs that generations lose for each second of the device that others take.

    Exponential means over three seconds, of the generations that ended: the SLOs at stake over the seconds
    that they need are what a second is worth. A second more is used if SLOs are missed for lack of time: in
    full from half of them on, not at all up to 5 %, in proportion between.
    """

    def __init__(self) -> None:
        self._at_stake = self._missed = self._needed = 0.0
        self._at = Instant(0)

    def record(self, now: Instant, *, weight: float, needed: float, lacked_time: bool) -> None:
        """Counts a generation that has ended.

        Args:
            now: its end.
            weight: that of its class.
            needed: seconds that it takes of the device.
            lacked_time: whether it missed its SLO and more time of the device would have met it.
        """
        self._decay(now)
        self._at_stake += weight
        self._needed += needed
        if lacked_time:
            self._missed += weight

    def per_second(self, now: Instant) -> float:
        """The price now; 0 while at most 5 % of the SLOs are missed for lack of time."""
        self._decay(now)
        if self._needed < _LEAST_NEEDED_SECONDS or not self._at_stake:
            return 0.0
        beyond_chance = self._missed / self._at_stake - _CHANCE_SHARE
        used = min(1.0, max(0.0, beyond_chance / (_WHOLE_PRICE_SHARE - _CHANCE_SHARE)))
        return used * self._at_stake / self._needed

    def _decay(self, now: Instant) -> None:
        left = exp(-to_seconds(between(self._at, now)) / _MEMORY_SECONDS)
        self._at = now
        self._at_stake, self._missed, self._needed = (
            left * mean for mean in (self._at_stake, self._missed, self._needed)
        )


def too_dear(share: Share, waiting: Waiting) -> str | None:
    """Why a sheddable call of a serial owner costs more than it is worth; None if it does not."""
    request, weight = waiting.request, waiting.request.service_class.weight
    pace = share.pace_of(request.model)
    if pace is None or not share.is_device_shared or not request.service_class.sheddable:
        return None
    taken = to_seconds(pace.per_prompt_token) * waiting.work
    if request.first_deadline is None or weight >= share.time_price * taken:
        return None
    return (
        f"it takes {taken:.3g} s of the device, in which generations meet {share.time_price * taken:.3g} "
        f"weighted objectives, and its class weighs {weight:g}"
    )
