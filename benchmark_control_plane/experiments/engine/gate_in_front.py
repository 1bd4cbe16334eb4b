"""Applies the gate's admission rule to the arrivals of a replay; a rejected request never enters the engine.

The rule is the one of `serve` (`Admission.try_forward` with the estimate of the engine's order and cutoff).
It sees the scheduler's own state, so the replay measures the rule and not the delay of the shared state. The
unit of memory is one token of KV cache.
"""

from dataclasses import replace
from typing import Any

from controlplane.core.clock import Duration, Instant, milliseconds
from controlplane.core.decision import Reject
from controlplane.core.pool_view import Waiting
from controlplane.policy.engine.gate_view_adapter import footprint_of, share_of
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.gate.admission import Admission, AdmissionOptions, fits_ahead, wait_bound
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.registry import engine_precedence

_MAX_WAIT_MS = 60_000


class GateInFront:
    """The gate's decision on each request before it enters the scheduler."""

    def __init__(self, scheduler: Any) -> None:
        options: EngineOptions = scheduler.options
        limits = AdmissionOptions(0, milliseconds(_MAX_WAIT_MS), milliseconds(0), tpot_guard=False)
        self._scheduler = scheduler
        self._admission = Admission(limits, fits_ahead)
        self._precedence = engine_precedence(options)
        self._cutoff = self._precedence.cutoff
        self._entries: dict[str, Waiting] = {}

    def rejects(self, state: RequestState, now: Instant) -> bool:
        """Whether the gate rejects the request; it counts as arrived either way."""
        view = self._scheduler.view(now)
        # Behind the gate nothing is rejected, so the engine's copy of a class is not sheddable.
        service_class = replace(state.request.service_class, sheddable=True)
        share, request = share_of(view), replace(state.request, service_class=service_class)
        footprint = footprint_of(state, view.block_tokens)
        until = wait_bound(request, footprint, view.pace, self._admission.options)
        entry = Waiting(request, footprint, until, (0, request.arrival, request.id), footprint.area)
        if self._cutoff is not None:
            self._cutoff.arrived(entry)
        weights = view.running.weight.tolist()
        share = replace(
            share,
            engine_work_ahead=lambda waiting: self._work_ahead(waiting, view.pace.step),
            engine_keeps=lambda waiting: self._precedence.kept(share.leases, weights, waiting),
        )
        verdict = self._admission.try_forward(share, LookAhead(share.leases), entry, now)
        if isinstance(verdict, Reject):
            return True
        self._entries[request.id] = entry
        return False

    def stepped(self, now: Instant) -> None:
        """Updates the estimate of the cutoff after a step."""
        if self._cutoff is not None:
            self._cutoff.stepped(now, *self._memory(), self._scheduler._pace.step)

    def _memory(self) -> tuple[int, int]:
        scheduler = self._scheduler
        return scheduler.quota * scheduler.block_size, scheduler.balloon.used * scheduler.block_size

    def _work_ahead(self, entry: Waiting, step: Duration) -> float:
        waiting = [self._entries[request.request_id] for request in self._scheduler.waiting]
        ahead = sum(other.work for other in self._precedence.before(entry, waiting))
        if self._cutoff is not None:
            ahead += self._cutoff.work_ahead(entry, waiting, *self._memory(), step)
        return ahead
