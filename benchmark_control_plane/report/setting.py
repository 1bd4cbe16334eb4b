"""Under what conditions does the finding hold? Objectives, systems, machine, versions, seeds."""

from collections.abc import Sequence

from benchmark_control_plane.report import blocks, facts, tables, wording
from benchmark_control_plane.report.markup import Markup, el, join
from benchmark_control_plane.report.schema import Results

_OBJECTIVES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "max_tbt_ms": "longest gap", "e2e_ms": "e2e"}
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
    environment = results["environment"]
    conditions: Sequence[Sequence[str]] = [
        ["started", results["started"]],
        ["seeds", ", ".join(map(str, facts.seeds(results))) or wording.ABSENT],
        ["commit", environment["commit"] or wording.ABSENT],
        ["machine", f"{environment['cpu']}, {environment['cores']} cores, {environment['platform']}"],
        ["Python", environment["python"]],
        *([name, version] for name, version in sorted(environment["versions"].items())),
    ]
    objectives = [
        [name, *(wording.milliseconds(slo.get(key)) for key in _OBJECTIVES)]
        for name, slo in results["slos"].items()
    ]
    systems = [
        [tables.named(number, system["name"]), system["kind"], system["description"]]
        for number, system in enumerate(results["systems"])
    ]
    return blocks.section(
        "set-up",
        "Set-up",
        None,
        tables.table("Objectives by class", ["class", *_OBJECTIVES.values()], objectives),
        tables.table("Systems", ["system", "kind", "what it is"], systems),
        tables.table("When, where, with what", ["", ""], conditions),
        el("details", el("summary", "Every run"), tables.runs_table(results)),
        el(
            "details",
            el("summary", "The experiment's file"),
            el("pre", results["experiment"]["yaml"], tabindex="0"),
        ),
    )


def words() -> Markup:
    listed = (join(el("dt", name), el("dd", meaning)) for name, meaning in _WORDS.items())
    return blocks.section("words", "How to read this", None, el("dl", *listed, class_="words"))
