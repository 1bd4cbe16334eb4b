"""Compares what `tandem replay LOG --config B` predicts with what B keeps on real engines.

In each mix a server under configuration A logs its decisions, the log's replay predicts other configurations,
and each of these then serves the same requests. Printed are the self-check of each log of A, and for each
pair the share of requests met under A, the one predicted for B, and the one measured under B, in points over
all classes. The sign counts where A and B differ by more than 3 points. An interrupted run goes on where it
was. Use a machine with nothing beside: other work changes the engines' speed between two runs.

    python -m benchmark_control_plane.experiments.gate.off_policy --folder DIR
        [--mixes memory=8 compute=6 bursty=5] [--seconds 600] [--results FILE]

A mix is the name of an experiment `configs/bench/mix-NAME.yaml` and its requests per second.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark_control_plane.common.results_file import add_results, file_name, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic, read_traffic
from benchmark_control_plane.decision_replay.replay_command import check_facts, check_text, sections_for
from benchmark_control_plane.decision_replay.replayed_requests import groups_of, logged_results, summary_of
from benchmark_control_plane.decision_replay.self_check import SelfCheck, check_replay
from benchmark_control_plane.decision_replay.what_if import predict
from benchmark_control_plane.judge.experiment_file import Experiment, ExperimentPlan, read_experiment
from benchmark_control_plane.judge.experiment_schema import ExperimentClass, WindowSection
from benchmark_control_plane.judge.measurement_stages import Bench, staged
from benchmark_control_plane.judge.reference_system import objectives_from
from benchmark_control_plane.judge.system_schema import SystemSection
from controlplane.config import load
from controlplane.config.documents import merged

_MIXES = ("memory=8", "compute=6", "bursty=5")
_WARMUP_S, _DRAIN_S = 10.0, 60.0
_SIGN_POINTS, _MOST_ERROR_POINTS = 3.0, 3.0
_HOLDS = "holds"
_CLASSES = {
    "interactive": ExperimentClass(priority=2, ttft_ms=500, tpot_ms=60),
    "documents": ExperimentClass(priority=1, e2e_ms=3_000),
    "batch": ExperimentClass(sheddable=False, default=True, e2e_ms=10_000),
}
_LOGGING_CONFIGURATION = "a"
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "first come first served": {"scheduling": {"ordering": "fcfs", "engine": {"ordering": "fcfs"}}},
    "short queue": {"admission": {"max_waiting": 4}},
    "engine's own scheduler": {"scheduling": {"engine": "off"}},
    "no pacing": {"scheduling": {"engine": {"decode_pacing": 0}}},
}
"""Configurations whose share of requests met is predicted: changes to the default arrangement."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Requests met under A and another configuration, in points; `error` is what the prediction states."""

    mix: str
    other: str
    under_a: float
    predicted: float
    error: float
    measured: float

    @property
    def has_right_sign(self) -> bool | None:
        """Whether the predicted change has the sign of the measured one; None for a small one."""
        if abs(self.measured - self.under_a) <= _SIGN_POINTS:
            return None
        return (self.predicted - self.under_a) * (self.measured - self.under_a) > 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every log is reproduced, nine of ten signs are right and the mean error is at most 3 points.

    It is 1 if no sign was judged.
    """
    parser = argparse.ArgumentParser(prog="off_policy", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mixes", nargs="+", default=_MIXES, metavar="NAME=RATE")
    parser.add_argument("--others", nargs="*", default=list(OTHERS), choices=OTHERS, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=600.0)
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    mixes = {name: float(rate) for name, rate in (mix.split("=") for mix in options.mixes)}
    logs = {
        (mix, name): logged(options.folder / mix / file_name(name), mix, rate, change, options.seconds)
        for mix, rate in mixes.items()
        for name, change in {
            _LOGGING_CONFIGURATION: {}, **{name: OTHERS[name] for name in options.others}
        }.items()
    }  # fmt: skip
    pairs, checks = [], {}
    for mix in mixes:
        traffic = with_host_delays(read_traffic(logs[mix, _LOGGING_CONFIGURATION] / "log"))
        check = check_replay(traffic)
        checks[mix] = check_facts(traffic, check)
        print(f"{mix}:", *check_text(traffic, check), sep="\n  ", flush=True)
        for name in options.others:
            pairs.append(_pair(mix, name, traffic, check, logs[mix, name]))
            print(json.dumps(asdict(pairs[-1])), flush=True)
    found = summary(pairs, checks)
    print(found["verdict"], file=sys.stderr)
    write_or_print(options.results, {"seconds": options.seconds, "rates": mixes, **found})
    return int(not found["holds"])


def logged(folder: Path, mix: str, rate: float, change: Mapping[str, Any], seconds: float) -> Path:
    """Serves the mix under the default configuration with a change, unless it has been; the folder of it."""
    log, done = folder / "log", folder / "run.json"
    if done.exists():
        return folder
    shutil.rmtree(log, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    plan = _plan(mix, seconds)
    logging = {"decision_log": {"dir": str(log.resolve()), "sample": 0.0}}
    system = SystemSection("served", "tandem", tandem=merged(logging, change))
    objectives = objectives_from(plan, {})
    with staged(plan, system, objectives, folder) as stage:
        bench = Bench(Experiment(plan, "", Path()), objectives, rate)
        entry, _ = bench.run(stage, system, 1.0, 0, lambda *_: None)
    if not entry["valid"]:
        print(f"{folder}: {entry['why_invalid']}", file=sys.stderr, flush=True)
    done.write_text(json.dumps(entry, default=str), encoding="utf-8")
    return folder


def _plan(mix: str, seconds: float) -> ExperimentPlan:
    plan = read_experiment(Path(f"configs/bench/mix-{mix}.yaml"), Path()).plan
    assert plan.live is not None
    # Not every processor computes in bfloat16; the cache holds the same number of tokens.
    engine = plan.live.chat.engine
    kv_bytes = 2 * engine["kv_cache_memory_bytes"]
    chat = replace(plan.live.chat, engine={**engine, "dtype": "float32", "kv_cache_memory_bytes": kv_bytes})
    window = WindowSection(_WARMUP_S, seconds, _DRAIN_S)
    return replace(plan, classes=_CLASSES, live=replace(plan.live, chat=chat), window=window)


def _pair(mix: str, name: str, traffic: RecordedTraffic, check: SelfCheck, other: Path) -> Pair:
    config = load(other / "served.yaml")
    sections = sections_for(traffic, other / "log", config, source=name)
    answer = predict(traffic, check, sections, note=lambda text: print(text, file=sys.stderr, flush=True))
    requests = sum(each.requests for each in answer.classes)

    def mean(of: str) -> float:
        share: float = sum(getattr(each, of) * each.requests for each in answer.classes) / requests
        return round(100 * share, 2)

    measured = _met(read_traffic(other / "log"))
    return Pair(mix, name, mean("measured"), mean("predicted"), mean("error"), measured)


def _met(traffic: RecordedTraffic) -> float:
    """Points of the requests of a log that were met."""
    groups, results = groups_of(traffic, lambda row: True), logged_results(traffic.rows)
    numbers = [number for group in groups.values() for number in group]
    return round(100 * summary_of(results, numbers).attainment, 2)


def summary(pairs: Sequence[Pair], checks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The pairs, the self-checks by mix, and the verdict, which holds only if a sign was judged."""
    signs = [sign for pair in pairs if (sign := pair.has_right_sign) is not None]
    error = fmean(abs(pair.predicted - pair.measured) for pair in pairs) if pairs else None
    reproduced = sum(check["self_check"]["passed"] for check in checks.values())
    if reproduced < len(checks) or sum(signs) < 0.9 * len(signs) or (error or 0.0) > _MOST_ERROR_POINTS:
        verdict = "does not hold"
    elif not signs:
        verdict = f"nothing judged: no pair differs by more than {_SIGN_POINTS:g} points"
    else:
        verdict = _HOLDS
    return {
        "self_checks": checks,
        "pairs": [asdict(pair) for pair in pairs],
        "logs_reproduced": reproduced,
        "right_signs": sum(signs),
        "judged_signs": len(signs),
        "mean_error_points": None if error is None else round(error, 2),
        "verdict": verdict,
        "holds": verdict == _HOLDS,
    }


if __name__ == "__main__":
    sys.exit(main())
