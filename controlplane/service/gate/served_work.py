"""Counts what the gate has served: SLO attainment in the last minute by class, and tokens by tenant."""

from collections import deque
from collections.abc import Mapping

from controlplane.core.clock import Duration, Instant, between, seconds
from controlplane.core.decision import Outcome
from controlplane.core.request import Request

_WINDOW = seconds(60)
_SLOT = seconds(1)
# The client, not the box, ended these.
_UNCOUNTED = frozenset({Outcome.ABORTED})


class ServedWork:
    """Counts of one box. A rejected, evicted or failed request is a miss; an aborted one is not counted."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        """Prompt and output tokens of each tenant since the start."""
        self._slots: deque[tuple[Instant, dict[str, list[int]]]] = deque()

    def ended(self, request: Request, outcome: Outcome, output_tokens: int, now: Instant) -> None:
        """Counts a request that ended with `output_tokens` for each of its sequences."""
        is_served = outcome in (Outcome.MET, Outcome.LATE)
        done = output_tokens * request.choices + (request.prefill_tokens if is_served or output_tokens else 0)
        if done:
            self.tokens[request.tenant] = self.tokens.get(request.tenant, 0) + done
        if outcome in _UNCOUNTED:
            return
        if not self._slots or between(self._slots[-1][0], now) >= _SLOT:
            self._slots.append((now, {}))
            self._forget(now)
        counts = self._slots[-1][1].setdefault(request.service_class.name, [0, 0])
        counts[0] += outcome is Outcome.MET
        counts[1] += 1

    def attainment(self, now: Instant) -> Mapping[str, float]:
        """Share of requests that met their SLO among those that ended in the last minute, by class."""
        self._forget(now)
        met: dict[str, int] = {}
        total: dict[str, int] = {}
        for _, counts in self._slots:
            for name, (good, count) in counts.items():
                met[name] = met.get(name, 0) + good
                total[name] = total.get(name, 0) + count
        return {name: met[name] / count for name, count in total.items()}

    def _forget(self, now: Instant) -> None:
        while self._slots and between(self._slots[0][0], now) > Duration(_WINDOW + _SLOT):
            self._slots.popleft()
