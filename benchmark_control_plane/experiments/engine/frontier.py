"""Measures the rates at which each engine policy reaches 90 % and 60 % attainment, on vLLM's scheduler.

    python -m benchmark_control_plane.experiments.engine.frontier --seeds 5

vLLM's own scheduler and KV manager, stepped on virtual time at OPT-13B geometry: 709 blocks of 16 tokens
(an A100-40GB), step times fitted to an A100-80GB with decoding slowed by the ratio of bandwidths (2,039 /
1,555 GB/s). For each policy and seed the highest Poisson rate at an attainment is bracketed to 8 % and
interpolated. Both metrics of `engine_replay` are printed, with the waits of the requests that missed.

`sharegpt-classes` is `sharegpt` with three classes, `sharegpt-classes-embeddings` adds embedding passes that
take 15 % of the device's time:

    python -m benchmark_control_plane.experiments.engine.frontier --seeds 1 2 3 4 5 \\
        --datasets sharegpt-classes sharegpt-classes-embeddings \\
        --policies stock-fcfs stock-priority apt-kv tandem tandem-equal-weights tandem-gate

Results are added to the file of `--results`, so that a study can be extended; each names the commit of its
run.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup
from benchmark_control_plane.common.command_line import add_data, data_folder_option, exit_status
from benchmark_control_plane.common.results_file import add_results, read_previous, write_json
from benchmark_control_plane.experiments.engine.bounds import fluid_bound, with_hindsight
from benchmark_control_plane.experiments.engine.engine_replay import (
    EngineVariant,
    ReplayResult,
    ReplayWindow,
    play,
)
from benchmark_control_plane.experiments.engine.offered_load import (
    DATASET_NAMES,
    Dataset,
    Offer,
    Prediction,
    TokenObjectives,
    dataset,
    poisson,
)
from benchmark_control_plane.judge.results import environment

TARGETS = (0.9, 0.6)
METRICS = ("strict", "published")
KEYS = tuple(f"{metric}-{target:.0%}" for target in TARGETS for metric in METRICS)

_TANDEM: Mapping[str, Any] = {"ordering": "srmt"}
CONTENDERS: Mapping[str, EngineVariant] = {
    c.name: c
    for c in (
        EngineVariant("stock-fcfs"),
        EngineVariant("stock-priority", stock="priority"),
        EngineVariant("mc-sf", {"ordering": "mc-sf"}),
        EngineVariant("apt-kv", {"ordering": "apt"}),
        EngineVariant("tandem", _TANDEM),
        # Rejections are misses.
        EngineVariant("tandem-gate", _TANDEM, has_gate=True),
        EngineVariant("tandem-equal-weights", _TANDEM, weights=(1.0, 1.0, 1.0)),
        # Ablations of single mechanisms.
        EngineVariant("tandem-no-cut", {**_TANDEM, "size_cutoff_share": 0.0}),
        EngineVariant("tandem-no-preemption", {**_TANDEM, "preempt_ratio": 1e9}),
        EngineVariant("tandem-no-settling", {**_TANDEM, "settle_steps": 0}),
        EngineVariant("tandem-no-aging", {**_TANDEM, "aged_share": 0.0}),
        EngineVariant("tandem-no-price", {**_TANDEM, "prefill_weight": 0.0}),
    )
}
# The linear program of `bounds` in place of a policy; it ignores classes and embeddings.
HINDSIGHT = "hindsight"
PREDICTIONS: Mapping[str, Prediction] = {
    "oracle": Prediction(),
    "noisy": Prediction(sigma=0.5),
    "four-times-long": Prediction(factor=4.0),
    "four-times-short": Prediction(factor=0.25),
    "none": Prediction(sigma=None),
}

_TOLERANCE = 1.08
_STEP = 1.06
_LOWEST = 0.05

Attain = Callable[[float], ReplayResult]


def highest_rate(
    attain: Attain, seen: dict[float, ReplayResult], metric: str, target: float, start: float
) -> float:
    """Requests per second at which the metric crosses the target; 0 if it does at no rate.

    From `start` the search steps towards the crossing, twice as far each time, then bisects. Every run is
    added to `seen`.
    """

    def at(rate: float) -> float:
        if rate not in seen:
            seen[rate] = attain(rate)
        value: float = getattr(seen[rate], metric)
        return value

    step, last = _STEP, round(start, 3)
    while True:
        low = max((rate for rate in seen if at(rate) >= target), default=0.0)
        high = min((rate for rate in seen if rate > low), default=inf)
        if high <= _TOLERANCE * low:
            share = (at(low) - target) / max(1e-9, at(low) - at(high))
            return low + (high - low) * share
        if high < _LOWEST:
            return 0.0
        last = min(max(last, low), high)
        rate = last
        if last in seen:
            rate = last * step if last == low else last / step
            step *= step
        if not low < rate < high:
            rate = (low * high) ** 0.5
        last = round(rate, 3)
        at(last)


Run = Callable[[Iterator[Offer], ReplayWindow, TokenObjectives, float], ReplayResult]


def study(
    run: Run,
    data: Dataset,
    policy: str,
    prediction: str,
    seed: int,
    window: ReplayWindow,
    starts: Mapping[str, float],
) -> dict[str, Any]:
    """Searches the rate of every metric and target, for one policy, data set and seed."""

    def attain(rate: float) -> ReplayResult:
        offers = poisson(data.lengths, rate, seed, PREDICTIONS[prediction], classes=data.classes)
        outcome = run(offers, window, data.objectives, rate)
        print(
            f"  {rate:7.3f} req/s: strict {outcome.strict:.3f}, published {outcome.published:.3f}, "
            f"longest gap {outcome.longest_gap:.0f} s, {outcome.seconds:.0f} s",
            flush=True,
        )
        return outcome

    seen: dict[float, ReplayResult] = {}
    rates = {
        key: highest_rate(attain, seen, metric, target, starts[key])
        for key, (target, metric) in zip(KEYS, product(TARGETS, METRICS), strict=True)
    }
    return {
        "dataset": data.name,
        "policy": policy,
        "prediction": prediction,
        "seed": seed,
        "window": asdict(window),
        "rates": rates,
        "points": [asdict(seen[rate]) for rate in sorted(seen)],
    }


def with_study(studies: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`studies` sorted by key, with `new` in place of the study of the same key."""
    return sorted([*(known for known in studies if _key(known) != _key(new)), new], key=_key)


