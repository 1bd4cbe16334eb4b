"""A small deterministic experiment in the format of results.json and requests.jsonl, for report tests."""

import random
from collections.abc import Sequence
from typing import Any

from benchmark_control_plane.report.schema import Results

SLOS: dict[str, dict[str, float | None]] = {
    "interactive": {"ttft_ms": 250.0, "tpot_ms": 40.0},
    "batch": {"ttft_ms": 4000.0, "e2e_ms": 30000.0},
    "embedding": {"e2e_ms": 600.0},
}
SYSTEMS = (
    ("static-split", "vLLM and an embedding server, each with a fixed half", "baseline", 1.0),
    ("plain", "vLLM and an embedding server, <no limits> & no priorities", "baseline", 0.8),
    ("tandem", "the whole control plane", "tandem", 2.1),
    ("tandem-no-forecast", "without forecasts of embedding work", "ablation", 1.5),
)
REFERENCE_RPS = 8.0
_PER_CLASS = 30


def results(
    *, loads: Sequence[float] = (0.5, 1.0, 1.5, 2.0), seeds: Sequence[int] = (1, 2, 3), partial: bool = False
) -> Results:
    """Results in which attainment falls beyond each system's strength; the last run of `plain` is invalid."""
    runs = [
        _run(name, strength, load, seed, is_tandem=kind != "baseline")
        for name, _, kind, strength in SYSTEMS
        for load in loads
        for seed in seeds
    ]
    for refused in [run for run in runs if run["system"] == "plain"][-1:]:
        refused |= {"valid": False, "why_invalid": "the generator sent 4.1 % of its requests over 50 ms late"}
    frontier = [
        {
            "system": name,
            "target": goal,
            "rps": REFERENCE_RPS * min(by, max(loads, default=by)),
            "per_seed": [REFERENCE_RPS * min(by * factor, max(loads, default=by)) for factor in noise],
        }
        for name, _, kind, strength in SYSTEMS
        for noise in ((0.97, 1.0, 1.04) if kind == "tandem" else (1.02, 1.0, 0.96),)
        for goal, by in ((0.9, 0.7 * strength), (0.6, strength))
    ]
    return {
        "format": 1,
        "experiment": {
            "name": "head-to-head",
            "question": "Does one pool carry more than two halves, if chat & embeddings <burst> together?",
            "yaml": "name: head-to-head\nloads: [0.5, 1.0]  # </script> must not end anything\n",
        },
        "partial": partial,
        "started": "2026-01-02T03:04:05Z",
        "environment": {
            "python": "3.11.2",
            "platform": "Linux",
            "cpu": "two cores of something",
            "cores": 2,
            "versions": {"vllm": "0.32.0", "tandem": "0.1.0"},
            "commit": "0123abc",
        },
        "systems": [{"name": n, "description": text, "kind": kind} for n, text, kind, _ in SYSTEMS],
        "runs": runs,
        "max_goodput_rate": frontier,
        "slos": SLOS,
        "unloaded_ms": {"interactive": {"ttft_ms": 62.0, "tpot_ms": 11.0}, "embedding": {"e2e_ms": 95.0}},
        "capacity_rps": REFERENCE_RPS,
        "sweeps": [
            {
                "system": "static-split",
                "load": 1.0,
                "attainment": {"half and half": 0.81, "three quarters to the LLM": 0.87},
                "chosen": "three quarters to the LLM",
            }
        ],
    }  # type: ignore[typeddict-item]


def requests(of: Results) -> list[dict[str, Any]]:
    """A few records for each class of each run; the first are warm-up."""
    return [
        _request(random.Random(f"{index} {name} {number}"), index, run, name, number)
        for index, run in enumerate(of["runs"])
        for name in SLOS
        for number in range(_PER_CLASS)
    ]


