"""Computes the next quotas from the urgency of both owners, as a pure function: bounded steps, minimums.

Algorithm 2 of the collocation proposal, corrected: urgency is continuous and grows as slack shrinks (the
printed one drops when a request becomes late); a late request counts as one without slack, however late it
is; minimums win over the step limit; a dead-band keeps small changes of urgency from moving memory back and
forth. The embeddings get what the LLM does not, so the sum is constant. At equal urgency the quotas return
exactly to their configured position.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.core.clock import Duration, seconds, to_seconds
from controlplane.core.request import Owner

_ONE_SECOND = seconds(1)


@dataclass(frozen=True, slots=True)
class UrgencyOptions:
    """A request with less than `critical` slack counts, by `critical_weight` at zero slack and beyond."""

    critical: Duration = _ONE_SECOND
    critical_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class QuotaOptions:
    """Limits of quota moves, in bytes.

    `minimum` is never taken away. The LLM's quota is `nominal_llm_bytes` when nothing is urgent or both
    owners are equally urgent; `nominal_weight` is the urgency of one owner that moves it half way to its
    limit (0: all the way). At most the share `rate` of the pool moves per second. A target is kept while the
    next one is within `dead_band` of it. The LLM's quota is a multiple of `block_bytes`.
    """

    pool: int
    minimum: Mapping[Owner, int]
    nominal_llm_bytes: int
    nominal_weight: float
    rate: float
    dead_band: int
    block_bytes: int
    urgency: UrgencyOptions

    @property
    def lowest(self) -> int:
        """The LLM's smallest quota, in whole blocks."""
        return _blocks_up(self.minimum[Owner.LLM], self.block_bytes)

    @property
    def highest(self) -> int:
        """The LLM's largest quota, in whole blocks."""
        return _blocks_down(self.pool - self.minimum[Owner.EMBEDDING], self.block_bytes)


def urgency_of(slack: Duration, options: UrgencyOptions) -> float:
    """Urgency of one request: 0 from `critical` slack on, the whole weight once it is late."""
    return options.critical_weight * min(1.0, max(0.0, 1 - slack / options.critical))


def urgency_of_all(
    slacks: Iterable[Duration], options: UrgencyOptions, *, rejected: float = 0.0, arrived: float = 0.0
) -> float:
    """Mean urgency of one owner's waiting and running requests.

    `rejected` more requests count as having no slack left. `arrived` is the number of all recent arrivals,
    the rejected ones included.
    """
    each = [urgency_of(slack, options) for slack in slacks]
    # Requests that were served on time appear only in the count of arrivals. What is left of one rejection in
    # the past is less than one request.
    count = max(len(each) + rejected, arrived, 1.0)
    return (sum(each) + rejected * options.critical_weight) / count


def target_nominal(urgency: Mapping[Owner, float], options: QuotaOptions) -> int:
    """The LLM's target quota in bytes, in whole blocks."""
    llm, embedding, rest = urgency[Owner.LLM], urgency[Owner.EMBEDDING], options.nominal_llm_bytes
    total = llm + embedding + options.nominal_weight
    lean = (llm - embedding) / total if total > 0 else 0.0
    room = options.highest - rest if lean > 0 else rest - options.lowest
    return _blocks_down(rest + int(lean * room), options.block_bytes)


def apply_dead_band(former: int, wanted: int, options: QuotaOptions) -> int:
    """The target to keep: `former` if `wanted` is within the dead-band.

    The dead-band is around the target, not around the present quota: a move that has begun is completed, and
    `nominal_llm_bytes` is always returned to.
    """
    is_near = abs(wanted - former) <= options.dead_band
    return former if is_near and wanted != options.nominal_llm_bytes else wanted


def next_nominals(
    current: Mapping[Owner, int], target: int, *, elapsed: Duration, options: QuotaOptions
) -> dict[Owner, int]:
    """The next step towards the LLM's `target`, `elapsed` after the last; sums to the pool.

    A step too short for a whole block moves nothing.
    """
    now = current[Owner.LLM]
    most = int(options.rate * options.pool * to_seconds(elapsed))
    if target > now:
        llm = max(now, min(target, _blocks_down(now + most, options.block_bytes)))
    else:
        llm = min(now, max(target, _blocks_up(now - most, options.block_bytes)))
    llm = _bounded(llm, options)
    return {Owner.LLM: llm, Owner.EMBEDDING: options.pool - llm}


def use_ceiling(quota: int, ceiling: int, *, used: int, growth: int) -> int:
    """The most that the LLM's running requests may use while nothing starts beyond `quota`.

    While use is above the quota they keep what they have and may need, `growth` more, but no more than the
    former `ceiling`. Once use is within the quota, it alone applies.
    """
    return max(quota, min(ceiling, used + growth)) if used > quota else quota


def bytes_to_reclaim(*, held: int, nominal: int, free: int, demanded: int) -> int:
    """Bytes to preempt from an owner that holds more than its nominal quota.

    Only what the other owner demands and the pool lacks.
    """
    return max(0, min(held - nominal, demanded - free))


def _bounded(llm: int, options: QuotaOptions) -> int:
    return min(max(llm, options.lowest), options.highest)


def _blocks_down(count: int, block: int) -> int:
    return count // block * block


def _blocks_up(count: int, block: int) -> int:
    return -(-count // block) * block