def starts_like(
    studies: Sequence[Mapping[str, Any]],
    bounds: Mapping[str, Mapping[str, float]],
    sought: tuple[str, str, str, int],
    first: float,
) -> dict[str, float]:
    """First rates to try for a (data, policy, lengths, seed), by metric and target.

    The mean of the most similar studies of the same family of policies, scaled by the fluid bounds of the
    data sets; `first` if there is none.
    """
    data, policy = sought[:2]

    def similarity(known: Mapping[str, Any]) -> tuple[bool, ...]:
        return tuple(a == b for a, b in zip(_key(known), sought, strict=True))

    family = [known for known in studies if known["policy"].split("-")[0] == policy.split("-")[0]]
    if not family:
        return dict.fromkeys(KEYS, first)
    closest = max(map(similarity, family))
    similar = [known for known in family if similarity(known) == closest]

    def scaled(known: Mapping[str, Any], key: str) -> float:
        target = key.rpartition("-")[2]
        rate: float = known["rates"][key] * bounds[data][target] / bounds[known["dataset"]][target]
        return rate

    return {key: mean(scaled(known, key) for known in similar) for key in KEYS}


def table(studies: Sequence[Mapping[str, Any]], bounds: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown table of mean rates over seeds, their deviation, and the ratio to stock FCFS.

    The ratio is over the same seeds and window. Gaps and waits are those at the highest rate seen that
    reaches 90 %, shares of the memory those at the highest rate that reaches each target. Fluid bounds last.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for known in studies:
        groups.setdefault((known["dataset"], known["prediction"], known["policy"]), []).append(known)
    heads = [
        "data",
        "lengths",
        "policy",
        "seeds",
        *KEYS,
        "longest gap, s",
        "wait of requests that missed, p95, s",
        *(f"memory held at {target:.0%} (by requests that met their SLO)" for target in TARGETS),
        "rejected at 90%",
        "met by class at 90% (embeddings)",
        "commit",
    ]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for (data, prediction, policy), runs in sorted(groups.items()):
        cells = [data, prediction, policy, ", ".join(str(run["seed"]) for run in runs)]
        cells += [
            _rated([run["rates"][key] for run in runs], _stock(groups, data, runs, key)) for key in KEYS
        ]
        reached = points_at(runs, 0.9)
        cells.append(f"{max((p['longest_gap'] for p in reached), default=0):.0f}")
        cells.append(f"{max((p['missed_wait']['p95'] for p in reached), default=0):.0f}")
        cells += [_held(points_at(runs, target)) for target in TARGETS]
        cells += [_rejected(reached), _by_class(reached)]
        commits = {run["commit"][:7] if run.get("commit") else "unknown" for run in runs}
        cells.append(", ".join(sorted(commits)))
        lines.append(" | ".join(cells))
    for data, bound in sorted(bounds.items()):
        stock = groups.get((data, "oracle", "stock-fcfs"), [])
        rates = [
            _rated([bound[key.rpartition("-")[2]]], [run["rates"][key] for run in stock]) for key in KEYS
        ]
        lines.append(" | ".join([data, "oracle", "fluid bound", "", *rates, *[""] * 7]))
    return "\n".join(f"| {line} |" for line in lines)


def points_at(runs: Sequence[Mapping[str, Any]], target: float) -> list[Mapping[str, Any]]:
    """The point of the highest rate that reaches the target, for each run that reaches it."""
    reached = [[point for point in run["points"] if point["strict"] >= target] for run in runs]
    return [max(points, key=_rate) for points in reached if points]


def _rejected(points: Sequence[Mapping[str, Any]]) -> str:
    shares = [point.get("rejected", 0.0) for point in points]
    return f"{mean(shares):.1%}" if any(shares) else ""


def _by_class(points: Sequence[Mapping[str, Any]]) -> str:
    """Mean strict attainment of each class, and that of the embedding passes where they ran."""
    names = points[0].get("by_class", {}) if points else {}
    cell = ", ".join(f"{name} {mean(point['by_class'][name] for point in points):.0%}" for name in names)
    passes = [point["embeddings"] for point in points if point.get("embeddings") is not None]
    return f"{cell} ({mean(passes):.0%})" if passes else cell


def _held(points: Sequence[Mapping[str, Any]]) -> str:
    if not points or any("held_share" not in point for point in points):
        return ""
    held, useful = (mean(point[part] for point in points) for part in ("held_share", "met_share"))
    return f"{held:.0%} ({useful:.0%})"


def _rated(rates: Sequence[float], stock: Sequence[float]) -> str:
    spread = f" ± {stdev(rates):.2f}" if len(rates) > 1 else ""
    ratio = f" ({mean(rates) / mean(stock):.2f}x)" if stock else ""
    return f"{mean(rates):.2f}{spread}{ratio}"


def _rate(point: Mapping[str, Any]) -> float:
    rate: float = point["rate"]
    return rate


def _stock(
    groups: Mapping[Any, list[Mapping[str, Any]]], data: str, runs: Sequence[Mapping[str, Any]], key: str
) -> list[float]:
    """Rates of stock FCFS; empty unless it has run on all these seeds in the same window."""
    stock = {
        (run["seed"], *run["window"].values()): run for run in groups.get((data, "oracle", "stock-fcfs"), [])
    }
    wanted = [(run["seed"], *run["window"].values()) for run in runs]
    if any(place not in stock for place in wanted):
        return []
    return [stock[place]["rates"][key] for place in wanted]


def publish(saved: Mapping[str, Any], results: Path) -> None:
    """Writes the JSON file, and the table next to it."""
    write_json(results, saved)
    text = table(saved["studies"], saved["fluid_bounds"])
    results.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.engine.frontier", description=__doc__
    )
    add_data(parser)
    parser.add_argument("--datasets", nargs="+", default=["sharegpt"], choices=DATASET_NAMES)
    parser.add_argument("--policies", nargs="+", default=list(CONTENDERS), choices=[*CONTENDERS, HINDSIGHT])
    parser.add_argument("--predictions", nargs="+", default=["oracle"], choices=list(PREDICTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--warm-up", type=int, default=500)
    parser.add_argument("--start", type=float, default=1.3, help="first rate to try, in requests per second")
    add_results(parser)
    options = parser.parse_args(arguments)

    setup, folder = SteppedEngineSetup(), data_folder_option(options.data)
    chosen = [dataset(name, folder, setup.max_model_tokens) for name in options.datasets]
    engine = SteppedEngine(setup)
    # vLLM's modules stay loaded; freezing them spares every later collection the scan.
    gc.collect()
    gc.freeze()
    window = ReplayWindow(options.warm_up, options.requests)
    hindsight = partial(with_hindsight, setup)
    commit = environment()["commit"]
    saved = {"studies": []} | read_previous(options.results)
    for data in chosen:
        bounds = {f"{t:.0%}": fluid_bound(data.lengths, setup, t) for t in (1.0, *TARGETS)}
        saved.setdefault("fluid_bounds", {})[data.name] = bounds
        print(f"{data.name}: fluid bound {bounds}", flush=True)
        for prediction in options.predictions:
            for seed in options.seeds:
                for policy in options.policies:
                    print(f"{data.name}, {prediction}, seed {seed}, {policy}", flush=True)
                    run: Run = hindsight
                    if policy in CONTENDERS:
                        run = partial(play, engine, CONTENDERS[policy], embeddings=data.embeddings)
                    key = (data.name, policy, prediction, seed)
                    starts = starts_like(saved["studies"], saved["fluid_bounds"], key, options.start)
                    found = study(run, data, policy, prediction, seed, window, starts)
                    studies = with_study(saved["studies"], {**found, "commit": commit})
                    saved = {**saved, "setup": asdict(setup), "studies": studies}
                    if options.results is not None:
                        publish(saved, options.results)
    print(table(saved["studies"], saved["fluid_bounds"]))
    if options.results is None:
        print(json.dumps(saved))
    return 0


def _key(known: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return (known["dataset"], known["policy"], known["prediction"], known["seed"])


if __name__ == "__main__":
    sys.exit(exit_status(main))
