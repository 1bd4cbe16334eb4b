"""Under what conditions does the finding hold? Objectives, systems, machine, versions, seeds."""

from benchmark_control_plane.report import aggregates, formats, tables
from benchmark_control_plane.report.html import Markup, el, join, section
from benchmark_control_plane.report.schema import Results

_OBJECTIVES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "e2e"}
_WORDS = {
    "Attainment": "Requests that met every objective of their class, of all that were offered after "
    "the warm-up.",
    "Highest rate": "The highest offered rate at which attainment stays at the target. Requests that were "
    "turned away count as missed.",
    "Goodput": "Requests per second that met their objective, under a given load.",
    "Rejected, evicted": "Never accepted; accepted, then dropped by the system. Aborted: the client left.",
    "Time to first token": "Counted from the instant the request was due, so a generator that falls behind "
    "hides nothing.",
    "Not valid": "The load generator lagged or the run broke off: it measured something else than was asked.",
}


def set_up(results: Results) -> Markup:
    systems = [
        [tables.named(number, system["name"]), system["kind"], system["description"]]
        for number, system in enumerate(results["systems"])
    ]
    return section(
        "set-up",
        "Set-up",
        None,
        _objectives(results),
        tables.table("Systems", ["system", "kind", "what it is"], systems),
        _sweeps(results),
        tables.table("When, where, with what", ["what", "value"], _conditions(results)),
        el("details", el("summary", "Every run"), tables.runs_table(results)),
        el(
            "details",
            el("summary", "The experiment's file"),
            el("pre", results["experiment"]["yaml"], tabindex="0"),
        ),
    )


def _objectives(results: Results) -> Markup:
    """Each with what the latency is of a request that is alone, where that was measured."""
    alone = results.get("unloaded_ms", {})

    def cell(name: str, metric: str) -> str:
        bound, unloaded = results["slos"][name].get(metric), alone.get(name, {}).get(metric)
        if unloaded is None:
            return formats.milliseconds(bound)
        return f"{formats.milliseconds(bound)} (alone {formats.milliseconds(unloaded)})"

    rows = [[name, *(cell(name, metric) for metric in _OBJECTIVES)] for name in results["slos"]]
    return tables.table("Objectives by class", ["class", *_OBJECTIVES.values()], rows)


def _sweeps(results: Results) -> Markup | None:
    rows = [
        [sweep["system"], formats.load(sweep["load"]), name, formats.share(kept), chosen]
        for sweep in results.get("sweeps", [])
        for name, kept in sweep["attainment"].items()
        for chosen in ("chosen" if name == sweep["chosen"] else "",)
    ]
    if not rows:
        return None
    head = ["system", "load", "form", "attained", "the best runs"]
    return tables.table("Forms that were tried first, on a seed of their own", head, rows)


def _conditions(results: Results) -> list[list[str]]:
    environment = results["environment"]
    return [
        ["started", results["started"]],
        ["100 % load", formats.rate(results.get("capacity_rps"))],
        ["seeds", ", ".join(map(str, aggregates.seeds(results))) or formats.ABSENT],
        ["commit", environment["commit"] or formats.ABSENT],
        ["machine", f"{environment['cpu']}, {environment['cores']} cores, {environment['platform']}"],
        *([["GPU", environment["gpu"]]] if "gpu" in environment else []),
        ["Python", environment["python"]],
        *([name, version] for name, version in sorted(environment["versions"].items())),
    ]


def words() -> Markup:
    listed = (join(el("dt", name), el("dd", meaning)) for name, meaning in _WORDS.items())
    return section("words", "How to read this", None, el("dl", *listed, class_="words"))
