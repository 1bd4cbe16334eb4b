"""Quotes of the fault suite, of overload by new connections and of hostile bodies for docs/results.md."""

from collections import Counter
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

    after = [trial["after"] for trial in trials]
    # Earlier results state the memory of the server without its children, and no limits.
    has_limits = all("slow" in trial for trial in trials)
    if sent := sum(trial["sent"] for trial in trials):
        yield f"{sum(trial['lost'] for trial in trials)} of {sent:,} requests lost"
        yield f"endings {_endings(trials)}"
    if all(state["held_bytes"] is not None for state in after):
        yield f"{sum(state['held_bytes'] for state in after):,.0f} bytes held after"
        if has_limits:
            yield f"memory of all processes {_most(after, 'peak_growth_mb')} MB at most"
            yield f"{_most(after, 'growth_mb')} MB after"
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
    if has_limits:
        yield f"{sum(bool(trial['slow']) for trial in trials)} with a wait or memory above its limit"


def _most(states: Sequence[Mapping[str, Any]], key: str) -> str:
    return f"{max(state[key] for state in states):+,.0f}"


def _endings(trials: Sequence[Mapping[str, Any]]) -> str:
    """How the requests of the load ended, the most frequent first."""
    endings: Counter[str] = Counter()
    for trial in trials:
        endings.update(trial["endings"])
    return " ".join(f"{how} {times:,}" for how, times in endings.most_common())


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
        f"{content['senders']} senders of each of {kinds} hostile requests: what does not hold",
        ", ".join(f"{claim} {times}" for claim, times in broken.most_common())
        + f"{'; ' if broken else 'nothing '}in {len(attacks)} attacks",
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
