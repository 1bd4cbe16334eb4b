"""Measures on real engines what `tandem tune` promises: attainment before, predicted and after, by class.

A server under a bad configuration serves a mix and logs its decisions. `tandem tune` searches on this log,
the log's replay predicts the tuned file, and a server under that file serves the same requests. An
interrupted run goes on where it was. Use a machine with nothing beside: other work changes the engines' speed
between the two runs.

    python -m benchmark_control_plane.experiments.gate.tuning_on_engines --folder DIR
        [--mix memory=8] [--seconds 600] [--minutes 4] [--results FILE]

A mix is the name of an experiment `configs/bench/mix-NAME.yaml` and its requests per second.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.results_file import add_results, write_json, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import read_traffic
from benchmark_control_plane.decision_replay.replay_command import check_facts, sections_for
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    Summary,
    groups_of,
    logged_results,
    summary_of,
)
from benchmark_control_plane.decision_replay.self_check import check_replay
from benchmark_control_plane.decision_replay.what_if import ClassChange, predict
from benchmark_control_plane.experiments.gate.off_policy import logged
from benchmark_control_plane.experiments.gate.tuning_gain import tuned
from controlplane.commands.exit_status import ExitStatus
from controlplane.commands.output import print_table
from controlplane.config import load
from controlplane.config.loader import read_yaml

# It rejects what could wait and serves what came first. The device has time for all: the course of a
# saturated system is not reproduced by its replay, and nothing would be tuned.
_BAD: Mapping[str, Any] = {
    "admission": {"policy": "fits-now", "max_waiting": 1, "engine_queue": 0},
    "scheduling": {"ordering": "fcfs", "engine": {"ordering": "fcfs"}},
}
_ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if more requests are met after than before, 3 if nothing was tuned, otherwise 1."""
    parser = argparse.ArgumentParser(prog="tuning_on_engines", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for logs, YAML files and state")
    parser.add_argument("--mix", default="memory=8", metavar="NAME=RATE")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each of the two logs")
    parser.add_argument("--minutes", type=float, default=4.0, help="passed to tandem tune")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    mix, _, rate = options.mix.partition("=")
    before = logged(options.folder / "before", mix, float(rate), _BAD, options.seconds)
    out, answer_file = options.folder / "better.yaml", options.folder / "answer.json"
    if not answer_file.exists():
        answer = tuned(
            before / "log", before / "served.yaml", out, minutes=options.minutes, processes=options.processes
        )
        write_json(answer_file, answer)
    answer = json.loads(answer_file.read_text(encoding="utf-8"))
    print(answer["reason"], *answer["self_check"]["verdict"], sep="\n", file=sys.stderr, flush=True)
    found: dict[str, Any] = {
        "mix": mix,
        "rate": float(rate),
        "seconds": options.seconds,
        "tune": _facts(answer),
    }
    if answer["answer"] != "better":
        write_or_print(options.results, found)
        return ExitStatus.NOT_ATTAINED
    content = read_yaml(out)
    assert isinstance(content, dict)
    # Each server has a log of its own.
    del content["decision_log"]
    after = logged(options.folder / "after", mix, float(rate), content, options.seconds)
    traffic = with_host_delays(read_traffic(before / "log"))
    check = check_replay(traffic)
    sections = sections_for(traffic, before / "log", load(out), source=str(out))
    predicted = predict(traffic, check, sections, note=lambda text: print(text, file=sys.stderr, flush=True))
    rows = table(predicted.classes, _summaries(after / "log"))
    _print(rows)
    write_or_print(options.results, {**found, **check_facts(traffic, check), "classes": rows})
    return int(rows[-1]["after"] <= rows[-1]["before"])


def _facts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What of the answer of `tandem tune` is kept."""
    chosen = ("answer", "reason", "changes", "held_out", "cautions", "cut")
    return {**{key: answer[key] for key in chosen}, "trials": len(answer["trials"])}


def _summaries(log: Path) -> dict[Group, Summary]:
    """What a log says of each class and kind."""
    traffic = read_traffic(log)
    results = logged_results(traffic.rows)
    return {
        group: summary_of(results, numbers) for group, numbers in groups_of(traffic, lambda row: True).items()
    }


def table(predicted: Sequence[ClassChange], after: Mapping[Group, Summary]) -> list[dict[str, Any]]:
    """Percent of the requests met by class, and last of all requests.

    `error` is what the prediction states (95 %); that of all requests is as if all classes erred alike.
    """
    rows: list[dict[str, Any]] = [
        {
            "class": each.group[0],
            "requests": each.requests,
            "before": 100 * each.measured,
            "predicted": 100 * each.predicted,
            "error": 100 * each.error,
            "requests_after": after[each.group].requests,
            "after": 100 * after[each.group].attainment,
        }
        for each in predicted
    ]
    total: dict[str, Any] = {"class": _ALL, "requests": sum(row["requests"] for row in rows)}
    for name in ("before", "predicted", "error"):
        total[name] = sum(row[name] * row["requests"] for row in rows) / total["requests"]
    total["requests_after"] = sum(row["requests_after"] for row in rows)
    total["after"] = sum(row["after"] * row["requests_after"] for row in rows) / total["requests_after"]
    return [
        {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}
        for row in [*rows, total]
    ]


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [
        (
            row["class"], f"{row['requests']:,}", f"{row['before']:.1f} %",
            f"{row['predicted']:.1f} +- {row['error']:.1f} %", f"{row['after']:.1f} %",
        )
        for row in rows
    ]  # fmt: skip
    print_table(
        "requests that met their objectives", ("class", "requests", "before", "predicted", "after"), lines
    )


if __name__ == "__main__":
    sys.exit(main())
