"""Question and result of the committed results files that docs/component-results.md quotes.

Each function reads one results file and yields rows (question, result).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmark_control_plane.experiments.engine.frontier import points_at
from benchmark_control_plane.experiments.results_page import (
    collocation_rows,
    fault_rows,
    fleet_rows,
    prediction_rows,
)
from benchmark_control_plane.report import formats

Row = tuple[str, str]
"""(question, result)."""

Rows = Iterator[Row]

GATE, ENGINE, COLLOCATION, PREDICTION = "Gate", "Engine", "Collocation", "Prediction"
HIDDEN_CACHE, ROUND_MODEL, CLIENT = "Hidden-state cache", "Round model", "Accuracy of the client"
FAULTS, FLEET = "Faults", "Fleet"
HEADINGS = (GATE, FAULTS, ENGINE, COLLOCATION, PREDICTION, FLEET, HIDDEN_CACHE, ROUND_MODEL, CLIENT)

_RATES = (
    ("half", "at half of the rate that vLLM sustains"),
    ("nine_tenths", "at 90 %"),
    ("saturated", "saturated"),
)


def http_overhead(content: Mapping[str, Any]) -> Rows:
    found = [(words, content["server_ratios"][key]) for key, words in _RATES]
    yield (
        "Tandem's server relative to vLLM's own (tiny model, two cores): TTFT, TPOT and throughput",
        "; ".join(
            f"{words}: {_ratio(at['median_ttft_ratio'])}, {_ratio(at['median_tpot_ratio'])}, "
            f"{_ratio(at['throughput_ratio'])}"
            for words, at in found
        ),
    )
    cost = max(content["decision_us"].values())
    yield "Time of one scheduling cycle of the gate with 1,000 live requests", f"{cost:.0f} µs"


def victims(content: Mapping[str, Any]) -> Rows:
    attained: dict[str, list[float]] = {}
    for run in content["runs"]:
        attained.setdefault(run["arm"], []).append(run["attainment"]["overall"])
    shares = [f"{arm}: {100 * fmean(found):.1f} %" for arm, found in attained.items()]
    yield (
        "Choice of the requests to preempt where KV-cache memory is short: attainment by each rule, "
        "in the engine and at the gate, 5 seeds",
        "<br>".join(shares),
    )


def retry_after(content: Mapping[str, Any]) -> Rows:
    shares = []
    for rate in dict.fromkeys(run["rate"] for run in content["runs"]):
        runs = [run for run in content["runs"] if run["rate"] == rate]
        admitted, rejected = (sum(run[key] for run in runs) for key in ("then_admitted", "turned_away"))
        if rejected:
            waits = [run["median_wait_s"] for run in runs if run["turned_away"]]
            share = formats.share(admitted / rejected)
            shares.append(f"{rate:g} req/s: {share} of {rejected}, after {median(waits):.0f} s")
    yield (
        "Share of rejected requests that are admitted when they retry after `Retry-After` "
        "(bursts on a simulated device that sustains 8 req/s)",
        "; ".join(shares),
    )


def cancellation(content: Mapping[str, Any]) -> Rows:
    times = [
        f"{name} {one['median_ms']:.0f} ({one['max_ms']:.0f}) ms" for name, one in content["requests"].items()
    ]
    yield (
        "Time from a client's disconnect, or from the cancellation of its call, until no memory is held: "
        f"median of {content['rounds']} and longest (`configs/dev.yaml`, with a load average of "
        f"{content['load_average']:.0f} before it)",
        "<br>".join(times),
    )


def live_feed(content: Mapping[str, Any]) -> Rows:
    under, beside = content["with_live_requests"], content["ttft_by_readers"]
    added = beside["added_ms"]
    yield (
        f"CPU time of the dashboard's feed with {under['live_requests']:,} live requests: a sample, "
        f"an answer of {under['full_answer_bytes'] / 1_024:.0f} KiB",
        f"{under['sample_ms']['median']:.2f} and {under['full_answer_ms']['median']:.2f} ms",
    )
    yield (
        f"Mean TTFT beside {beside['readers']} readers of the feed, less that without (simulated engine, "
        f"{beside['rounds']} pairs of windows of {beside['seconds']} s, median and range)",
        f"{added['median']:+.1f} ms ({added['min']:+.1f} to {added['max']:+.1f}) of "
        f"{beside['ttft_ms']['0']:.0f} ms",
    )
    rest = content["at_rest"]["added"]["read"]
    yield (
        "CPU time that sampling and one reader add to a server at rest (median of the windows and range)",
        f"{rest['median']:.2f} % of a core ({rest['min']:.2f} to {rest['max']:.2f})",
    )


def observation_cost(content: Mapping[str, Any]) -> Rows:
    added, ratio = content["added_us"], content["throughput_ratio"]
    trace = added["traced"]["median"] + content["export_us_per_traced_request"]
    line = added["access_log"]["median"] + content["write_us_per_access_line"]
    yield (
        "CPU time that a trace and a line of the access log add to a request of "
        f"{content['plain_request_us'] / 1_000:.1f} ms, and throughput relative to that without "
        f"(engines that take no time, medians of {content['rounds']} rounds)",
        f"trace {trace:.0f} µs, {ratio['traced 0.1']:.3f} at a share of 10 %; "
        f"line {line:.0f} µs, {ratio['access_log']:.3f}",
    )


def decision_log_throughput(content: Mapping[str, Any]) -> Rows:
    found = []
    for tokens, at in content["by_tokens"].items():
        ratio, added = at["throughput_ratio"], at["added_us"]["median"]
        found.append(
            f"{tokens} tokens: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}), "
            f"{added:+.0f} µs of {at['plain_request_us'] / 1_000:.1f} ms"
        )
    yield (
        "Throughput of a saturated server with the decision log relative to without, and the CPU time that "
        f"it adds to a streamed answer of so many tokens (engines that take no time, {content['rounds']} "
        f"pairs of windows of {content['seconds']:g} s)",
        "; ".join(found),
    )


def tuning_on_engines(content: Mapping[str, Any]) -> Rows:
    yield (
        f"Share of requests that met their SLO on real engines under a bad configuration, predicted for what "
        f"`tandem tune` made of it, and then measured ({content['mix']} mix, {content['seconds']:g} s each)",
        "<br>".join(
            f"{row['class']}: {row['before']:.1f} %, {row['predicted']:.1f} ± {row['error']:.1f} %, "
            f"{row['after']:.1f} %"
            for row in content["classes"]
        ),
    )


def tuning_gain(content: Mapping[str, Any]) -> Rows:
    attained, best = content["held_out"], content["best_by_hand"]
    less = content["best_by_hand_less_tuned"]
    yield (
        f"Attainment under a bad configuration, what `tandem tune` made of it, and the best one made by hand "
        f"(simulated device, held-out blocks of a log of {content['log_minutes']:g} minutes at "
        f"{content['rate']:g} requests/s, {content['seconds_of_this_run']:,} s of search)",
        f"{attained['bad']['kept']:.1f} %, {attained['tuned']['kept']:.1f} %, {attained[best]['kept']:.1f} % "
        f"({best}); best by hand less tuned {less['points']:+.1f} ± {less['error']:.1f} points",
    )


def plugin_cost(content: Mapping[str, Any]) -> Rows:
    costs = [
        f"{name} {rows['slots']['hook_median_us']:.0f} and {rows['memory']['hook_median_us']:.0f} µs"
        for name in content["slots"]
        if name != "stock" and (rows := {place: content[place][name] for place in ("slots", "memory")})
    ]
    own = (content[place]["stock"]["vllm_median_us"] / 1e3 for place in ("slots", "memory"))
    yield (
        "Median time that Tandem's orders add to one scheduling step of vLLM with 1,000 waiting requests, "
        "where slots are short (256 running) and where memory is",
        f"{', '.join(costs)}; vLLM's own step {' and '.join(f'{ms:.1f}' for ms in own)} ms",
    )


_FRONTIERS = (
    ("sharegpt", "oracle", "ShareGPT, known lengths"),
    ("sharegpt", "noisy", "ShareGPT, lengths with a lognormal error of 0.5"),
    ("humaneval", "oracle", "HumanEval-like, known lengths"),
    ("arxiv", "oracle", "arXiv, known lengths"),
)


def engine_frontier(content: Mapping[str, Any]) -> Rows:
    studies = content["studies"]
    for data, prediction, words in _FRONTIERS:
        rates, shares, seeds = [], [], 0
        for goal in (90, 60):
            if ratios := _rate_ratios(studies, data, prediction, "stock-fcfs", f"strict-{goal}%"):
                spread = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
                rates.append(f"{_ratio(spread)} at {goal} %")
                seeds = len(ratios)
            if parts := _rate_ratios(studies, data, prediction, "hindsight", f"strict-{goal}%"):
                shares.append(f"{100 * median(parts):.0f}")
        if not rates:
            continue
        best = ", ".join(filter(None, (_best_other(studies, data, prediction, goal) for goal in (90, 60))))
        hindsight = f"; {' and '.join(shares)} % of the rate with hindsight" if shares else ""
        yield (
            "Highest rate at an attainment: Tandem's engine policy relative to vLLM's FCFS, on vLLM's "
            f"scheduler (virtual time, {words})",
            f"{', '.join(rates)}, nothing rejected ({formats.several(seeds, 'seed')}); relative to the best "
            f"other policy {best}{hindsight}; "
            f"P95 wait of requests that missed their SLO at 90 %: "
            f"{_missed_wait(studies, data, 'tandem', prediction)} in the worst seed "
            f"(vLLM's FCFS {_missed_wait(studies, data, 'stock-fcfs', 'oracle')})",
        )


_OTHERS = {
    "stock-fcfs": "vLLM's FCFS",
    "stock-priority": "vLLM's priority scheduling, the shortest first",
    "apt-kv": "`apt`",
    "mc-sf": "`mc-sf`",
}


def _best_other(studies: Sequence[Mapping[str, Any]], data: str, prediction: str, goal: int) -> str | None:
    """The smallest of the median ratios to all other policies, which know the lengths."""
    found = [
        (median(ratios), min(ratios), max(ratios), words)
        for policy, words in _OTHERS.items()
        if (ratios := _rate_ratios(studies, data, prediction, policy, f"strict-{goal}%"))
    ]
    if not found:
        return None
    middle, low, high, words = min(found)
    return f"{_ratio({'median': middle, 'min': low, 'max': high})} at {goal} % ({words})"


def _missed_wait(studies: Sequence[Mapping[str, Any]], data: str, policy: str, prediction: str) -> str:
    """At the highest rate of each seed that reaches 90 %; until the run ends where no token came."""
    wanted = (data, policy, prediction)
    runs = [study for study in studies if (study["dataset"], study["policy"], study["prediction"]) == wanted]
    waits = [point["missed_wait"]["p95"] for point in points_at(runs, 0.9)]
    return f"{formats.figure(max(waits))} s" if waits else formats.ABSENT


def _rate_ratios(
    studies: Sequence[Mapping[str, Any]], data: str, prediction: str, other: str, key: str
) -> list[float]:
    """Tandem's rate over that of `other` with known lengths, on each seed that both have run."""
    rates = {
        (study["policy"], study["prediction"], study["seed"]): study["rates"][key]
        for study in studies
        if study["dataset"] == data
    }
    return [
        rate / rates[other, "oracle", seed]
        for (policy, predicted, seed), rate in rates.items()
        if (policy, predicted) == ("tandem", prediction) and (other, "oracle", seed) in rates
    ]


