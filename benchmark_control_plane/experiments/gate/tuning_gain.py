"""Measures what `tandem tune` costs and finds, from a bad configuration, against configurations made by hand.

The traffic of a bad configuration is simulated and logged. `tandem tune` searches on that log; its answer and
the configurations made by hand are then judged on the same held-out blocks. An interrupted run goes on where
it was.

    python -m benchmark_control_plane.experiments.gate.tuning_gain --folder DIR [--log-minutes 15] [--rate 20]
        [--results FILE]
"""

import argparse
import io
import json
import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from benchmark_control_plane.cli import add_command
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.decision_replay.recorded_traffic import read_traffic
from benchmark_control_plane.decision_replay.replay_command import sections_for
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import (
    Offered,
    SimulatedEmbedding,
    SimulatedRequest,
    arrival_times,
    simulate,
)
from benchmark_control_plane.tuning.blocks import blocks_of
from benchmark_control_plane.tuning.comparison import Comparison, compare
from benchmark_control_plane.tuning.evaluation import evaluator
from benchmark_control_plane.tuning.time_budget import TimeBudget
from benchmark_control_plane.tuning.tuning_run import BlockSets, state_file
from controlplane.commands.fleet import add_fleet_commands
from controlplane.config import parse
from controlplane.config.documents import merged
from controlplane.config.loader import read_yaml

# The memory holds so many KV cells, and besides a batch of so many padded embedding tokens.
_KV_TOKENS, _EMBED_TOKENS, _CELL_BYTES = 5_120, 5_000, 1_024
_OBJECTIVES: Mapping[str, Any] = {
    "models": {"chat": {"model": "simulated"}, "embeddings": [{"model": "simulated-embeddings"}]},
    "pool": {"kv_allocator": "kvcached"},
    "classes": {
        "interactive": {"priority": 4, "ttft_ms": 500, "tpot_ms": 50},
        "retrieval": {"priority": 4, "e2e_ms": 250},
        "standard": {"priority": 1, "default": True, "sheddable": False, "ttft_ms": 5_000},
        "batch": {"priority": 0, "sheddable": False, "e2e_ms": 60_000},
    },
    "admission": {"length_predictor": "history"},
}
_BAD: Mapping[str, Any] = {
    "quota": {"policy": "static", "llm": {"nominal": 0.4}, "embedding": {"nominal": 0.6}},
    "admission": {"policy": "fits-now", "tpot_guard": False, "max_waiting": 60},
    "scheduling": {
        "ordering": "fcfs", "priority_head_start_ms": 0, "engine": {"ordering": "fcfs", "decode_pacing": 0},
    },
}  # fmt: skip
_BY_HAND: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "LLM 0.7": {"quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}}},
    "LLM 0.5": {"quota": {"llm": {"nominal": 0.5}, "embedding": {"nominal": 0.5}}},
    "no guard": {"admission": {"tpot_guard": False}},
    "long head start": {"scheduling": {"priority_head_start_ms": 4_000}},
    "edf": {"scheduling": {"engine": {"ordering": "edf"}}},
    "less pacing": {"scheduling": {"engine": {"decode_pacing": 0.4}}},
}


def machine(step_seconds: float = 0.008) -> Machine:
    """The device: steps of 8 ms and more, and quotas that move.

    With 10 ms the bad configuration saturates it, the log is not reproduced, and nothing is tuned.
    """
    return Machine(
        sequential(llm_only(affine(step_seconds, 2.5e-5, 1.6e-4, 2e-8)), embedding_line(0.003, 8e-6)),
        kv_bytes=_KV_TOKENS * _CELL_BYTES,
        max_model_tokens=2_048,
        max_running=48,
        step_tokens=512,
        embed_batch_tokens=4_096,
        pool_bytes=(_KV_TOKENS + _EMBED_TOKENS) * _CELL_BYTES,
    )


def offered(seconds: float, rate: float, seed: int) -> list[Offered]:
    """Bursty chat of three classes with shared system prompts, short retrievals and indexing batches."""
    rng = np.random.default_rng(seed)
    found: list[Offered] = []
    for at in arrival_times(rng, rate, int(seconds * rate), variation=2.0):
        kind = rng.random()
        if kind < 0.25:
            lengths = tuple(int(n) for n in rng.integers(10, 250, int(rng.integers(1, 4))))
            found.append(SimulatedEmbedding(at, lengths, "retrieval"))
            continue
        if kind < 0.4:
            found.append(SimulatedEmbedding(at, tuple(int(n) for n in rng.integers(100, 400, 8)), "batch"))
            continue
        name, mean = next(
            (name, mean)
            for below, name, mean in ((0.75, "interactive", 65), (0.95, "standard", 130), (1, "batch", 170))
            if kind < below
        )
        prompt = min(max(20, int(rng.lognormal(5.0, 0.6))), 1_200)
        output = min(int(rng.geometric(1 / mean)), 600)
        request = SimulatedRequest(at, prompt, output, 600, name)
        found.append(replace(request, prefix_group=int(rng.integers(4)), prefix_tokens=min(64, prompt - 1)))
    return found


