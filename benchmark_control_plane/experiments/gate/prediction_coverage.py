"""Measures how often predictions of `tandem replay --config B` are within their error, on simulated logs.

Each log is recorded on a simulated device that its replay cannot represent: its steps take a time that is
not linear in what they hold, and passes and steps slow each other down. What each other configuration does
with the same requests on the same device is simulated, too. Printed are for each part of the error the share
of classes and pairs whose prediction is within it, within all parts, and how wide these are; logs that are
not reproduced are counted and left out, as the command does.

    python -m benchmark_control_plane.experiments.gate.prediction_coverage [--requests 1000] [--rates 4 5.5 7]
        [--seeds 3 4] [--results FILE]
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import hypot
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from backends.cost_models.step_time import BatchTime, StepLoad, affine, embedding_line, llm_only, sequential
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import read_traffic
from benchmark_control_plane.decision_replay.self_check import check_replay
from benchmark_control_plane.decision_replay.what_if import ClassChange, predict
from benchmark_control_plane.experiments.gate.off_policy import OTHERS
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import (
    Offered,
    SimulatedEmbedding,
    SimulatedRequest,
    arrival_times,
    simulate,
)
from controlplane.config.documents import merged
from controlplane.core.engine_reports import DeviceSharing

_PARTS = ("sampling", "self_check", "device", "lengths")
_CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 400, "tpot_ms": 60},
    "standard": {"priority": 1, "default": True, "sheddable": False, "ttft_ms": 4_000},
}
_SECTIONS: dict[str, Any] = {"classes": _CLASSES, "admission": {"length_predictor": "history"}}


@dataclass(frozen=True, slots=True)
class Predicted:
    """One class of one pair; shares."""

    log: str
    other: str
    group: str
    requests: int
    measured: float
    predicted: float
    real: float
    parts: Mapping[str, float]

    def error(self, parts: Sequence[str]) -> float:
        """These parts together."""
        return hypot(*(self.parts[part] for part in parts))

    def is_within(self, parts: Sequence[str]) -> bool:
        """Whether what really happens differs by no more than they do."""
        return abs(self.predicted - self.real) <= self.error(parts) + 1e-9


def machines() -> dict[str, Machine]:
    """Devices on which passes and steps take turns, and on which they slow each other down."""
    line = sequential(llm_only(affine(0.04, 1e-4, 4e-4, 1e-7)), embedding_line(0.005, 5e-5))
    turns = Machine(
        _curved(line), kv_bytes=900 * 16 * 1_024, max_model_tokens=1_024, max_running=32, step_tokens=256
    )
    beside = replace(
        turns, sharing=DeviceSharing.BESIDE, step_slowdown=1.5, pass_slowdown=2.0,
        step_spread=(0.8, 1.0, 1.2), delivery=(0.004, 0.001),
    )  # fmt: skip
    return {"in turns": turns, "beside": beside}


def _curved(line: BatchTime) -> BatchTime:
    """Steps with many tokens take up to a quarter longer than the line, as where a batch fills tiles."""

    def seconds(load: StepLoad) -> float:
        return line(load) * (1 + 0.25 * min(1.0, (load.decodes + load.prefill_tokens) / 256) ** 2)

    return seconds


def offered(rate: float, count: int, seed: int) -> list[Offered]:
    """Bursty chat of two classes, and embeddings of both."""
    rng = np.random.default_rng(seed)
    found: list[Offered] = []
    for n, at in enumerate(arrival_times(rng, rate, count, variation=1.5)):
        name = "interactive" if n % 3 else "standard"
        if n % 4 == 0:
            lengths = tuple(int(tokens) for tokens in rng.integers(5, 200, 8))
            found.append(SimulatedEmbedding(at, lengths, name))
            continue
        output = min(int(rng.geometric(1 / 60)), 400)
        found.append(
            SimulatedRequest(
                at, int(rng.integers(80, 300)), output, 400, name, prefix_group=n % 5, prefix_tokens=64
            )
        )
    return found


def predictions(name: str, machine: Machine, requests: Sequence[Offered]) -> Iterator[Predicted]:
    """The predictions from one log; none if its replay does not reproduce it."""
    with TemporaryDirectory() as folder:
        simulate(requests, machine, {**_SECTIONS, "decision_log": {"dir": folder, "sample": 0}})
        traffic = with_host_delays(read_traffic(Path(folder)))
    check = check_replay(traffic)
    if not check.has_passed:
        return
    for other, change in OTHERS.items():
        sections = merged(_SECTIONS, change)
        answer = predict(traffic, check, sections, note=lambda text: None)
        truth = simulate(requests, machine, sections).records
        met = {number: record.outcome == "met" for number, record in enumerate(truth)}
        for each in answer.classes:
            numbers = [
                int(row["id"].partition("-")[0])
                for row in traffic.rows
                if (row["class"], row["kind"]) == each.group
            ]
            yield _row(name, other, each, fmean(met[number] for number in numbers))


def _row(log: str, other: str, change: ClassChange, real: float) -> Predicted:
    parts = {part: round(error, 4) for part, error in asdict(change.error_parts).items()}
    return Predicted(
        log, other, " ".join(change.group), change.requests, round(change.measured, 4),
        round(change.predicted, 4), round(real, 4), parts,
    )  # fmt: skip


def summary(found: Sequence[Predicted]) -> dict[str, Any]:
    """How often reality is within each part, within all but one, and within all; and how wide these are."""
    choices: dict[str, Sequence[str]] = {part: (part,) for part in _PARTS}
    choices |= {f"without {part}": [each for each in _PARTS if each != part] for part in _PARTS}
    choices["all parts"] = _PARTS

    def within(chosen: Sequence[Predicted]) -> dict[str, float]:
        return {
            name: round(fmean(each.is_within(parts) for each in chosen), 3)
            for name, parts in choices.items()
            if chosen
        }

    near = [each for each in found if each.predicted >= 0.995]
    return {
        "predictions": len(found),
        "mean_error_points": round(100 * fmean(abs(each.predicted - each.real) for each in found), 2),
        "within": within(found),
        "median_points": {
            name: round(100 * median(each.error(parts) for each in found), 2)
            for name, parts in choices.items()
        },
        "predicted_near_100": {"predictions": len(near), **within(near)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each prediction as it is made, and the summary."""
    parser = argparse.ArgumentParser(prog="prediction_coverage", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 5.5, 7.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4])
    add_results(parser)
    options = parser.parse_args(arguments)
    found: list[Predicted] = []
    logs = reproduced = 0
    for name, machine in machines().items():
        for rate in options.rates:
            for seed in options.seeds:
                rows = list(
                    predictions(
                        f"{name}, {rate:g}/s, seed {seed}", machine, offered(rate, options.requests, seed)
                    )
                )
                logs, reproduced = logs + 1, reproduced + bool(rows)
                found += rows
                for each in rows:
                    print(json.dumps(asdict(each)), file=sys.stderr, flush=True)
    facts = {"requests": options.requests, "logs": logs, "reproduced": reproduced}
    write_or_print(options.results, {**facts, **(summary(found) if found else {})})
    return 0


if __name__ == "__main__":
    sys.exit(main())
