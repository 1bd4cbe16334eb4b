"""Attainment of adaptive scheduling against FCFS, with the figures of Apt-Serve's Table 5.

OPT-13B on an A100 with 709 blocks of KV cache. The engine's steps are simulated (`step_simulator`) without a
gate, so no request is rejected and every miss is caused by the order. Two protocols: the paper's (1,000
requests from an empty engine, all counted) at the rates and variations of its table, and a steady window
(arrivals continue after the counted ones) at Poisson rates around the knee. Both metrics are reported
everywhere.

"Tandem, round order" is the `tandem` policy of the round model, made for mean latency; "Tandem, engine" is
what the engine plug-in runs, made for attainment.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from backends.cost_models.step_time import OPT_13B_A100_80G
from benchmark_control_plane.common.command_line import data_folder
from benchmark_control_plane.common.row_files import rows
from benchmark_control_plane.round_model.plugin_rule import EnginePolicyRule
from benchmark_control_plane.round_model.policies.overflow import OverflowClearing, clear_latest
from benchmark_control_plane.round_model.policies.policy_table import STEP_POLICIES
from benchmark_control_plane.round_model.policies.step_policy import StepOptions
from benchmark_control_plane.round_model.policies.tandem import SearchLimits, TandemPolicy
from benchmark_control_plane.round_model.reproductions.conversation import write_results
from benchmark_control_plane.round_model.step_rules import AptServeRule, FcfsRule, RandomRule, RoundPolicyRule
from benchmark_control_plane.round_model.step_simulator import (
    Attainment,
    EngineSetup,
    StepObjective,
    SteppedRequest,
    StepRule,
    measure_attainment,
    serve,
)
from benchmark_control_plane.simulator.simulation import arrival_times
from controlplane.core.clock import seconds
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_policy

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "apt-adaptive"
DIFFERS = (
    "simulated steps (fits of an A100-80GB profile) instead of an A100-40GB; today's chunked prefill instead "
    "of separate prefill iterations; keys and values only, so Apt-Serve's greedy is its Table 4 KV column; "
    "arXiv summaries within 2,048 tokens instead of LongBench; MC-SF and Tandem see lengths with lognormal "
    "noise (sigma 0.5), the others none; MC-SF and Tandem's round order keep 10 % of memory free; "
    "Tandem's round order ran once, with less search than its default"
)

_CONTEXT, _BLOCKS, _BLOCK_TOKENS = 2_048, 709, 16
_NOISE, _ALPHA = 0.5, 0.1
_STEP_SECONDS, _PROMPT_TOKEN_SECONDS = 0.032, 0.00014
"""Time of a typical step with a full pool, and of one more prompt token, from the profile."""
_REDUCED_SEARCH = SearchLimits(window=6, trials=8, work=6_000)
"""Outputs of hundreds of tokens make plans long: less search than the default keeps a run within minutes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One data set with its SLO, the rates of the steady window, and the published figures.

    `published` maps (rate, variation) to the paper's attainment in per cent: FCFS, adaptive, and adaptive
    with keys and values only.
    """

    label: str
    file: str
    objective: StepObjective
    rates: tuple[float, ...]
    published: Mapping[tuple[float, float], tuple[float, float, float]]


WORKLOADS = (
    Workload(
        "ShareGPT", "lengths/sharegpt_v3_lens.csv.gz", StepObjective(1.0, 1.0), (1.5, 2.0, 2.5, 3.0, 4.0),
        {(3, 1): (26.4, 99.5, 99.5), (3, 5): (59.7, 95.9, 94.7), (3, 10): (11.9, 78.2, 75.1),
         (6, 1): (20.0, 67.3, 65.7), (6, 5): (18.1, 67.7, 66.7), (6, 10): (9.9, 58.4, 57.1)},
    ),
    Workload(
        "arXiv", "lengths/arxiv_summarization_llama2.csv.gz", StepObjective(4.0, 1.0),
        (0.6, 0.75, 0.9, 1.2, 1.5),
        {(1.5, 1): (11.8, 98.2, 96.6), (1.5, 5): (10.8, 76.0, 70.0), (1.5, 10): (5.4, 50.8, 43.4),
         (3, 1): (4.8, 77.6, 70.0), (3, 5): (4.6, 64.8, 58.8), (3, 10): (4.2, 42.5, 35.6)},
    ),
)  # fmt: skip


def _options() -> StepOptions:
    return StepOptions(
        memory=_BLOCKS * _BLOCK_TOKENS,
        alpha=_ALPHA,
        step_time=_STEP_SECONDS,
        prompt_steps=_PROMPT_TOKEN_SECONDS / _STEP_SECONDS,
    )


def _srmt(objective: StepObjective, **options: float) -> StepRule:
    pace = Pace(seconds(_STEP_SECONDS), seconds(_PROMPT_TOKEN_SECONDS))
    policy = engine_policy(EngineOptions(ordering="srmt").changed(options))
    return EnginePolicyRule(policy, objective, blocks=_BLOCKS, context=_CONTEXT, pace=pace)


CONTENDERS: Mapping[str, Callable[[StepObjective], StepRule]] = {
    "FCFS": lambda _: FcfsRule(),
    "random": lambda _: RandomRule(0),
    "MC-SF": lambda objective: RoundPolicyRule(STEP_POLICIES["mc-sf"](_options()), objective),
    "Apt-Serve's greedy": AptServeRule,
    "Tandem, round order": lambda objective: RoundPolicyRule(
        TandemPolicy(_options(), OverflowClearing(clear_latest), _REDUCED_SEARCH), objective
    ),
    "Tandem, engine": _srmt,
    "same, no size cut": lambda objective: _srmt(objective, size_cutoff_share=0.0),
}
_SLOW = "Tandem, round order"


def run(
    results: Path, *, seed: int = 0, data: Path | None = None, requests: int = 1_000, repeats: int = 2
) -> Mapping[str, Any]:
    """Prints the table and writes `apt-adaptive.json` and `.png` into `results`.

    Raises BadInput if the folder of public data lacks the lengths.
    """
    folder = data_folder(data, WORKLOADS[0].file)
    pool = EngineSetup(_BLOCKS, _BLOCK_TOKENS, OPT_13B_A100_80G)
    table, steady = [], []
    for workload in WORKLOADS:
        lengths = _lengths(folder / workload.file)
        table += _table(workload, lengths, pool, requests, range(seed, seed + repeats))
        steady += _steady(workload, lengths, pool, requests, seed)
    found = {
        "name": NAME,
        "seed": seed,
        "repeats": repeats,
        "requests": requests,
        "table": table,
        "steady": steady,
        "differs": DIFFERS,
    }
    write_results(results, found)
    _plot(results / f"{NAME}.png", found)
    _print(found)
    return found


def _lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the requests within the model's context, as in the paper."""
    lengths = ((int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in rows(path))
    return [(prompt, output) for prompt, output in lengths if prompt + output <= _CONTEXT]


def _drawn(
    lengths: Sequence[tuple[int, int]], rate: float, variation: float, count: int, seed: int
) -> list[SteppedRequest]:
    """Draws `count` requests; the same seed draws the same requests at every rate."""
    rng = np.random.default_rng(seed)
    picked = rng.integers(0, len(lengths), count)
    noise = rng.lognormal(0.0, _NOISE, count)
    at = arrival_times(rng, rate, count, variation=variation)
    drawn = []
    for number in range(count):
        prompt, output = lengths[picked[number]]
        predicted = min(_CONTEXT - prompt, max(1, round(output * float(noise[number]))))
        drawn.append(SteppedRequest(prompt, output, number=number, arrival=at[number], predicted=predicted))
    return drawn


def _table(
    workload: Workload,
    lengths: Sequence[tuple[int, int]],
    pool: EngineSetup,
    requests: int,
    seeds: range,
) -> list[dict[str, Any]]:
    rows = []
    for (rate, variation), (fcfs, adaptive, kv_only) in workload.published.items():
        ours = {}
        for label, make in CONTENDERS.items():
            measured = []
            for seed in seeds[:1] if label == _SLOW else seeds:
                offered = _drawn(lengths, rate, variation, requests, seed)
                serve(offered, make(workload.objective), pool)
                measured.append(measure_attainment(offered, workload.objective))
            ours[label] = _summary(measured)
        rows.append(
            {
                "workload": workload.label,
                "rate": rate,
                "variation": variation,
                "published": {"FCFS": fcfs, "adaptive": adaptive, "adaptive, KV only": kv_only},
                "ours": ours,
            }
        )
    return rows


def _summary(measured: Sequence[Attainment]) -> dict[str, Any]:
    return {
        "published_metric": 100 * statistics.mean(one.published for one in measured),
        "strict_metric": 100 * statistics.mean(one.strict for one in measured),
        "published_metric_of_each": [100 * one.published for one in measured],
        "strict_metric_of_each": [100 * one.strict for one in measured],
        "preemptions": statistics.mean(one.preemptions for one in measured),
    }


def _steady(
    workload: Workload, lengths: Sequence[tuple[int, int]], pool: EngineSetup, requests: int, seed: int
) -> list[dict[str, Any]]:
    """Attainment in the steady window: the first tenth warms up, the last third only keeps up the load."""
    rows = []
    count = round(1.5 * requests)
    for rate in workload.rates:
        ours = {}
        for label, make in CONTENDERS.items():
            if label != _SLOW:
                offered = _drawn(lengths, rate, 1.0, count, seed)
                serve(offered, make(workload.objective), pool)
                ours[label] = _summary(
                    [measure_attainment(offered[count // 10 : 2 * count // 3], workload.objective)]
                )
        rows.append({"workload": workload.label, "rate": rate, "ours": ours})
    return rows


def _plot(path: Path, found: Mapping[str, Any]) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained", sharey=True)
    for across, workload in enumerate(WORKLOADS):
        rows = [row for row in found["steady"] if row["workload"] == workload.label]
        for down, metric in enumerate(("published_metric", "strict_metric")):
            plot = axes[down][across]
            for label in rows[0]["ours"]:
                values = [row["ours"][label][metric] for row in rows]
                plot.plot([row["rate"] for row in rows], values, "o-", label=label, markersize=4)
            plot.axhline(90, color="grey", linewidth=0.7)
            plot.set(title=f"{workload.label}, {metric.replace('_', ' ')}", xlabel="requests a second")
    axes[0][0].set_ylabel("attainment, %")
    axes[1][0].set_ylabel("attainment, %")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _print(found: Mapping[str, Any]) -> None:
    labels = list(CONTENDERS)
    print(f"Attainment in %, published metric / strict metric; {found['requests']} requests from empty")
    print(f"{'':16s} paper: FCFS  adaptive  KV only | ours: " + "  ".join(f"{name:>18s}" for name in labels))
    for row in found["table"]:
        published = row["published"]
        print(
            f"{row['workload']:8s} {row['rate']:3g} {row['variation']:3g} {published['FCFS']:12.1f} "
            f"{published['adaptive']:9.1f} {published['adaptive, KV only']:8.1f} |       "
            + _cells(row, labels)
        )
    print("Steady window, Poisson")
    for row in found["steady"]:
        print(f"{row['workload']:8s} {row['rate']:4g}" + " " * 42 + _cells(row, labels))
    print(f"What differs: {found['differs']}")


def _cells(row: Mapping[str, Any], labels: Sequence[str]) -> str:
    shown = []
    for label in labels:
        one = row["ours"].get(label)
        text = "" if one is None else f"{one['published_metric']:.1f} / {one['strict_metric']:.1f}"
        shown.append(f"{text:>18s}")
    return "  ".join(shown)
