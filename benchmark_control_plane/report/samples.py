"""Pools outcomes and latencies of single requests over the seeds of a system, load and class.

Warm-up requests and runs that are not valid are excluded. A request that was lost, or unfinished at the end
of the drain, has no latency, even if its first token came, but counts among the offered ones, so that neither
improves a curve.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.report.schema import OUTCOMES, Results

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_CURVE_POINTS = 80

Key = tuple[str, float, str]
"""System, load, class."""


@dataclass
class PooledSample:
    """Requests of one system, load and class; `lost` counts by metric the latencies that never came."""

    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=lambda: {metric: [] for metric in LATENCIES})
    lost: Counter[str] = field(default_factory=Counter)

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """Points (latency, share of the offered requests that were at least as fast), ascending."""
        values = sorted(self.latencies[metric])
        offered = len(values) + self.lost[metric]
        ranks = sorted({round(i * (len(values) - 1) / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)})
        return [(values[rank], (rank + 1) / offered) for rank in ranks if values]


def pool_samples(results: Results, requests: Iterable[Mapping[str, Any]]) -> dict[Key, PooledSample]:
    """Pools `requests`. Raises BadInput if a record lacks a field or names an unknown run."""
    samples: dict[Key, PooledSample] = defaultdict(PooledSample)
    for number, record in enumerate(requests, start=1):
        try:
            _count(results, record, samples)
        except KeyError as error:
            raise BadInput(f"request {number}: {error.args[0]}: missing; it is required") from error
        except BadInput as error:
            raise BadInput(f"request {number}: {error}") from error
    return dict(samples)


def _count(results: Results, record: Mapping[str, Any], samples: dict[Key, PooledSample]) -> None:
    index, outcome, runs = record["run"], record["outcome"], results["runs"]
    if not isinstance(index, int) or not 0 <= index < len(runs):
        raise BadInput(f"run={index!r}: results.json has {len(runs)} runs, counted from 0")
    if outcome not in OUTCOMES:
        raise BadInput(f"outcome={outcome!r}: one of {', '.join(OUTCOMES)} is needed")
    run = runs[index]
    if record["warmup"] or not run["valid"]:
        return
    sample = samples[run["system"], run["load"], record["class"]]
    sample.outcomes[outcome] += 1
    for metric in LATENCIES:
        if record["e2e_ms"] is None:
            sample.lost[metric] += 1
        # Of a whole response, an output of one token has no TPOT and an embedding no TTFT.
        elif (value := record[metric]) is not None:
            sample.latencies[metric].append(value)