_FORMS = {"m0": "hidden states, restored", "m1": "half restored", "m2": "absorbed"}


def decode_cost(content: Mapping[str, Any]) -> Rows:
    taken = {form: row["ms_per_1000_tokens"] for form, row in content["forms"].items()}
    plain = taken.pop("kv")
    forms = [
        f"{_FORMS[form]} {formats.figure(ms)} ms ({formats.times(ms / plain)})" for form, ms in taken.items()
    ]
    yield (
        f"Decode-step time per 1,000 cached tokens by form of the cache ({content['model']}, "
        f"{content['dtype']}, {content['device']})",
        f"keys and values {formats.figure(plain)} ms; {', '.join(forms)}",
    )


def hidden_attainment(content: Mapping[str, Any]) -> Rows:
    gains = []
    for form, words in (("M2", "absorbed"), ("M0", "restored")):
        points = [run["of"][form]["published"] - run["of"]["KV"]["published"] for run in content["runs"]]
        gains.append(f"{words} {fmean(points):+.1f} points ({min(points):+.1f} to {max(points):+.1f})")
    yield (
        "Gain in SLO attainment, in Apt-Serve's metric, when requests may cache hidden states "
        "(vLLM's scheduler, virtual time, OPT-13B on an A100 by a roofline)",
        f"{', '.join(gains)}; {len(content['runs'])} runs",
    )


