"""Counts requests whose objectives no configuration can keep: an idle device is too slow for them.

The time of a request alone is that of the log's model of the device: its prompt without the tokens found in
the prefix cache, in steps as large as the engine's, then one token a step; an embedding request as one pass.
"""

from collections import Counter
from collections.abc import Mapping
from math import ceil

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from controlplane.config import Config
from controlplane.service.decision_log.log_rows import Row

_OBJECTIVES = ("ttft", "tpot", "e2e")


def unattainable_shares(traffic: RecordedTraffic, config: Config) -> dict[str, float]:
    """The share of each class that misses an objective on an idle device, classes without any left out."""
    total, missed = Counter[str](), Counter[str]()
    for row in traffic.rows:
        total[row["class"]] += 1
        section = config.classes[row["class"]]
        objectives = {name: getattr(section, f"{name}_ms") for name in _OBJECTIVES} | row.get("slo_ms", {})
        alone = times_alone(traffic, row)
        missed[row["class"]] += any(
            limit is not None and alone.get(name, 0.0) > limit for name, limit in objectives.items()
        )
    return {name: missed[name] / total[name] for name in sorted(total) if missed[name]}


def times_alone(traffic: RecordedTraffic, row: Row) -> Mapping[str, float]:
    """Milliseconds that a request takes by objective if nothing else runs."""
    if row["kind"] == "embed":
        start, token, square = traffic.costs.embedding
        lengths = row["input_tokens"]
        mean = sum(lengths) / len(lengths)
        took = start + row["sequences"] * mean * (token + square * mean)
        # Passes may be faster than their model says, as the first half of the log has shown.
        return {"e2e": 1e3 * min(1.0, traffic.costs.pass_factor) * took}
    base, decode, cell, prompt_token = traffic.costs.step
    prompt = max(1, row["prompt_tokens"] - row.get("cached_tokens", 0))
    first = ceil(prompt / traffic.machine.step_tokens) * base + prompt * prompt_token
    found = {"ttft": 1e3 * first, "e2e": 1e3 * first}
    if (output := row.get("output_tokens", 0)) > 1:
        found["tpot"] = 1e3 * (base + decode + cell * row["prompt_tokens"])
        found["e2e"] += (output - 1) * found["tpot"]
    return found
