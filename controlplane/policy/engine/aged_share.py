"""Share of the memory for requests whose SLO has been missed for long."""

from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState


class AgedShare:
    """Share of the memory for requests whose SLO has been missed for longer than their patience.

    Each step earns `share` of the quota, and pays the blocks that aged requests hold. While the balance is
    not negative the oldest may start, and then runs to its end. With aged requests always waiting, they get
    this share of all block-steps, to within the residence of one request. A request that becomes aged waits
    at most for the block-steps of the aged requests before it, divided by the share.

    `running` holds the running aged requests; the caller adds to it.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._balance = 0.0
        self.running: set[RequestState] = set()

    def account(self, view: EngineView) -> None:
        """Updates the balance; call once per step. Unused credit does not accumulate."""
        if self.running:
            self.running = set(view.running.at(view.running.places(self.running)))
        held = sum(state.held for state in self.running)
        self._balance = min(0.0, self._balance + self._share * view.quota - held)

    @property
    def has_credit(self) -> bool:
        """Whether an aged request may start."""
        return self._share > 0 and self._balance >= 0
