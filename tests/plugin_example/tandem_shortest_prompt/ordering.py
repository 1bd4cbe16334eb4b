"""Orders waiting requests by prompt length, with a bound on the wait."""

from dataclasses import dataclass

from controlplane.core.clock import milliseconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace
from controlplane.core.request import Request
from controlplane.policy.gate.ordering import OrderingOptions, Rank


@dataclass(frozen=True)
class ShortestPrompt:
    """Keys: arrival plus a delay per prompt token, arrival, id.

    A short prompt overtakes a longer one that arrived at most `ms_per_token` earlier per token of difference.
    Requests that arrive later than that do not overtake it: the delay bounds the wait.
    """

    options: OrderingOptions

    def __post_init__(self) -> None:
        if self._ms_per_token() <= 0:
            raise ValueError(f"options.ms_per_token={self._ms_per_token()}: a number above 0 is needed")

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        delay = milliseconds(self._ms_per_token() * request.prompt_tokens)
        return (request.arrival + delay, request.arrival, request.id)

    def _ms_per_token(self) -> float:
        return float(str(self.options.extra.get("ms_per_token", 1.0)))
