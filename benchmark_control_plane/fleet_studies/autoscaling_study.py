"""Runs the autoscaling rule on the work of recorded arrivals, against fixed numbers of boxes.

Time is that of the recording, and its volume is scaled to a mean of so many boxes' work. Work is a fluid:
what arrives beyond what the serving boxes carry counts as overload, and does not wait. Routing, admission and
the boxes' own queues are not simulated.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmark_control_plane.fleet_studies.scaled_host import ScaledHost
from benchmark_control_plane.fleet_studies.study_file import AutoscalingStudy
from benchmark_control_plane.judge.traces import NAMED, TracedRequest, read_trace
from benchmark_control_plane.simulator.cluster.scenario import BoxModel, Floats
from controlplane.fleet.autoscaling import BoxScaler


def autoscaling(study: AutoscalingStudy, data: Path) -> dict[str, Any]:
    """Rows by trace: the rule, and as many boxes all the time as it had on average and at most.

    Raises BadInput if a trace cannot be read.
    """
    return {
        "study": "autoscaling",
        "mean_load": study.mean_load,
        "start_s": study.rule.start,
        "utilisation": study.rule.utilisation,
        "lower_after_s": study.rule.lower_after,
        "seeds": list(study.seeds),
        "rows": [row for name in study.traces for row in _rows(study, name, data)],
    }


def _rows(study: AutoscalingStudy, name: str, data: Path) -> Iterator[dict[str, Any]]:
    file, columns = NAMED[name]
    load = demand(read_trace(data / file, columns), study.mean_load, study.bin_s)
    hosts = [_scaled(study, load, seed) for seed in study.seeds]
    serving = [host.serving for host in hosts]
    changes = fmean(len(host.targets) for host in hosts)
    yield {"trace": name, "boxes": "scaled", "changes": round(changes, 1), **_outcome(load, serving)}
    average, most = fmean(map(fmean, serving)), max(map(max, serving))
    for label, count in (("average", round(average)), ("most", most)):
        yield {"trace": name, "boxes": label, "changes": 0.0, **_outcome(load, [[count] * len(load)])}


def demand(requests: Sequence[TracedRequest], mean_load: float, bin_seconds: int) -> Floats:
    """The work that arrives in each second, in boxes, as the mean of its bin of so many seconds."""
    model = BoxModel()
    work = [model.per_prompt_token * each.prompt + model.per_sequence * each.output for each in requests]
    bins = np.array([int(each.at // bin_seconds) for each in requests])
    # The last bin is not full.
    in_bin = np.bincount(bins, work)[:-1]
    return np.repeat(in_bin / in_bin.mean() * mean_load, bin_seconds)


def _scaled(study: AutoscalingStudy, load: Floats, seed: int) -> ScaledHost:
    rule = study.rule
    first = min(max(ceil(load[0] / rule.utilisation), rule.min_boxes), rule.max_boxes)
    host = ScaledHost(lambda now: float(load[int(now)]), BoxScaler(rule), first, study.noise)
    host.run(len(load), seed)
    return host


def _outcome(load: Floats, serving: Sequence[Sequence[int]]) -> dict[str, float]:
    """Means over the runs."""
    excess = [np.maximum(0.0, load - np.array(boxes)) for boxes in serving]
    return {
        "mean_boxes": round(fmean(map(fmean, serving)), 1),
        "most_boxes": max(map(max, serving)),
        "overloaded_s": round(fmean(float((each > 0).sum()) for each in excess), 1),
        "overload_percent": round(100 * fmean(float(each.sum() / load.sum()) for each in excess), 2),
    }
