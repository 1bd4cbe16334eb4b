"""What happened to one request at the gate and in the engine: decisions and preemptions, in order.

A record holds references to the immutable state that the decision was taken on; `service/gate/explanation.py`
computes the numbers from them when an operator asks, so that a decision costs microseconds more.
"""

from dataclasses import dataclass
from typing import Literal

from controlplane.core.clock import Duration, Instant
from controlplane.core.decision import AdmissionDecision
from controlplane.core.pool_view import PoolView, Share, Waiting


@dataclass(frozen=True, slots=True)
class Basis:
    """The queue entry, the share as the cycle found it, and the policy behind a decision.

    `step` and `step_with` are the predicted times of a decode step without and with the request, and `tpot`
    the tightest objective of the requests that run with it; None without reported steps, and for embeddings.
    """

    entry: Waiting
    share: Share
    step: Duration | None = None
    step_with: Duration | None = None
    tpot: Duration | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision under the configuration of this `version`.

    `basis` is None for a request that was rejected without a cycle, for example by a rate limit.
    """

    at: Instant
    decision: AdmissionDecision
    basis: Basis | None = None
    version: int = 1


@dataclass(frozen=True, slots=True)
class Preempted:
    """A preemption. `beneficiary` is the id of the request that was to start in its place.

    It is None where the engine preempted because running requests needed the blocks, and where the gate
    reclaimed memory for all waiting embeddings. One by the engine is recorded when its state is read, at the
    latest before the request ends. It costs `recompute_tokens`, which the engine must compute again in
    about `recompute`. `freed_bytes` is what the lease held; None where the engine preempted.
    """

    at: Instant
    by: Literal["gate", "engine"]
    beneficiary: str | None = None
    recompute_tokens: int = 0
    recompute: Duration | None = None
    freed_bytes: int | None = None
    beneficiary_class: str | None = None


def basis_of(entry: Waiting, view: PoolView) -> Basis:
    """The basis of a decision on `entry` by a cycle on `view`.

    The step times are computed at once, since their model goes on learning.
    """
    share = view.shares[entry.request.kind.owner]
    load, request = share.decode_load, entry.request
    if load is None:
        return Basis(entry, share)
    load = load.to_classes_from(request.service_class.priority)
    step, step_with = round(load.present_step), round(load.step_with(request))
    objectives = [tpot for tpot in (load.tightest, request.slo.tpot) if tpot is not None]
    tpot = Duration(round(min(objectives))) if objectives else None
    return Basis(entry, share, Duration(step), Duration(step_with), tpot)
