"""Quotes of the fault suite, of overload by new connections and of hostile bodies for docs/results.md."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmark_control_plane.report import formats

Rows = Iterator[tuple[str, str]]


def fault_suite(content: Mapping[str, Any]) -> Rows:
    trials: dict[str, list[Mapping[str, Any]]] = {}
    for trial in content["trials"]:
        trials.setdefault(trial["row"], []).append(trial)
    for row, found in trials.items():
        yield f"Fault under load: {row}", ", ".join(_fault_facts(found))


def _fault_facts(trials: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the trials of one fault showed: the sums, and the worst of the times."""

    def worst(key: str) -> float | None:
        return max((trial[key] for trial in trials if trial[key] is not None), default=None)

    if sent := sum(trial["sent"] for trial in trials):
        yield f"{sum(trial['lost'] for trial in trials)} of {sent:,} requests lost"
    if all(trial["after"]["held_bytes"] is not None for trial in trials):
        held = sum(trial["after"]["held_bytes"] for trial in trials)
        yield f"{held:,.0f} bytes held after"
    if (down := worst("not_ready_s")) is not None:
        yield f"`/ready` 503 after {formats.figure(down)} s"
    if (back := worst("back_s")) is not None:
        yield f"200 again {formats.figure(back)} s later"
    if (status := trials[0]["exit_status"]) is not None:
        yield f"exit status {status}"
    if sent:
        yield f"longest wait of `/health` {worst('health_port_ms'):.0f} ms on its own port"
        yield f"{worst('health_ms'):.0f} ms on the other"
        yield f"of another tenant's chat {worst('other_chat_ms'):,.0f} ms"
    failed = sum(bool(trial["failures"]) for trial in trials)
    yield f"{formats.several(len(trials), 'run')}, {failed} with a claim that does not hold"


def new_connections(content: Mapping[str, Any]) -> Rows:
    for found in content["rates"]:
        times = found["rate"] / content["capacity_rps"]
        yield (
            f"New connections at {times:g} times the capacity for {content['seconds']:g} s (simulated engine "
            "of 100 requests/s)",
            f"{formats.share(found['answered_in_2_s'])} answered or rejected within 2 s, "
            f"{found['unanswered']} of {found['sent']:,} without an answer within 15 s, in time "
            f"{formats.share(found['client_in_time'])} by the client and "
            f"{formats.share(found['metrics_in_time'])} by the metrics; `/health` on its own port P99 "
            f"{found['health_port_ms']['p99']:.0f} ms, longest {found['health_port_ms']['max']:.0f} ms; the "
            f"server had {found['server_cores']:g} of a core",
        )


def hostile_input(content: Mapping[str, Any]) -> Rows:
    bodies = [body for body in content["bodies"] if body["name"] != "harmless"]
    for key, words, unit in (
        ("reply_s", "time to the reply", "s"),
        ("health_port_wait_ms", "wait of `/health` on its own port", "ms"),
        ("health_wait_ms", "wait of `/health` on the port of the API", "ms"),
        ("other_wait_ms", "wait of another tenant's embedding", "ms"),
        ("peak_growth_mb", "growth of memory meanwhile", "MB"),
        ("growth_mb", "growth of memory after", "MB"),
    ):
        found = sorted((body[key], body["name"]) for body in bodies)
        middle, (most, name) = median(value for value, _ in found), found[-1]
        yield (
            f"{content['senders']} senders of each of {len(bodies)} hostile bodies at once: {words}",
            f"median {formats.figure(middle)} {unit}, most {formats.figure(most)} {unit} ({name})",
        )