def mcsf_table(content: Mapping[str, Any]) -> Rows:
    means = {row["policy"]: row["mean_s"] for row in content["fixed_set"]}
    yield (
        "Mean latency on the published benchmark of memory-constrained scheduling (MC-SF)",
        f"Tandem {means['Tandem']:.1f} s, MC-SF {means['MC-SF']:.1f} s, vLLM's FCFS "
        f"{means['FCFS as vLLM']:.1f} s ({content['runs']} runs)",
    )


def mcsf_synthetic(content: Mapping[str, Any]) -> Rows:
    worst = max(model["to_best_known"]["tandem"]["mean"] for model in content["models"])
    yield (
        "Total latency of Tandem's round policy above the best schedule known in hindsight",
        f"{100 * (worst - 1):.1f} % ({content['instances']} instances of each of two arrival models)",
    )


def against_vllm_bench(content: Mapping[str, Any]) -> Rows:
    for run in content.get("vllm", ()):
        ratio, tokens = run["ratio"], f"{run['prompt_tokens']} + {run['output_tokens']} tokens"
        yield (
            f"Medians of our client relative to `vllm bench serve`, on one vLLM server ({tokens})",
            f"TTFT {formats.times(ratio['ttft_ms'])}, TPOT {formats.times(ratio['tpot_ms'])}",
        )
    if (known := content.get("known_delays")) is not None:
        ours, theirs = known["beyond_truth_ms"]["judge"], known["beyond_truth_ms"]["vllm_bench"]
        yield (
            "Error of either client on a server with known delays",
            f"our client TTFT {ours['ttft_ms']:+.2f} ms, TPOT {ours['tpot_ms']:+.3f} ms; `vllm bench serve` "
            f"TTFT {theirs['ttft_ms']:+.2f} ms, TPOT {theirs['tpot_ms']:+.3f} ms",
        )


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{formats.times(spread['median'])} ({spread['min']:.2f} to {spread['max']:.2f})"


