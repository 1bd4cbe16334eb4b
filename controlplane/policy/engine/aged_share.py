"""When may the next of those that have lost their promise start? When its share of the memory is not spent.

A share of the quota is earned every step, and what aged requests hold is paid from it. Whenever the
account is not in debt the oldest may start; it then runs to its end. So with aged requests waiting all the
time they get that share of all block-steps, less one stay, and no more than it, plus one stay. Who comes to
be aged waits at most for the block-steps of those that arrived before it, divided by the share.
"""

from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import Progress


class AgedShare:
    """`running` are the aged ones that run; the caller adds to it."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._balance = 0.0
        self.running: set[Progress] = set()

    def account(self, view: EngineView) -> None:
        """Call once a step. Nothing is saved up while nobody is served."""
        if self.running:
            self.running = set(view.running.at(view.running.places(self.running)))
        held = sum(one.held for one in self.running)
        self._balance = min(0.0, self._balance + self._share * view.quota - held)

    @property
    def has_credit(self) -> bool:
        return self._share > 0 and self._balance >= 0
