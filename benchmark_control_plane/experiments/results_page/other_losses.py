"""What Tandem is behind in, of results that are not compared load by load, with the reason.

Each function reads one results file. A cell that was lost and is not known to any of them is not listed, so a
new kind of result needs one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table
from benchmark_control_plane.experiments.results_page.fleet_tables import rate_of
from benchmark_control_plane.report import formats


class Loss(NamedTuple):
    """One cell that another system is ahead in.

    Attributes:
        subject: what was measured.
        where: under which condition; empty if there is one only.
        points: difference in points, negative; None for another figure.
        size: the difference as a text.
        against: the system that is ahead.
        reason: why.
    """

    subject: str
    where: str
    points: float | None
    size: str
    against: str
    reason: str


Losses = Iterator[Loss]

_TWO_CHOICES = (
    "two boxes are compared, which leaves boxes unequal where all are nearly full "
    "([fleet](fleet.md#what-the-studies-found))"
)
_ROUTERS_APART = (
    "a router does not know what the others have sent since the last report "
    "([fleet](fleet.md#what-the-studies-found))"
)
_HOMES_LEFT = (
    "a session leaves a box that is busier than others, so less of its prompt is found in a cache "
    "([0081](decisions/0081-sessions-have-homes.md))"
)
_HOMES_USELESS = (
    "a session returns to its box although nothing of its prompt is in the cache there "
    "([0081](decisions/0081-sessions-have-homes.md))"
)
_REASONS = {
    "recorded code completions": (
        "a router predicts the time to the first token, and what is missed is the time per token: answers "
        "of 13 tokens (median) decode beside prompts of 2,000 ([fleet](fleet.md#what-the-studies-found))"
    ),
    "recorded answers over passages, with the prefixes of the recording": (
        "at most five prefixes are in use at a time, so that every box has them; named, they go to two "
        "boxes each ([fleet](fleet.md#what-the-studies-found))"
    ),
}
_STALE_S = 1.0


def policies(content: Mapping[str, Any]) -> Losses:
    """Of each condition the best of the other policies, if it is ahead; one without reports is in all."""
    key = next(name for name in ("cell", "period", "router_lost") if name in content["rows"][0])
    for value, routers in dict.fromkeys((row[key], row.get("routers")) for row in content["rows"]):
        found = {
            row["policy"]: row
            for row in content["rows"]
            if row[key] in (value, None) and row.get("routers") == routers
        }
        if (own := found.pop("TANDEM", None)) is None:
            continue
        best = max(found.values(), key=lambda row: float(row["met_percent"]))
        if (points := own["met_percent"] - best["met_percent"]) >= 0:
            continue
        reason = _REASONS.get(value, _TWO_CHOICES)
        if value not in _REASONS and "cached_percent" in own:
            reason = _HOMES_LEFT if best["cached_percent"] > own["cached_percent"] else _HOMES_USELESS
        if -points < max(own["met_spread"], best["met_spread"]):
            reason = "less than the range of the seeds"
        elif key == "period" and value >= _STALE_S:
            reason = _ROUTERS_APART
        where = f"{content['boxes'][0]} boxes at {rate_of(content, value):g}/s, {_condition(key, value)}"
        if routers is not None:
            where += f", {routers} router{'s' * (routers > 1)}"
        against = best["policy"].replace("_", " ").lower()
        yield Loss("routing on simulated boxes", where, points, f"{points:+.1f}", against, reason)


def _condition(key: str, value: object) -> str:
    if key == "cell":
        return str(value)
    routers = "one of four routers lost" if value else "four routers"
    return f"reports every {value:g} s" if key == "period" else routers


def second_try(content: Mapping[str, Any]) -> Losses:
    met = {(row["rate_per_box"], row["retries"]): row["met_percent"] for row in content["rows"]}
    for rate in dict.fromkeys(rate for rate, _ in met):
        if (points := met[rate, True] - met[rate, False]) < 0:
            yield Loss(
                "second try after a refusal", f"{rate:g} requests/s and box", points, f"{points:+.2f}",
                "no second try",
                "within the range of the seeds; kept for boxes that refuse while others have room",
            )  # fmt: skip


def interference(content: Mapping[str, Any]) -> Losses:
    for key, cell in content.items():
        if not key.startswith("chat_"):
            continue
        own, pair = (cell[name]["burst_attainment"] for name in ("tandem", "naive"))
        if own < pair:
            points = 100 * (own - pair)
            chats, pair_chats = (formats.share(cell[name]["chat_attainment"]) for name in ("tandem", "naive"))
            yield Loss(
                "bursts of passages in time", f"beside chat at {key.split('_')[1]}/s", points,
                f"{points:+.1f}", "two independent servers",
                f"chat has more weight: {chats} of it met its SLO, of the pair's {pair_chats}",
            )  # fmt: skip


def embedding_throughput(content: Mapping[str, Any]) -> Losses:
    for texts in ("queries", "passages"):
        if (ratio := content[texts]["ratios"]["tandem_http_over_encode"]) < 1:
            yield Loss(
                f"throughput on {texts} over HTTP", "", None, formats.times(ratio),
                "`encode` on all texts at once",
                f"a request for each text, by {content['clients']} clients; the engine alone has "
                f"{formats.times(content[texts]['ratios']['engine_over_encode'])}",
            )  # fmt: skip


def simulated_mix(content: Mapping[str, Any]) -> Losses:
    policies = content["summary"]["policies"]
    own, free = policies["dynamic"]["both"], policies["no quota"]
    if own < free["both"]:
        points = 100 * (own - free["both"])
        yield Loss(
            "adaptive quotas, mean of 45 mixes and loads", "", points, f"{points:+.1f}",
            "no quotas", f"without them {free['failed_batches']:,} batches failed for lack of memory",
        )  # fmt: skip


def output_length(content: Mapping[str, Any]) -> Losses:
    for name, methods in content["separate"].items():
        others = {key: each["pinball"] for key, each in methods.items() if not key.startswith("learned")}
        best = min(others, key=others.__getitem__)
        if (ratio := methods["learned"]["pinball"] / others[best]) >= 1.005:
            yield Loss(
                "pinball loss of output lengths", f"{name} alone", None, formats.times(ratio), best,
                "not examined",
            )  # fmt: skip


_LOADS = {"half": "at half of vLLM's rate", "nine_tenths": "at 90 % of it", "saturated": "saturated"}
_RATIOS = (("median_ttft_ratio", "TTFT"), ("median_tpot_ratio", "TPOT"), ("throughput_ratio", "throughput"))


def http_overhead(content: Mapping[str, Any]) -> Losses:
    """Times above those of vLLM's own server and throughput below, by what two digits show."""
    for load, words in _LOADS.items():
        for key, name in _RATIOS:
            found = content["server_ratios"][load][key]
            ratio = round(found["median"], 2)
            if ratio < 1 if key == "throughput_ratio" else ratio > 1:
                is_open = found["min"] < 1 < found["max"]
                yield Loss(
                    "a tiny model's server", f"{name} {words}", None, formats.times(found["median"]),
                    "vLLM's own server",
                    "either is ahead in some of the runs" if is_open else "not examined",
                )  # fmt: skip


