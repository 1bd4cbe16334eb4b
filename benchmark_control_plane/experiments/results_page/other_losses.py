"""What Tandem is behind in, of results that are no experiment of `tandem bench run`, with the reason.

Each function reads one results file and yields (where, by how much, against, reason). A cell that was lost
and is not known to any of them is not listed, so a new kind of result needs one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmark_control_plane.report import formats

Losses = Iterator[tuple[str, str, str, str]]

_TWO_CHOICES = (
    "two boxes are compared, which leaves boxes unequal where all are nearly full "
    "([fleet](fleet.md#what-the-studies-found))"
)
_ROUTERS_APART = (
    "a router does not know what the others have sent since the last report "
    "([fleet](fleet.md#what-the-studies-found))"
)
_REASONS = {
    "recorded code completions": "arrivals in bursts of milliseconds at this scale; not shown",
}
_STALE_S = 1.0


def policies(content: Mapping[str, Any]) -> Losses:
    """Of each condition the best of the other policies, if it is ahead; one without reports is in all."""
    key = next(name for name in ("cell", "period", "router_lost") if name in content["rows"][0])
    for value in dict.fromkeys(row[key] for row in content["rows"]):
        found = {row["policy"]: row for row in content["rows"] if row[key] in (value, None)}
        if (own := found.pop("TANDEM", None)) is None:
            continue
        best = max(found.values(), key=lambda row: float(row["met_percent"]))
        if (points := own["met_percent"] - best["met_percent"]) >= 0:
            continue
        reason = _REASONS.get(value, _TWO_CHOICES)
        if -points < max(own["met_spread"], best["met_spread"]):
            reason = "less than the range of the seeds"
        elif key == "period" and value >= _STALE_S:
            reason = _ROUTERS_APART
        where = f"routing on {content['boxes'][0]} simulated boxes, {_condition(key, value, content)}"
        yield where, f"{points:+.1f} points", best["policy"].replace("_", " ").lower(), reason


def _condition(key: str, value: object, content: Mapping[str, Any]) -> str:
    if key == "cell":
        return str(value)
    routers = "one of four routers lost" if value else "four routers"
    what = f"reports every {value:g} s" if key == "period" else routers
    return f"{content['rate_per_box']:g} requests/s, {what}"


def second_try(content: Mapping[str, Any]) -> Losses:
    met = {(row["rate_per_box"], row["retries"]): row["met_percent"] for row in content["rows"]}
    for rate in dict.fromkeys(rate for rate, _ in met):
        if (points := met[rate, True] - met[rate, False]) < 0:
            yield (
                f"second try after a refusal, {rate:g} requests/s and box", f"{points:+.2f} points",
                "no second try",
                "within the range of the seeds; kept for boxes that refuse while others have room",
            )  # fmt: skip


def interference(content: Mapping[str, Any]) -> Losses:
    for key, cell in content.items():
        if not key.startswith("chat_"):
            continue
        own, pair = (cell[name]["burst_attainment"] for name in ("tandem", "naive"))
        if own < pair:
            tpot = formats.times(cell["tandem_over_naive"]["p99_tpot_ms"])
            yield (
                f"bursts of passages in time beside chat at {key.split('_')[1]}/s",
                f"{100 * (own - pair):+.1f} points", "two independent servers",
                f"passes wait for decode steps; chat has {tpot} the pair's P99 TPOT",
            )  # fmt: skip


def embedding_throughput(content: Mapping[str, Any]) -> Losses:
    for texts in ("queries", "passages"):
        if (ratio := content[texts]["ratios"]["tandem_http_over_encode"]) < 1:
            yield (
                f"throughput on {texts} over HTTP", formats.times(ratio), "`encode` on all texts at once",
                f"a request for each text, by {content['clients']} clients; the engine alone has "
                f"{formats.times(content[texts]['ratios']['engine_over_encode'])}",
            )  # fmt: skip


def simulated_mix(content: Mapping[str, Any]) -> Losses:
    policies = content["summary"]["policies"]
    own, free = policies["dynamic"]["both"], policies["no quota"]
    if own < free["both"]:
        yield (
            "adaptive quotas, mean of 45 mixes and loads", f"{100 * (own - free['both']):+.1f} points",
            "no quotas", f"without them {free['failed_batches']:,} batches failed for lack of memory",
        )  # fmt: skip


def output_length(content: Mapping[str, Any]) -> Losses:
    for name, methods in content["separate"].items():
        others = {key: each["pinball"] for key, each in methods.items() if not key.startswith("learned")}
        best = min(others, key=others.__getitem__)
        if (ratio := methods["learned"]["pinball"] / others[best]) >= 1.005:
            yield f"pinball loss of output lengths, {name} alone", formats.times(ratio), best, "not examined"


LOSSES: Mapping[str, Callable[[Mapping[str, Any]], Losses]] = {
    "fleet-policies.json": policies,
    "fleet-staleness.json": policies,
    "fleet-staleness-90.json": policies,
    "fleet-router-lost.json": policies,
    "fleet-traces.json": policies,
    "fleet-retries.json": second_try,
    "collocation.json": interference,
    "embedding-throughput.json": embedding_throughput,
    "collocated-mix.json": simulated_mix,
    "prediction.json": output_length,
}
"""By the name of a results file."""
