"""What `tandem tune` found, as facts for JSON and page, and as text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replay_command import check_facts, check_text
from benchmark_control_plane.decision_replay.replay_limits import cautions
from benchmark_control_plane.decision_replay.self_check import LEAST_JUDGED, SelfCheck
from benchmark_control_plane.report.formats import yaml_value
from benchmark_control_plane.tuning.batch_budgets import EXTRAPOLATED
from benchmark_control_plane.tuning.comparison import COST_PER_KEY, Comparison
from benchmark_control_plane.tuning.search_space import value_of
from benchmark_control_plane.tuning.tuning_run import BlockSets, Tuned
from benchmark_control_plane.tuning.unattainable import unattainable_shares
from controlplane.commands.output import print_table
from controlplane.config import Config
from controlplane.core.engine_reports import DeviceSharing

_PACING = "scheduling.engine.decode_pacing"
BETTER, NOTHING_BETTER, NOT_REPRODUCED = "better", "nothing-better", "not-reproduced"


def tuning_facts(
    log: Path, path: Path, config: Config, traffic: RecordedTraffic, blocks: BlockSets, found: Tuned
) -> dict[str, Any]:
    """All facts, as values of JSON; shares from 0 to 1, gains in points."""
    held_out = blocks.held_out[: found.blocks if found.verdict is None else len(found.verdict.gains)]
    answer = NOT_REPRODUCED if not found.check.has_passed else BETTER if found.is_better else NOTHING_BETTER
    return {
        "answer": answer,
        "reason": _reason(path, blocks, found),
        "log": str(log),
        "config": str(path),
        **check_facts(traffic, found.check),
        "out_of_reach": unattainable_shares(traffic, config),
        "blocks": {
            "search": len(blocks.search[: found.blocks]),
            "held_out": len(held_out),
            "held_out_requests": sum(block.last - block.first for block in held_out),
        },
        "trials": [
            {
                "changes": dict(each.changes), "blocks": each.blocks,
                "gain": each.comparison.gain.mean, "value": each.comparison.value,
            }
            for each in found.tried
        ],
        "changes": [
            {
                "key": each.key,
                "before": value_of(config, each.key),
                "after": (found.changes or {})[each.key],
                "gain": None if each.gain is None else each.gain.mean,
                "error": None if each.gain is None else each.gain.error,
                "is_measured": each.is_measured,
                "basis": _basis(traffic, each.key),
            }
            for each in found.effects
        ],
        "held_out": None if found.verdict is None else _comparison(found.verdict),
        "loads": [asdict(each) for each in found.loads],
        "cautions": cautions(traffic, config),
        "cut": list(found.cuts),
        "files": {},
    }  # fmt: skip


def print_tuning(traffic: RecordedTraffic, check: SelfCheck, facts: Mapping[str, Any]) -> None:
    """Prints the facts."""
    print("\n".join(check_text(traffic, check)))
    if (held_out := facts["held_out"]) is not None:
        rows = [
            (c["name"], f"{c['requests']:,}", percent(c["before"]), percent(c["after"]),
             percent(c["rejected_before"]), percent(c["rejected_after"]))
            for c in held_out["classes"]
        ]  # fmt: skip
        header = ("class", "requests", "met", "met after", "rejected", "rejected after")
        print_table("attainment on the held-out blocks", header, rows)
        parts = (f"{part.replace('_', '-')} {error:.1f}" for part, error in held_out["error_parts"].items())
        print(f"error of the gain: {held_out['error']:.1f} points (95 %): {', '.join(parts)}")
    if facts["loads"]:
        header_over_load = ("load of the log", "met", "met after", "95 % of the difference")
        print_table("attainment over load, weighted by class", header_over_load, _load_rows(facts["loads"]))
    for change in facts["changes"]:
        before, after = yaml_value(change["before"]), yaml_value(change["after"])
        print(f"{change['key']}: {before} -> {after}: {change_gain(change)}")
    for name, share in facts["out_of_reach"].items():
        print(out_of_reach_text(name, share))
    for line in facts["cautions"]:
        print(f"caution: {line}")
    for line in facts["cut"]:
        print(f"cut to end in time: {line}")
    print(facts["reason"])
    for what, file in facts["files"].items():
        print(f"{what}: {file}")


def _load_rows(loads: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            f"{100 * each['load']:.0f} %",
            f"{each['before']:.1f} %",
            f"{each['after']:.1f} %",
            f"{each['error']:.1f}",
        )
        for each in loads
    ]


def out_of_reach_text(name: str, share: float) -> str:
    """What no configuration can do for a class."""
    return (
        f"class {name}: {percent(share)} of the requests cannot attain their objectives, because an idle "
        "device takes longer"
    )


def change_gain(change: Mapping[str, Any]) -> str:
    """What a changed key brings, and what that rests on if no step of the log shows it."""
    basis = "" if change["basis"] is None else f"; {change['basis']}"
    if change["gain"] is None:
        known = "needed by the other changes" if change["is_measured"] else "its effect was not measured"
        return f"{known}{basis}"
    return f"{change['gain']:+.1f} points of attainment (95 %: {change['error']:.1f}){basis}"


def _basis(traffic: RecordedTraffic, key: str) -> str | None:
    """What the gain of a key rests on, if the log shows nothing of its kind."""
    if key == _PACING and traffic.machine.sharing is not DeviceSharing.TURNS:
        return "extrapolated: the log has one pacing"
    return EXTRAPOLATED.get(key)


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f} %"


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "before": found.before,
        "gain": found.gain.mean,
        "error": found.gain.error,
        "error_parts": {
            "sampling": found.sampling.error,
            "self_check": found.self_check,
            "device": found.device,
        },
        "classes": [asdict(each) for each in found.classes],
    }


def _not_reproduced(check: SelfCheck) -> str:
    """Why a check failed, and what to do; docs/tuning.md says more."""
    if not check.figures:
        return (
            f"no class has {LEAST_JUDGED} requests of a kind in the blocks of the second half; record more "
            "requests, or give more --minutes if blocks were cut"
        )
    is_saturated = all(each.is_saturated for each in check.figures if not each.is_reproduced)
    remedy = (
        "give a segment of the log from a time with less load, or record one"
        if is_saturated
        else "record while nothing else computes on the device, for longer, and give that part of the log"
    )
    return f"the replay does not reproduce the log; {remedy}"


def _reason(path: Path, blocks: BlockSets, found: Tuned) -> str:
    """The answer in one sentence."""
    if not found.check.has_passed:
        return f"Nothing was tuned: {_not_reproduced(found.check)}."
    if found.best is None:
        whole = sum(each.blocks == len(blocks.search[: found.blocks]) for each in found.tried)
        return (
            f"Nothing better found: of {len(found.tried)} trials, {whole} of them on all blocks, none has a "
            f"higher attainment than {path} net of what its changes cost."
        )
    if found.verdict is None and found.changes:
        return "Nothing better found: the time was over before the verdict; give more --minutes."
    if found.verdict is None:
        return "Nothing better found: no changed key of the best trial brings more than chance."
    verdict, gain = found.verdict, found.verdict.gain
    text = f"{gain.mean:+.1f} points (95 %: {gain.error:.1f}) on the held-out blocks"
    if found.is_better:
        before = found.verdict.before
        return f"Better: attainment, weighted by class, {before:.1f} -> {before + gain.mean:.1f} %, {text}."
    if found.verdict.losers:
        lost = ", ".join(f"{each.name} {each.lost:.1f}" for each in found.verdict.losers)
        return f"Nothing better found: {text}, but classes lose more points than they may: {lost}."
    if gain.low > 0:
        cost = COST_PER_KEY * verdict.changed
        return f"Nothing better found: {text}, less than the changed keys count: {cost:.1f} points."
    if verdict.sampling.low > 0:
        return (
            f"Nothing better found: the best trial changes {text}, more than chance but no more than the "
            f"model of the machine may be wrong (self-check {verdict.self_check:.1f}, a slower device "
            f"{verdict.device:.1f})."
        )
    return f"Nothing better found: the best trial changes {text}, no more than chance."
