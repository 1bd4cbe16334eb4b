"""The command `tandem replay LOG [--config FILE] [--json]`."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import (
    RecordedTraffic,
    read_traffic,
    served_sections,
)
from benchmark_control_plane.decision_replay.replay_limits import cautions
from benchmark_control_plane.decision_replay.replayed_requests import Group, RequestResult
from benchmark_control_plane.decision_replay.self_check import (
    LEAST_JUDGED,
    CheckedFigure,
    SelfCheck,
    check_replay,
)
from benchmark_control_plane.decision_replay.what_if import ClassChange, WhatIf, predict
from controlplane.commands.exit_status import ExitStatus
from controlplane.config import Config, ConfigError, load
from controlplane.config.packaged import config_path
from controlplane.config.redacted import redacted_values
from controlplane.core.engine_reports import DeviceSharing
from controlplane.service.decision_log.decision_log import read_salt, tenant_hash


def replay_log(log: Path, config: Path | None, *, is_json: bool) -> int:
    """Checks the replay of a log, and with `config` predicts that configuration.

    Returns 0, or 3 if the replay does not reproduce the log; then nothing is predicted. Raises BadInput or
    ConfigError.
    """
    traffic = read_traffic(log)
    wanted = None if config is None else load(config_path(config))
    other = None if wanted is None else sections_for(traffic, log, wanted, source=str(config))
    _note("replaying the first half for what the log does not state of machine and host")
    traffic = with_host_delays(traffic)
    _note(f"replaying {len(traffic.rows):,} requests under the configuration of the log")
    check = check_replay(traffic)
    answer = None
    limits: Sequence[str] = ()
    if wanted is not None and other is not None and check.has_passed:
        limits = cautions(traffic, wanted)
        try:
            answer = predict(traffic, check, other, note=_note)
        except ConfigError as error:
            raise BadInput(f"{config}: the server refuses it on the machine of the log: {error}") from error
    if is_json:
        facts = {"what_if": None if answer is None else {**asdict(answer), "cautions": limits}}
        print(json.dumps({**check_facts(traffic, check), **facts}, indent=1))
    else:
        print("\n".join(_text(traffic, check, answer, limits)))
    return ExitStatus.DONE if check.has_passed else ExitStatus.NOT_ATTAINED


def verdict(figures: Sequence[CheckedFigure]) -> list[str]:
    """One line for each class that is not reproduced, with the cause."""
    found = []
    for group in dict.fromkeys(figure.group for figure in figures if not figure.is_reproduced):
        off = [figure for figure in figures if figure.group == group and not figure.is_reproduced]
        names = ", ".join(figure.name for figure in off)
        cause = (
            "the system was saturated: a device 5 % slower already changes its figures beyond their tolerance"
            if off[0].is_saturated
            else "the model of the device is wrong: a device 5 % slower does not explain the difference"
        )
        found.append(f"{_named(group)}: {names} not reproduced; {cause}")
    return found


def sections_for(traffic: RecordedTraffic, log: Path, config: Config, *, source: str) -> dict[str, Any]:
    """The sections of a configuration for a replay of this log; `source` names it in errors.

    Raises BadInput if it lacks a class of the log, or has tenants that cannot be matched.
    """
    salt = read_salt(log if log.is_dir() else log.parent)
    if config.tenants and salt is None:
        raise BadInput(
            f"{source}: tenants: the log came without its file tenant-salt, so they cannot be matched; add "
            "the file or remove the tenants"
        )
    missing = sorted({row["class"] for row in traffic.rows} - set(config.classes))
    if missing:
        raise BadInput(
            f"{source}: classes: the log has requests of {', '.join(missing)}, which it lacks; add the class"
        )
    values = redacted_values(config, lambda name: tenant_hash(name, salt or b""))
    return served_sections(values, traffic.config["machine"])


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _named(group: Group) -> str:
    return f"{group[0]} ({group[1]})"


def check_text(traffic: RecordedTraffic, check: SelfCheck) -> Iterator[str]:
    """Lines on what was left out of the log, and on every figure of the self-check."""
    yield from (f"left out: {line}" for line in traffic.left_out)
    for kind, delay in traffic.host_delays.items():
        yield f"{kind}: {1e3 * delay:.1f} ms after the engine's step are added to each request"
    if (machine := traffic.machine).sharing is not DeviceSharing.TURNS:
        delay, per_request = (1e3 * seconds for seconds in machine.delivery)
        yield (
            f"generate: {delay:.1f} ms after the step are added, {per_request:.2f} ms for each request in it"
        )
        yield (
            f"steps take {traffic.step_factor:.2f} times as long as learned and during passes "
            f"{machine.step_slowdown:.2f} times that, passes during steps {machine.pass_slowdown:.2f} times"
        )
    yield "self-check on the second half of the log (measured, replayed, tolerance):"
    for each in check.figures:
        scale, unit = (1, "ms") if each.name.endswith("_ms") else (100, "%")
        values = " ".join(f"{scale * value:8.1f}" for value in (each.measured, each.replayed, each.tolerance))
        mark = "" if each.is_reproduced else "  not reproduced"
        yield f"  {_named(each.group):24} {each.name.removesuffix('_ms'):12} {values} {unit}{mark}"
    for group in check.not_judged:
        yield f"  {_named(group):24} fewer than {LEAST_JUDGED} requests; not judged"
    if not check.figures:
        yield "nothing could be judged: record more requests"
    yield from verdict(check.figures)
    if check.has_passed:
        yield "the replay reproduces the log"


def _text(
    traffic: RecordedTraffic, check: SelfCheck, answer: WhatIf | None, limits: Sequence[str]
) -> Iterator[str]:
    yield from check_text(traffic, check)
    if answer is not None:
        yield "attainment under the other configuration:"
        for change in answer.classes:
            yield from _change_text(change)
        yield from (f"caution: {line}" for line in limits)
        yield "requests that change most:" if answer.examples else "no request changes"
        for each_request in answer.examples:
            before, after = _ended(each_request.before), _ended(each_request.after)
            yield f"  {each_request.id} {_named(each_request.group)}: {before} -> {after}"


def _change_text(change: ClassChange) -> Iterator[str]:
    was, would, low, high = (
        100 * value for value in (change.measured, change.predicted, change.low, change.high)
    )
    name, count = _named(change.group), change.requests
    yield f"  {name:24} {was:5.1f} % -> {would:5.1f} % ({low:.1f} to {high:.1f}) of {count:,} requests"
    named = asdict(change.error_parts).items()
    parts = (f"{part.replace('_', '-')} {100 * error:.1f}" for part, error in named)
    yield f"    error {100 * change.error:.1f} points (95 %): {', '.join(parts)}"
    moved = (
        "" if change.latency_change_ms is None else f", latency {change.latency_change_ms:+.1f} ms (median)"
    )
    yield (
        f"    {change.gained} more kept, {change.lost} no longer kept, {change.newly_served} newly served, "
        f"{change.newly_rejected} newly rejected{moved}; length imputed of {100 * change.imputed:.1f} %"
    )


def _ended(result: RequestResult) -> str:
    return (
        result.outcome if result.latency_ms is None else f"{result.outcome} after {result.latency_ms:.0f} ms"
    )


def check_facts(traffic: RecordedTraffic, check: SelfCheck) -> dict[str, Any]:
    """The same as values of JSON."""
    return {
        "requests": len(traffic.rows),
        "left_out": list(traffic.left_out),
        "host_delays_ms": {kind: 1e3 * delay for kind, delay in traffic.host_delays.items()},
        "machine": {
            "sharing": traffic.machine.sharing,
            "delivery_ms": [1e3 * seconds for seconds in traffic.machine.delivery],
            "step_factor": traffic.step_factor,
            "step_slowdown": traffic.machine.step_slowdown,
            "pass_slowdown": traffic.machine.pass_slowdown,
        },
        "self_check": {
            "passed": check.has_passed,
            "figures": [{**asdict(each), "is_reproduced": each.is_reproduced} for each in check.figures],
            "not_judged": list(check.not_judged),
            "verdict": verdict(check.figures),
        },
    }