def _run(system: str, strength: float, load: float, seed: int, *, is_tandem: bool) -> dict[str, Any]:
    chance = random.Random(f"{system} {load} {seed}")
    overload = max(0.0, load - strength)
    attained = {
        name: round(max(0.02, min(1.0, 0.985 - weight * overload + chance.uniform(-0.02, 0.015))), 4)
        for name, weight in (("interactive", 0.5), ("batch", 0.8), ("embedding", 0.65))
    }
    attained["overall"] = round(sum(attained.values()) / len(attained), 4)
    reject = round(min(0.6, 0.3 * overload), 4) if is_tandem else 0.0
    slow = 1 + 4 * overload
    return {
        "system": system,
        "load": load,
        "offered_rps": REFERENCE_RPS * load,
        "seed": seed,
        "duration_s": 60.0,
        "valid": True,
        "why_invalid": None,
        "send_lateness_ms": {"p50": 0.2, "p99": 3.1, "max": 9.8},
        "attainment": attained,
        "percentiles": {name: _percentiles(name, slow) for name in SLOS},
        "goodput_rps": REFERENCE_RPS * load * attained["overall"],
        "rates": {"reject": reject, "evict": 0.0, "abort": 0.0, "fail": 0.001},
        "fairness": {"jain": 0.97, "priority_gap": round(0.2 * overload, 3)},
        "memory": _memory(chance) if is_tandem else None,
        "engine": {"preemptions": 12, "recompute_tokens": 3400, "overflow": 0, "cache_hit": None},
        "decisions": {"admit": 900, "admit_with_preemption": 20, "defer": 60, "reject": int(1000 * reject)}
        if is_tandem
        else None,
    }


def _percentiles(name: str, slow: float) -> dict[str, Any]:
    def figures(typical: float) -> dict[str, list[float]]:
        return {
            rank: [typical * by * slow, typical * by * slow * 0.9, typical * by * slow * 1.12]
            for rank, by in (("p50", 1.0), ("p90", 1.8), ("p99", 3.2))
        }

    if name == "embedding":
        return {"e2e_ms": figures(120.0)}
    return {
        key: figures(typical)
        for key, typical in (("ttft_ms", 90.0), ("tpot_ms", 18.0), ("tbt_ms", 35.0), ("e2e_ms", 1400.0))
    }


def _memory(chance: random.Random) -> dict[str, Any]:
    times = [float(at) for at in range(0, 60, 2)]
    llm = [300 + 40 * chance.random() + (120 if 20 <= at < 34 else 0) for at in times]
    embedding = [60 + 30 * chance.random() + (90 if 30 <= at < 44 else 0) for at in times]
    return {
        "unit": "MiB",
        "times_s": times,
        "by_owner": {"llm": llm, "embedding": embedding},
        "quota_by_owner": {"llm": [400.0 if at < 30 else 360.0 for at in times], "embedding": 160.0},
    }


def _request(chance: random.Random, index: int, run: Any, name: str, number: int) -> dict[str, Any]:
    is_met = chance.random() < run["attainment"][name]
    is_lost = not is_met and run["rates"]["reject"] > 0 and chance.random() < 0.6
    outcome = "MET" if is_met else "REJECTED" if is_lost else "LATE"
    slow = chance.lognormvariate(0, 0.5) * (1 if is_met else 6)
    is_embed = name == "embedding"
    first, pace = 80 * slow, 15 * slow**0.3
    tokens = 0 if is_embed else chance.randint(8, 80)
    return {
        "run": index,
        "id": f"{index}-{name}-{number}",
        "kind": "embed" if is_embed else "generate",
        "class": name,
        "tenant": "a",
        "scheduled_s": number / 2,
        "sent_s": number / 2,
        "first_s": None,
        "last_s": None,
        "token_s": [],
        "prompt_tokens": 100,
        "output_tokens": tokens,
        "inputs": 32 if is_embed else 0,
        "outcome": outcome,
        "ttft_ms": None if is_lost or is_embed else first,
        "tpot_ms": None if is_lost or is_embed else pace,
        "max_tbt_ms": None if is_lost or is_embed else 2 * pace,
        "e2e_ms": None if is_lost else 1.5 * first if is_embed else first + pace * tokens,
        "status": 429 if is_lost else 200,
        "error": None,
        "warmup": number == 0,
    }
