"""Computes the metrics of a run: SLO attainment, latency percentiles, goodput, losses and fairness.

All requests planned within the measured window count; a request that was rejected or never answered is a
miss. Percentiles are of delivered requests: an answer that was lost after its first token has none.
Confidence intervals are bootstrapped over requests, with all token gaps of a request resampled
together; they cover the sampling error within a run. The variation between runs is the spread over seeds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmark_control_plane.judge.records import RequestRecord
from controlplane.core.decision import Outcome
from controlplane.core.memory_ledger import Floats
from controlplane.core.request import Kind

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
_RESAMPLES = 200
_CONFIDENCE = (2.5, 97.5)
_DECISIONS = {
    "ADMIT": "admit",
    "ADMIT_WITH_PREEMPTION": "admit_with_preemption",
    "DEFER": "defer",
    "REJECT": "reject",
    "EVICT": "reject",
}
_LOSSES = {
    "reject": Outcome.REJECTED,
    "evict": Outcome.EVICTED,
    "abort": Outcome.ABORTED,
    "fail": Outcome.FAILED,
}


def attainment(records: Sequence[RequestRecord]) -> float | None:
    """Share of requests that met every objective of their class; None without requests."""
    return fmean(r.outcome is Outcome.MET for r in records) if records else None


def group_by(
    records: Iterable[RequestRecord], key: Callable[[RequestRecord], str]
) -> dict[str, list[RequestRecord]]:
    """Records grouped by `key`, in order of the keys."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return {name: groups[name] for name in sorted(groups)}


def attainments(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Attainment over all records, under `overall`, and of each class."""
    return {"overall": attainment(records)} | class_attainments(records)


def class_attainments(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Attainment of each class with records."""
    classes = group_by(records, lambda r: r.planned.service_class)
    return {name: fmean(r.outcome is Outcome.MET for r in group) for name, group in classes.items()}


def percentiles(records: Sequence[RequestRecord], seed: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Percentiles of delivered requests by class, metric and percentile, each [value, low, high] in ms."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    delivered = (record for record in records if record.is_delivered)
    for name, group in group_by(delivered, lambda r: r.planned.service_class).items():
        metrics = {
            "ttft_ms": [_known(r.ttft_ms) for r in group],
            "tpot_ms": [_known(r.tpot_ms) for r in group],
            "tbt_ms": [gaps_ms(r) for r in group],
            "e2e_ms": [_known(r.e2e_ms) for r in group],
        }
        found[name] = {m: _bootstrap_intervals(each, seed) for m, each in metrics.items() if any(each)}
    return found


def delivered(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Share of each class whose whole response came."""
    classes = group_by(records, lambda r: r.planned.service_class)
    return {name: fmean(record.is_delivered for record in group) for name, group in classes.items()}


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def gaps_ms(record: RequestRecord) -> list[float]:
    """Times between consecutive tokens, in ms."""
    return [1e3 * (after - at) for at, after in zip(record.tokens, record.tokens[1:], strict=False)]


def _bootstrap_intervals(each: Sequence[Sequence[float]], seed: int) -> dict[str, list[float]]:
    """Percentiles of all values with 95 % bootstrap intervals.

    `each` holds the values of each request; some requests may have none, but not all.
    """
    answered = [values for values in each if values]
    counts = [len(values) for values in answered]
    values: Floats = np.concatenate(answered)
    order = np.argsort(values, kind="stable")
    rising, request = values[order], np.repeat(np.arange(len(counts)), counts)[order]
    rng = np.random.default_rng(seed)
    wanted = np.array(list(PERCENTILES.values()))
    resampled = []
    for times in rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), _RESAMPLES):
        # A request that is drawn twice counts with all of its values twice.
        reached = np.cumsum(times[request])
        resampled.append(rising[np.searchsorted(reached, wanted / 100 * reached[-1])])
    low, high = np.percentile(resampled, _CONFIDENCE, axis=0)
    at = np.percentile(values, wanted)
    return {
        name: [float(at[i]), float(min(low[i], at[i])), float(max(high[i], at[i]))]
        for i, name in enumerate(PERCENTILES)
    }


def tokens_per_s(records: Iterable[RequestRecord], measured: float) -> dict[str, float]:
    """Tokens of delivered requests per second of the window: generated, and embedded."""
    found = [record for record in records if record.is_delivered]
    embedded = sum(r.planned.prompt_tokens for r in found if r.planned.kind is Kind.EMBED)
    return {"output": sum(r.output_tokens for r in found) / measured, "embedded": embedded / measured}


def losses(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Shares of rejected, evicted, aborted and failed requests."""
    count = max(1, len(records))
    return {name: sum(r.outcome is outcome for r in records) / count for name, outcome in _LOSSES.items()}


def jain(values: Sequence[float]) -> float | None:
    """Jain's fairness index (sum x)^2 / (n sum x^2): 1 for equal values, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def fairness(records: Sequence[RequestRecord], priorities: Mapping[str, int]) -> dict[str, float | None]:
    """Jain's index over the attainment of tenants (of classes if there is one tenant), and the priority gap.

    The gap is the attainment of the highest priority minus that of the lowest.
    """
    groups = group_by(records, lambda r: r.planned.tenant)
    if len(groups) < 2:
        groups = group_by(records, lambda r: r.planned.service_class)
    shares = [attainment(group) or 0.0 for group in groups.values()]
    levels = group_by(records, lambda r: f"{priorities.get(r.planned.service_class, 0):03}")
    by_priority = [attainment(group) or 0.0 for group in levels.values()]
    return {
        "jain": jain(shares),
        "priority_gap": by_priority[-1] - by_priority[0] if len(by_priority) > 1 else None,
    }


def decisions(records: Sequence[RequestRecord]) -> dict[str, int] | None:
    """Counts of admission decisions as reported by the server; None if it reports none."""
    named = [_DECISIONS[r.decision] for r in records if r.decision in _DECISIONS]
    return {name: named.count(name) for name in _DECISIONS.values()} if named else None


def lateness(seconds: Sequence[float]) -> dict[str, float | None]:
    """Median, 99th percentile and maximum of the send delays, in ms."""
    if not seconds:
        return {"p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(np.array(seconds), [50, 99])
    return {"p50": 1e3 * float(p50), "p99": 1e3 * float(p99), "max": 1e3 * max(seconds)}


def summary(
    records: Sequence[RequestRecord], *, measured: float, seed: int, priorities: Mapping[str, int]
) -> dict[str, Any]:
    """Metrics of the requests of one run, as in results.json; `measured` is the window in seconds."""
    return {
        "duration_s": measured,
        "attainment": attainments(records),
        "percentiles": percentiles(records, seed),
        "delivered": delivered(records),
        "goodput_rps": sum(r.outcome is Outcome.MET for r in records) / measured,
        "tokens_per_s": tokens_per_s(records, measured),
        "rates": losses(records),
        "fairness": fairness(records, priorities),
        "decisions": decisions(records),
    }