_WORKFLOW_ARRIVALS = {
    "workflow": "Poisson arrivals", "workflow-engines": "real engines", "workflow-trace": "RAGPulse",
}  # fmt: skip


def workflows(content: Mapping[str, Any]) -> Losses:
    """Workflows kept with what the Python client states, against the best of budgets and baselines."""
    own = next(each["name"] for each in content["systems"] if "answer()" in each["description"])
    rivals = [
        each["name"]
        for each in content["systems"]
        if each["kind"] == "baseline" or each["name"].startswith("budgets")
    ]
    arrivals = _WORKFLOW_ARRIVALS[content["experiment"]["name"]]
    for load in sorted({run["load"] for run in content["runs"]}):
        kept: dict[str, dict[int, float]] = {}
        for run in content["runs"]:
            if run["load"] == load and run["valid"]:
                kept.setdefault(run["system"], {})[run["seed"]] = run["attainment"]["answers"]
        if own not in kept or not (others := [name for name in rivals if name in kept]):
            continue
        best = max(others, key=lambda name: fmean(kept[name].values()))
        if (points := 100 * (fmean(kept[own].values()) - fmean(kept[best].values()))) <= -0.05:
            seeds = kept[own].keys() & kept[best].keys()
            ahead = sum(kept[own][seed] > kept[best][seed] for seed in seeds)
            known = "; the best budgets are known only afterwards" if "budgets" in best else ""
            yield Loss(
                f"workflows kept with {own}", f"{arrivals}, {formats.load(load)} load", points,
                f"{points:+.1f}", best, f"ahead on {ahead} of {len(seeds)} seeds{known}",
            )  # fmt: skip


LOSSES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Losses]]] = {
    "fleet-policies.json": ("component-results.md#fleet", policies),
    "fleet-staleness.json": ("component-results.md#fleet", policies),
    "fleet-staleness-90.json": ("component-results.md#fleet", policies),
    "fleet-router-lost.json": ("component-results.md#fleet", policies),
    "fleet-traces.json": ("component-results.md#fleet", policies),
    "fleet-conversations.json": ("component-results.md#fleet", policies),
    "fleet-retries.json": ("component-results.md#fleet", second_try),
    "collocation.json": ("component-results.md#collocation", interference),
    "embedding-throughput.json": ("component-results.md#collocation", embedding_throughput),
    "collocated-mix.json": ("component-results.md#collocation", simulated_mix),
    "prediction.json": ("component-results.md#prediction", output_length),
    "http-overhead.json": ("component-results.md#gate", http_overhead),
    "workflow.json": ("#workflow", workflows),
    "workflow-engines.json": ("#workflow-engines", workflows),
    "workflow-trace.json": ("#workflow-trace", workflows),
}
"""Section and losses by the name of a results file."""


def table(losses: Iterable[Loss]) -> list[str]:
    """The cells of one subject with the same reason in a row, the largest difference in points first."""
    rows: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        rows.setdefault((loss.subject, loss.reason), []).append(loss)
    worst_first = sorted(
        rows.values(), key=lambda found: min(0.0 if loss.points is None else loss.points for loss in found)
    )
    lines = ([found[0].subject, _cells(found), found[0].reason] for found in worst_first)
    return markdown_table(["what", "by how much: points, or a ratio", "reason"], lines, has_texts=True)


def _cells(found: Iterable[Loss]) -> str:
    """Condition, difference and system of each; a system, or what its conditions begin with, only once."""
    by_system: dict[str, list[str]] = {}
    before: dict[str, str] = {}
    for loss in found:
        first, _, rest = loss.where.partition(", ")
        where = rest if rest and first == before.get(loss.against) else loss.where
        before[loss.against] = first
        by_system.setdefault(loss.against, []).append(f"{where}: {loss.size}" if where else loss.size)
    return "; ".join(f"{', '.join(sizes)} against {against}" for against, sizes in by_system.items())