QUOTES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Rows]]] = {
    "http-overhead.json": (GATE, http_overhead),
    "retry-after.json": (GATE, retry_after),
    "victims.json": (GATE, victims),
    "cancellation.json": (GATE, cancellation),
    "live-feed.json": (GATE, live_feed),
    "observation-cost.json": (GATE, observation_cost),
    "decision-log-throughput.json": (GATE, decision_log_throughput),
    "tuning-gain.json": (GATE, tuning_gain),
    "tuning-on-engines.json": (GATE, tuning_on_engines),
    "overload-10x.json": (FAULTS, fault_rows.new_connections),
    "hostile-input.json": (FAULTS, fault_rows.hostile_input),
    "soak.json": (FAULTS, fault_rows.soak),
    "virtual-day.json": (FAULTS, fault_rows.virtual_day),
    "engine-frontier.json": (ENGINE, engine_frontier),
    "plugin-cost.json": (ENGINE, plugin_cost),
    "collocation.json": (COLLOCATION, collocation_rows.interference),
    "embedding-throughput.json": (COLLOCATION, collocation_rows.embedding_throughput),
    "collocated-mix.json": (COLLOCATION, collocation_rows.simulated_mix),
    "embed-many.json": (COLLOCATION, collocation_rows.bulk_embedding),
    "prediction.json": (PREDICTION, prediction_rows.output_length),
    "prediction-goodput.json": (PREDICTION, prediction_rows.prediction_goodput),
    "ttft-forecast.json": (PREDICTION, prediction_rows.ttft_forecast),
    "fleet-retries.json": (FLEET, fleet_rows.retries),
    "fleet-conversations.json": (FLEET, fleet_rows.conversations),
    "fleet-autoscaling.json": (FLEET, fleet_rows.autoscaling),
    "fleet-kinds.json": (FLEET, fleet_rows.kinds),
    "fleet-accuracy*.json": (FLEET, fleet_rows.accuracy),
    "fleet-order.json": (FLEET, fleet_rows.order),
    "fleet-scale.json": (FLEET, fleet_rows.scale),
    "fleet-report-cost.json": (FLEET, fleet_rows.report_cost),
    "fleet-ray-latency.json": (FLEET, fleet_rows.ray_latency),
    "fleet-retry-storms.json": (FLEET, fleet_rows.retry_storms),
    "fleet-fairness.json": (FLEET, fleet_rows.fairness),
    "hybrid-cost-*.json": (HIDDEN_CACHE, decode_cost),
    "hybrid-attainment.json": (HIDDEN_CACHE, hidden_attainment),
    "mcsf-table.json": (ROUND_MODEL, mcsf_table),
    "mcsf-synthetic.json": (ROUND_MODEL, mcsf_synthetic),
    "against-vllm-bench.json": (CLIENT, against_vllm_bench),
}
"""Heading and quotes by the name of a results file."""

IN_README = ("engine-frontier.json", "retry-after.json", "prediction.json", "http-overhead.json")
"""README.md quotes the first row of each, after the experiments on real engines."""
TABLES: Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], str]]] = {
    "fault-suite.json": (FAULTS, fault_rows.fault_table),
}
"""Heading and table by the name of a results file that has one of its own."""