def log_of(folder: Path, seconds: float, rate: float) -> Path:
    """The log of the bad configuration, simulated unless it is there; and its YAML."""
    log, done = folder / "log", folder / "log.json"
    content = merged(dict(_OBJECTIVES), _BAD)
    (folder / "bad.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    if not done.exists():
        requests, start = offered(seconds, rate, seed=1), time.process_time()
        sections = {name: part for name, part in content.items() if name != "models"}
        simulate(requests, machine(), {**sections, "decision_log": {"dir": str(log), "sample": 0}})
        used = time.process_time() - start
        done.write_text(json.dumps({"requests": len(requests), "ms_a_request": 1e3 * used / len(requests)}))
    return log


def tuned(log: Path, config: Path, out: Path, *, minutes: float, processes: int) -> dict[str, Any]:
    """The answer of `tandem tune`."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    # Of which the benchmark adds an action.
    add_fleet_commands(commands)
    add_command(commands)
    options = parser.parse_args(
        ["tune", str(log), str(config), "--out", str(out), "--json",
         "--minutes", str(minutes), "--processes", str(processes)]
    )  # fmt: skip
    with redirect_stdout(io.StringIO()) as printed:
        status = options.run(options)
    if status not in (0, 3):
        raise SystemExit(status)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def judged(folder: Path, log: Path, processes: int) -> dict[str, Any]:
    """Each configuration against the bad one, and the best by hand against the tuned one if there is one.

    On the held-out blocks; points of attainment.
    """
    traffic = read_traffic(log)
    blocks = BlockSets(*blocks_of(traffic))
    contents = {name: merged(dict(_OBJECTIVES), change) for name, change in _BY_HAND.items()}
    if (better := folder / "better.yaml").exists():
        found = read_yaml(better)
        assert isinstance(found, dict)
        contents["tuned"] = found
    contents = {"bad": merged(dict(_OBJECTIVES), _BAD), **contents}
    sections = {
        name: sections_for(traffic, log, parse(content), source=name) for name, content in contents.items()
    }
    weights = {name: known.weight for name, known in parse(contents["bad"]).service_classes().items()}
    numbers = blocks.numbers[1]
    with evaluator(
        blocks.all,
        state_file(folder / "better.yaml"),
        fingerprint=blocks.fingerprint(),
        time=TimeBudget(inf, processes),
    ) as replays:
        results = replays.results([(each, number) for each in sections.values() for number in numbers])
    parts = {
        name: [each.requests for each in results[at : at + len(numbers)]]
        for name, at in zip(sections, range(0, len(results), len(numbers)), strict=True)
    }

    def against(name: str, other: str) -> Comparison:
        return compare(blocks.held_out, parts[other], parts[name], weights, changed=0)

    rows = {name: _row(against(name, "bad")) for name in parts}
    best = max(_BY_HAND, key=lambda name: float(rows[name]["kept"]))
    short = against(best, "tuned").gain if "tuned" in parts else None
    return {
        "held_out": rows,
        "best_by_hand": best,
        "best_by_hand_less_tuned": None
        if short is None
        else {"points": round(short.mean, 2), "error": round(short.error, 2)},
    }


def _row(found: Comparison) -> dict[str, Any]:
    return {
        "kept": round(found.before + found.gain.mean, 2),
        "gain": round(found.gain.mean, 2),
        "error": round(found.gain.error, 2),
        "classes": {each.name: round(100 * each.after, 1) for each in found.classes},
    }


def main() -> None:
    """Runs the stages that are missing, and writes or prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for log, YAML files and state")
    parser.add_argument("--log-minutes", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--minutes", type=float, default=10.0, help="passed to tandem tune")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    add_results(parser)
    options = parser.parse_args()
    interrupt_on_sigterm()
    options.folder.mkdir(parents=True, exist_ok=True)
    log = log_of(options.folder, 60 * options.log_minutes, options.rate)
    start = time.monotonic()
    answer = tuned(
        log, options.folder / "bad.yaml", options.folder / "better.yaml",
        minutes=options.minutes, processes=options.processes,
    )  # fmt: skip
    seconds = time.monotonic() - start
    facts = {
        "log": json.loads((options.folder / "log.json").read_text()),
        "log_minutes": options.log_minutes,
        "rate": options.rate,
        "processes": options.processes,
        "seconds_of_this_run": round(seconds),
        "answer": {key: answer[key] for key in ("answer", "reason", "changes", "blocks", "cut")},
        "trials": len(answer["trials"]),
        **judged(options.folder, log, options.processes),
    }
    write_or_print(options.results, facts)


if __name__ == "__main__":
    main()
