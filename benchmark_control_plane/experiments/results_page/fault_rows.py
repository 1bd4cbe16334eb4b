"""Quotes of the fault suite, of overload by new connections and of hostile bodies for the results page."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmark_control_plane.experiments.faults.trial import HEALTH_WITHIN_MS, MOST_GROWTH_MB
from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table, wrapped
from benchmark_control_plane.report import formats

Rows = Iterator[tuple[str, str]]


def fault_table(content: Mapping[str, Any], link: str) -> str:
    """A table with one line for each fault: the worst of the times of its trials.

    Faults without a figure are named below it, as are requests that were lost and memory that stayed held.
    """
    trials: dict[str, list[Mapping[str, Any]]] = {}
    for trial in content["trials"]:
        trials.setdefault(trial["row"], []).append(trial)
    head = [
        "fault under load", "MB more, at most", "MB more after", "`/ready` 503 after", "200 again after",
        "`/health` on its own port", "on the API's", "chat of another tenant",
    ]  # fmt: skip
    rows = {row: list(_fault_cells(found)) for row, found in trials.items()}
    without = [row for row, cells in rows.items() if set(cells) == {formats.ABSENT}]
    lines = markdown_table(head, ([row, *cells] for row, cells in rows.items() if row not in without))
    found = content["trials"]
    slow = sum(bool(trial["slow"]) for trial in found)
    broken = sum(bool(trial["failures"]) for trial in found)
    each = formats.spread(*(extreme(len(runs) for runs in trials.values()) for extreme in (min, max)))
    remarks = (
        f"{each} runs of each fault; waits are the longest. In {slow} of {len(found)} runs `/health` waited "
        f"longer than {HEALTH_WITHIN_MS:.0f} ms on its own port, or memory grew by more than "
        f"{MOST_GROWTH_MB:.0f} MB; in {broken} another claim did not hold. Lost requests: "
        f"{_lost(trials)}. Memory still held after: {_held(trials)}. "
        f"The requests ended as {_endings(found)}."
    )
    if without:
        remarks += f" Without load: {', '.join(without)}."
    return "\n".join([*lines, wrapped(f"{remarks} ({link}.)"), ""])


def _lost(trials: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Of all requests, and by fault."""
    sent = sum(trial["sent"] for found in trials.values() for trial in found)
    by_fault = {row: sum(trial["lost"] for trial in found) for row, found in trials.items()}
    named = [f"{row} {lost}" for row, lost in by_fault.items() if lost]
    stated = f" ({', '.join(named)})" if named else ""
    return f"{sum(by_fault.values())} of {sent:,}{stated}"


def _held(trials: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The most bytes after each fault that left some."""
    most = {row: max(trial["after"]["held_bytes"] or 0 for trial in found) for row, found in trials.items()}
    named = [f"{row} {held:,.0f} bytes" for row, held in most.items() if held]
    return ", ".join(named) or "none"


def _fault_cells(trials: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    def worst(values: Iterable[float | None], unit: str) -> str:
        known = [value for value in values if value is not None]
        return f"{formats.figure(max(known))} {unit}".strip() if known else formats.ABSENT

    after, sent = [trial["after"] for trial in trials], sum(trial["sent"] for trial in trials)
    for key in ("peak_growth_mb", "growth_mb"):
        yield worst((state[key] for state in after), "")
    for key in ("not_ready_s", "back_s"):
        yield worst((trial[key] for trial in trials), "s")
    for key in ("health_port_ms", "health_ms", "other_chat_ms"):
        yield worst((trial[key] for trial in trials), "ms") if sent else formats.ABSENT


def _endings(trials: Sequence[Mapping[str, Any]]) -> str:
    """How the requests of the load ended, the most frequent first."""
    endings: Counter[str] = Counter()
    for trial in trials:
        endings.update(trial["endings"])
    return ", ".join(f"{how} {times:,}" for how, times in endings.most_common())


def new_connections(content: Mapping[str, Any]) -> Rows:
    for found in content["rates"]:
        times = found["rate"] / content["capacity_rps"]
        kind = "Kept-alive" if found.get("keeps_alive") else "New"
        in_time = found["client_in_time"] * found["rate"]
        yield (
            f"{kind} connections at {times:g} times the capacity for {content['seconds']:g} s (simulated "
            f"engine of {content['capacity_rps']:g} requests/s)",
            f"{formats.share(found['answered_in_2_s'])} answered or rejected within 2 s, "
            f"{found['unanswered']} of {found['sent']:,} without an answer within 15 s, in time "
            f"{formats.share(found['client_in_time'])} ({in_time:.0f}/s) by the client and "
            f"{formats.share(found['metrics_in_time'])} by the metrics; `/health` on its own port P99 "
            f"{found['health_port_ms']['p99']:.0f} ms, longest {found['health_port_ms']['max']:.0f} ms; the "
            f"server had {found['server_cores']:g} of a core",
        )


def hostile_input(content: Mapping[str, Any]) -> Rows:
    attacks = [attack for attack in content["attacks"] if attack["name"] != "harmless"]
    kinds = len({attack["name"] for attack in attacks})
    for key, words, unit in (
        ("reply_s", "time from the last byte to the reply, sent alone", "s"),
        ("health_port_wait_ms", "wait of `/health` on its own port", "ms"),
        ("health_wait_ms", "wait of `/health` on the port of the API", "ms"),
        ("peak_growth_mb", "growth of memory meanwhile", "MB"),
        ("growth_mb", "growth of memory after", "MB"),
    ):
        found = sorted((attack[key], attack["name"]) for attack in attacks)
        middle, (most, name) = median(value for value, _ in found), found[-1]
        yield (
            f"{content['senders']} senders of each of {kinds} hostile requests: {words}",
            f"median {formats.figure(middle)} {unit}, most {formats.figure(most)} {unit} ({name})",
        )
    broken: Counter[str] = Counter()
    for attack in attacks:
        broken.update(attack["not_held"])
    yield (
        f"{content['senders']} senders of each of {kinds} hostile requests: attacks that broke a limit",
        f"{', '.join(f'{claim}: {times}' for claim, times in broken.most_common()) or 'none'}, of "
        f"{len(attacks)} attacks",
    )


def soak(content: Mapping[str, Any]) -> Rows:
    """One row on what the processes keep under constant load."""
    grown = [
        f"{name} {slope:+.1f} MB/h ({content['kept_mb'][name][0]:.0f} MB in the first minutes, "
        f"{content['kept_mb'][name][-1]:.0f} in the last)"
        for name, slope in content["slopes_mb_per_hour"].items()
    ]
    yield (
        f"{content['minutes']:g} minutes at {content['rate']:g} requests/s, a sixth of the clients leaving "
        "within their answer: growth of each process after it has settled",
        f"{', '.join(grown)}; {content['lost']} of {sum(content['endings'].values()):,} requests lost, "
        f"{content['open_requests']:g} open at the end",
    )


def virtual_day(content: Mapping[str, Any]) -> Rows:
    """One row on what the service keeps under traffic of hours, in virtual time."""
    first = content["settling"]
    yield (
        f"{content['hours']} virtual hours at {content['rate']:g} requests/s with a reader of the live feed: "
        f"growth after {first} hours",
        f"{content['objects_per_hour']:+,.0f} Python objects per hour ({content['objects'][first]:,} to "
        f"{content['objects'][-1]:,}), {content['resident_mb_per_hour']:+.2f} MB/h "
        f"({content['resident_mb'][first]:.0f} to {content['resident_mb'][-1]:.0f} MB); "
        f"{content['requests']:,} requests",
    )
